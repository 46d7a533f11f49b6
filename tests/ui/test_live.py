"""The live view: on a made-up feed, then on a server whose requests are chunked, retracted and
held while their engine dies."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import pytest

from tests.ui.conftest import NewPage, sync_api
from tests.ui.fake_feed import feed, send
from tests.ui.recorded_feed import (
    HOSTILE,
    NOW,
    deaths,
    head,
    hello,
    log,
    recorded,
    requests,
    row,
    short,
    steps,
)

expect = sync_api.expect


def rows(page: Any, section: str, caption: str) -> list[list[str]]:
    """The cells of a chart's twin."""
    page.locator(f"#{section}").get_by_role("button", name=f"Show as table: {caption}").click()
    table = page.locator(f"#{section} table.data").first
    expect(table).to_be_visible()
    read = "t => [...t.tBodies[0].rows].map(r => [...r.cells].map(c => c.innerText))"
    found: list[list[str]] = table.evaluate(read)
    return found


def test_the_recorded_feed_is_shown_whole(page: Any) -> None:
    feed(page, recorded())
    page.goto("/ui/#/live")
    expect(page.locator("#live-head .badge")).to_have_text("ready")
    expect(page.locator("#live-requests .summary")).to_contain_text("200 requests shown: 8 open")
    expect(page.locator("#live-steps .summary")).to_contain_text("600 steps")
    falls = rows(page, "live-requests", "Requests")
    assert len(falls) == 200
    names = [hashlib.sha256(str(i).encode()).hexdigest()[:12] for i in range(200)]
    assert [line[0] for line in falls] == names  # newest on top
    bare = [re.sub(r" [\d.–]+( ms| s|)(?= →|$)", "", line[2]) for line in falls]
    assert bare[0] == "queue"
    assert bare[1] == "queue → prefill → decode"
    assert bare[3] == "grammar compile → queue → prefill → decode"
    assert bare[4] == "queue → prefill → decode → engine dead → queue → prefill → decode"
    assert bare[5] == "queue → prefill → decode → retracted → prefill → decode"
    assert falls[9][7] == "abort" and falls[0][7] == "open"
    times = rows(page, "live-steps", "Steps")
    assert [int(line[0]) for line in times] == list(range(1599, 999, -1))
    columns = steps()[1]["columns"]
    wanted = [
        f"{columns['model_ms'][at]:.{2 if columns['model_ms'][at] < 10 else 1}f} ms"
        for at in range(599, -1, -1)
    ]
    assert [line[4] for line in times] == wanted
    pages = rows(page, "live-memory", "Pages of the KV pool by owner")
    facts = head(NOW, 600)[1]["pages"]
    assert [int(line[1]) for line in pages] == [
        facts[name] for name in ("running", "cached_locked", "cached_free", "free", "window")
    ]
    assert "killed by SIGKILL" in page.locator("#live-deaths").inner_text()
    assert "2: 0.910 s to 1.40 s, 1 not yet" in page.locator("#live-deaths").inner_text()


def test_hostile_names_and_lines_stay_text(page: Any) -> None:
    feed(page, short())
    page.goto("/ui/#/live")
    falls = rows(page, "live-requests", "Requests")
    assert falls[1][8] == HOSTILE[1] and falls[11][8] == HOSTILE[5]
    lines = page.locator("#live-log .log-line").all_inner_texts()
    assert len(lines) == 30 and any(HOSTILE[0] in line for line in lines)
    assert page.locator(".live :is(img, script, b > i)").count() == 0
    assert page.evaluate("window.owned") is None
    page.get_by_label("Filter").fill("LINE 1")
    expect(page.locator("#live-log .log-line")).to_have_count(5)
    page.get_by_label("Filter").fill("")
    page.get_by_label("Level").select_option("ERROR")
    expect(page.locator("#live-log .log-line")).to_have_count(10)
    page.locator("#live-log").get_by_role("button", name="Pause").click()
    send(page, [log()])
    expect(page.locator("#live-log .summary")).to_have_text("10 of 30 lines")
    page.locator("#live-log").get_by_role("button", name="Pause").click()
    expect(page.locator("#live-log .summary")).to_have_text("20 of 60 lines")


def test_the_keyboard_opens_a_request_and_a_step(page: Any) -> None:
    feed(page, short())
    page.route(
        "**/live/request/*",
        lambda route: route.fulfill(
            json=row(1) | {"steps": {"0": [1010, 1011, 3]}, "prompt_text": HOSTILE[0]}
        ),
    )
    page.goto("/ui/#/live")
    expect(page.locator("#live-steps .summary")).to_contain_text("30 steps")
    page.locator(".fall").focus()
    for key in ("ArrowDown", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    name = hashlib.sha256(b"1").hexdigest()[:12]
    expect(page).to_have_url(re.compile(f"#/live/{name}$"))
    expect(page.locator(".detail h3")).to_have_text(f"Request {name}")
    expect(page.locator(".detail h3")).to_be_focused()
    expect(page.locator(".detail")).to_contain_text("Its steps: 3 of the server")
    expect(page.locator(".detail-text")).to_have_text(HOSTILE[0])
    page.get_by_role("button", name="Show them in the steps").click()
    picked = page.get_by_role("region", name="Requests in this step")
    expect(picked.locator("h3")).to_contain_text("Step 1010")
    # requests whose spans of work overlap the step, worked out here once more
    columns = steps(30)[1]["columns"]
    start = columns["start_s"][10]
    end = (
        start
        + sum(columns[f"{n}_ms"][10] for n in "plan prepare model sample commit wait".split()) / 1e3
    )
    inside = [
        hashlib.sha256(str(i).encode()).hexdigest()[:12]
        for i in range(14)
        if any(
            p in ("prefill", "decode") and a < end and (b is None or b > start)
            for p, a, b, _ in row(i)["spans"]
        )
    ]
    assert picked.locator("tbody tr td:first-child").all_inner_texts() == inside != []
    send(page, [steps(1, 1030, NOW + 0.1)])  # held: new steps do not move it
    expect(picked.locator("h3")).to_contain_text("Step 1010")
    page.get_by_role("button", name="Go on").click()
    expect(picked).to_have_count(0)
    page.locator("#live-steps .chart").first.focus()
    for key in ("End", "ArrowLeft", "Enter"):
        page.keyboard.press(key)
    expect(page.locator("#live-steps .detail h3")).to_contain_text("Step 1029")
    page.keyboard.press("+")
    expect(page.get_by_role("button", name="Whole range")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Whole range")).to_have_count(0)


def test_the_feed_goes_on_after_it_was_lost(page: Any) -> None:
    """A server that starts again counts its steps from 0; frames sent twice count once."""
    feed(page, [hello(), head(), requests(3), steps(5, 10), steps(5, 12)])
    page.goto("/ui/#/live")
    expect(page.locator("#live-steps .summary")).to_contain_text("7 steps")
    send(page, [hello(NOW + 9), steps(2, 0, NOW + 9), ("requests", {"rows": [row(9, NOW + 9)]})])
    expect(page.locator("#live-steps .summary")).to_contain_text("2 steps")
    expect(page.locator("#live-requests .summary")).to_contain_text("4 requests")
    send(page, [hello(10.0), head(10.0)])  # another machine
    expect(page.locator("#live-requests .summary")).to_contain_text("0 requests")
    send(page, [deaths(), deaths()])
    expect(page.locator("#live-deaths tbody tr")).to_have_count(1)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(new_page: NewPage, axe: str, scheme: str) -> None:
    """In light colours with all tables open, in dark ones with charts; as narrow as a phone."""
    options = {"viewport": {"width": 320, "height": 700}, "reduced_motion": "reduce"}
    page = new_page(color_scheme=scheme, **options)
    feed(page, short())
    page.goto("/ui/#/live")
    expect(page.locator("#live-requests .summary")).to_contain_text("14 requests")
    assert page.evaluate("document.querySelector('main').scrollWidth") <= 320
    page.evaluate(axe)
    if scheme == "light":
        for button in page.get_by_role("button", name=re.compile("^Show as table")).all():
            button.click()
    found = page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
    assert [(one["id"], one["nodes"][0]["html"]) for one in found] == []
