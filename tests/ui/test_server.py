"""The server view and the API view in a browser."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from tests.end_to_end.server import RunningServer
from tests.ui.conftest import NewPage, sync_api
from tests.ui.test_play import run_axe

expect = sync_api.expect


def test_the_server_in_figures(page: Any, server: RunningServer) -> None:
    page.goto("/ui/#/server")
    info = httpx.get(f"{server.url}/server_info").json()
    expect(page.locator(".panel.model")).to_contain_text("Qwen3ForCausalLM")
    expect(page.locator(".panel.model")).to_contain_text("6 × Attention + Mlp")
    expect(page.locator(".panel.machine")).to_contain_text(info["engine"]["kernels"]["isa"])
    row = page.locator(".panel.options tr", has_text="--page-size")
    expect(row).to_contain_text("default on cpu")
    page.get_by_role("combobox", name="Show").select_option("given")
    expect(page.locator(".panel.options tr", has_text="--cpu-threads")).to_contain_text("given")
    expect(row).to_have_count(0)
    page.get_by_role("combobox", name="Show").select_option("all")
    page.get_by_label("Filter").fill("--lora")
    for one in page.locator(".panel.options tbody tr td:first-child").all_inner_texts():
        assert "lora" in one
    expect(page.get_by_text("Start the server with --enable-lora")).to_be_visible()
    expect(page.get_by_text("Start the server with --enable-metrics")).to_be_visible()


def test_what_changes_the_server_asks_first(page: Any, server: RunningServer) -> None:
    page.goto("/ui/#/server")
    button = page.get_by_role("button", name="Flush the prefix cache", exact=True)
    button.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Escape")
    expect(button).to_be_focused()
    button.click()
    page.get_by_role("button", name="Yes: Flush").click()
    expect(page.get_by_text("Flush the prefix cache: done.")).to_be_visible()
    page.get_by_role("button", name="Pause", exact=True).click()
    page.get_by_role("button", name="Yes: Pause").click()
    expect(page.get_by_text("Pause: done.")).to_be_visible()
    assert httpx.get(f"{server.url}/ready").status_code == 503
    page.get_by_role("button", name="Continue", exact=True).click()
    page.get_by_role("button", name="Yes: Continue").click()
    expect(page.get_by_text("Continue: done.")).to_be_visible()
    assert httpx.get(f"{server.url}/ready").status_code == 200


def test_adapters_and_metrics_where_they_are_on(page: Any) -> None:
    loaded = ["old"]
    sent: list[tuple[str, Any]] = []

    def details(route: Any) -> None:
        body = route.fetch().json()
        for option in body["options"]:
            option["value"] = option["value"] or option["name"] in ("enable_lora", "enable_metrics")
        route.fulfill(json=body)

    def models(route: Any) -> None:
        cards = [{"id": "base", "parent": None, "root": "base"}]
        cards += [{"id": name, "parent": "base", "root": f"/lora/{name}"} for name in loaded]
        route.fulfill(json={"object": "list", "data": cards})

    def change(route: Any) -> None:
        body, is_load = (
            route.request.post_data_json,
            route.request.url.endswith("/load_lora_adapter"),
        )
        sent.append((route.request.url.rpartition("/")[2], body))
        (loaded.append if is_load else loaded.remove)(body["lora_name"])
        route.fulfill(json={})

    page.route("**/server_details", details)
    page.route("**/v1/models", models)
    page.route(re.compile(r"/(un)?load_lora_adapter$"), change)
    page.route("**/metrics", lambda route: route.fulfill(body="# HELP <b>x</b>\nx 1"))
    page.goto("/ui/#/server")
    rows = page.get_by_role("group", name="Adapters").locator("tbody tr")
    expect(rows).to_have_count(1)
    page.get_by_label("Name", exact=True).fill("new")
    page.get_by_label("Folder on the server").fill("/lora/new")
    page.get_by_role("button", name="Load", exact=True).click()
    expect(page.get_by_text("Loaded new.")).to_be_visible()
    expect(rows).to_have_count(2)
    rows.first.get_by_role("button", name="Unload").click()
    rows.first.get_by_role("button", name="Yes: Unload").click()
    expect(rows).to_have_count(1)
    expect(rows.first).to_contain_text("/lora/new")
    load = ("load_lora_adapter", {"lora_name": "new", "lora_path": "/lora/new"})
    assert sent == [load, ("unload_lora_adapter", {"lora_name": "old"})]
    page.get_by_role("button", name="Read metrics").click()
    text = page.get_by_role("region", name="Text of /metrics")
    expect(text).to_have_text("# HELP <b>x</b>\nx 1")
    expect(text).to_be_focused()


SECRETS = {
    "hicache_storage_backend_extra_config": '{"password": "hunter2", "url": "redis://u:hunter2@h/0"}',
    "model_loader_extra_config": "token=hunter2;x=1",
    "oltp_traces_endpoint": "http://user:hunter2@host:4317",
    "my_secret": "hunter2",
}


def test_the_bug_report_has_no_keys_and_no_prompts(page: Any) -> None:
    page.goto("/ui/#/server")
    expect(page.get_by_role("button", name="Copy as bug report")).to_be_visible()
    text = page.evaluate(
        """async (secrets) => {
          const { report } = await import("./views/server_report.js");
          const [details, info] = await Promise.all(["/server_details", "/server_info"].map(
            async (path) => (await fetch(path)).json()));
          for (const [name, value] of Object.entries(secrets)) details.options.push(
            {name, flag: `--${name}`, value, is_given: true, is_default: false});
          details.options.push({name: "api_key", flag: "--api-key", value: "***", is_given: true});
          return report(details, info);
        }""",
        SECRETS,
    )
    assert "hunter2" not in text and "--api-key ***" in text
    assert "Qwen3ForCausalLM" in text and "--page-size 16" in text and "default on cpu" in text
    assert "redis://***@h/0" in text  # what is no secret stays


def test_the_report_is_shown_where_copying_is_not_allowed(new_page: NewPage) -> None:
    page = new_page()
    page.add_init_script("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.goto("/ui/#/server")
    page.get_by_role("button", name="Copy as bug report").click()
    expect(page.get_by_role("textbox", name="Copy as bug report")).to_have_value(
        re.compile("^RadixLM ")
    )


def test_docs_are_local_and_try_routes(page: Any, server: RunningServer) -> None:
    assert httpx.get(f"{server.url}/redoc").status_code == 404
    page.goto("/docs")
    expect(page).to_have_url(re.compile("/ui/#/docs$"))
    document = httpx.get(f"{server.url}/openapi.json").json()
    count = sum(len(operations) for operations in document["paths"].values())
    expect(page.locator(".docs .summary").first).to_have_text(f"{count} of {count} routes")
    page.get_by_label("Filter routes").fill("/tokenize")
    route = page.locator("details.route", has_text="/tokenize").first
    route.locator("summary").first.click()
    expect(route.locator("tr", has_text="return_token_bytes")).to_contain_text("boolean")
    route.get_by_label("Body as JSON").fill('{"prompt": "<b>Rita</b>"}')
    route.get_by_role("button", name=re.compile("^Send POST")).click()
    expect(route.get_by_text(re.compile("^200 in"))).to_be_visible()
    tokens = httpx.post(f"{server.url}/tokenize", json={"prompt": "<b>Rita</b>"}).json()["tokens"]
    expect(route.get_by_role("region", name="Answer", exact=True)).to_contain_text(f"{tokens[0]},")
    route.get_by_label("Body as JSON").fill('{"prompt": ')
    route.get_by_role("button", name=re.compile("^Send POST")).click()
    expect(route.get_by_role("alert")).to_contain_text("not JSON")


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe(new_page: NewPage, axe: str, theme: str) -> None:
    page = new_page(color_scheme=theme)
    page.goto("/ui/#/server")
    page.get_by_role("button", name="Pause", exact=True).click()
    found = run_axe(page, axe)
    page.goto("/ui/#/docs")
    page.get_by_label("Filter routes").fill("/generate")
    page.locator("details.route summary").first.click()
    expect(page.get_by_role("button", name=re.compile("^Send")).first).to_be_visible()
    assert found + run_axe(page, axe) == []
