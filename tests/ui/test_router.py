"""The gateway's page in a browser, over mock workers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.router.processes import Process, gateway_process, mock_process
from tests.ui.conftest import NewPage, sync_api
from tests.ui.test_play import run_axe

expect = sync_api.expect


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    """A gateway over two workers; the page's fixtures take it for the server."""
    started: list[Process] = []
    try:
        started += [mock_process(), mock_process()]
        urls = [one.url for one in started]
        started.append(gateway_process("--worker-urls", *urls, "--policy", "round_robin"))
        yield started[-1]
    finally:
        for one in reversed(started):
            one.kill()


def test_workers_are_rows(page: Any, server: Process) -> None:
    page.goto("/")
    expect(page).to_have_url(re.compile("/ui/$"))
    expect(page.locator(".top nav a")).to_have_text(["Chat", "Workers"])
    page.goto("/ui/#/workers")
    rows = page.get_by_role("group", name="Workers", exact=True).locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.locator(".state")).to_have_text(["ready", "ready"])
    body = {"model": "mock", "messages": [{"role": "user", "content": "x"}]}
    for _ in range(4):
        server.ask("/v1/chat/completions", body)
    choices = page.get_by_role("group", name="Choices of the policy").locator("tbody tr")
    expect(choices).to_have_count(2)
    expect(choices.nth(0).locator("td").nth(3)).to_have_text(re.compile(r"^\d+$"))
    expect(page.get_by_text("2 of 2 workers ready. Policy round_robin")).to_be_visible()


def test_a_worker_is_drained_and_taken_back(page: Any) -> None:
    page.goto("/ui/#/workers")
    row = page.get_by_role("group", name="Workers", exact=True).locator("tbody tr").first
    row.get_by_role("button", name="Drain").click()
    expect(row.get_by_role("button", name="Cancel")).to_be_focused()
    row.get_by_role("button", name="Yes: Drain").click()
    expect(row.locator(".state")).to_have_text("draining")
    expect(page.get_by_text("drained, 0 streams moved")).to_be_visible()
    row.get_by_role("button", name="Give requests again").click()
    expect(row.locator(".state")).to_have_text("ready")


def test_the_chat_works_through_the_gateway(page: Any, server: Process) -> None:
    page.goto("/ui/#/chat")
    box = page.get_by_role("textbox").last
    box.fill("hello")
    box.press("Enter")
    expect(page.locator("main")).to_contain_text(re.compile(r"\bt\d+"))


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe(new_page: NewPage, axe: str, theme: str) -> None:
    page = new_page(color_scheme=theme)
    page.goto("/ui/#/workers")
    expect(page.get_by_role("group", name="Workers", exact=True).locator("tbody tr")).to_have_count(
        2
    )
    assert run_axe(page, axe) == []
