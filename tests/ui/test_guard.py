"""Keys, policy, accessibility, small windows, and a server that goes away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.end_to_end.server import RunningServer
from tests.ui.conftest import NewPage, Scripted, sync_api
from tests.ui.test_chat import Endpoint, ask, composer, open_settings, settle

expect = sync_api.expect
# what a view shows when it has its data: axe reads the styles of a page that changes at two moments
READY = {"server": "button:enabled:text('Read again')", "docs": "details.route"}
VIEWS = ("chat", "live", "tree", "play", "server", "docs")
AXE = """async () => {
  const rules = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"];
  if (location.hash === "#/chat") rules.push("best-practice");
  const got = await axe.run(document, {runOnly: rules});
  const shown = (nodes) => nodes.map((n) => n.html.slice(0, 160)).join(" | ");
  return got.violations.map((v) => `${v.id}: ${shown(v.nodes)}`);
}"""
EVERYTHING = """# Heading
Text with [link](https://example.org), `code`, $x^2$.

```python
def f(x): return "text"  # comment
```

| a | b |
|---|---|
| 1 | 2 |
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(new_page: NewPage, axe: str, scheme: str) -> None:
    page = new_page(color_scheme=scheme, reduced_motion="reduce")
    endpoint = Endpoint(page)
    endpoint.say(EVERYTHING, EVERYTHING)
    found = {}
    for name in VIEWS:
        page.goto(f"/ui/#/{name}")
        expect(page.locator(f"main.view-{name} {READY.get(name, 'h1')}").first).to_be_attached()
        page.evaluate(axe)
        found[name] = page.evaluate(AXE)
    page.goto("/ui/#/chat")
    ask(page, "show")
    settle(page, 1).get_by_role("button", name="Regenerate").click()
    expect(page.get_by_text("2/2")).to_be_visible()
    drawer = open_settings(page)
    for summary in drawer.locator("summary").all():
        summary.click()
    drawer.get_by_role("button", name="Insert an example").click()
    page.evaluate(axe)
    found["conversation"] = page.evaluate(AXE)
    assert {name: problems for name, problems in found.items() if problems} == {}


@pytest.mark.parametrize("name", VIEWS)
def test_small_windows_need_no_sideways_scrolling(new_page: NewPage, name: str) -> None:
    page = new_page(viewport={"width": 320, "height": 640})
    page.goto(f"/ui/#/{name}")
    expect(page.locator(f"main.view-{name} h1").first).to_be_attached()
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    assert page.evaluate("document.querySelector('main').scrollWidth") <= 320


def test_a_small_window_holds_a_whole_chat(new_page: NewPage) -> None:
    page = new_page(viewport={"width": 320, "height": 640}, forced_colors="active")
    endpoint = Endpoint(page)
    endpoint.say(EVERYTHING)
    page.goto("/ui/#/chat")
    ask(page, "word " * 30 + "x" * 200)
    got = settle(page, 1)
    assert page.evaluate("document.querySelector('.messages').scrollWidth") <= 320
    for button in got.locator(".actions button, .actions select").all():
        box = button.bounding_box()
        assert box["height"] >= 24 and box["x"] + box["width"] <= 320


def test_a_key_is_asked_for_and_kept_in_the_tab_only(
    new_page: NewPage, scripted: Callable[..., Scripted]
) -> None:
    server = scripted({"hello": "Hello from the script."}, api_key="right")
    page = new_page(server.url)
    page.watched.allowed.append("401 (Unauthorized)")
    page.goto("/ui/#/chat")
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Key").fill("wrong")
    dialog.get_by_role("button", name="Use key").click()
    expect(dialog).to_have_count(0)
    ask(page, "hello")
    expect(dialog).to_contain_text("the API key is missing or wrong")
    dialog.get_by_label("Key").fill("right")
    page.keyboard.press("Enter")
    expect(settle(page, 1).locator(".md")).to_have_text("Hello from the script.")
    kept = page.evaluate("JSON.stringify([Object.entries(localStorage), location.href])")
    assert "right" not in kept
    exported = page.evaluate("sessionStorage.getItem('radixlm.key')")
    assert exported == "right"
    other = page.context.new_page()
    other.goto("/ui/#/chat")
    expect(other.get_by_role("dialog")).to_be_visible()
    other.evaluate(TWO_CALLS)
    other.get_by_role("dialog").get_by_label("Key").fill("right")
    other.keyboard.press("Enter")
    assert other.evaluate("window.both") == ["list", "list"]  # one dialog serves all that wait
    expect(other.get_by_role("dialog")).to_have_count(0)


TWO_CALLS = """() => {
  const late = new Promise((_, fail) => setTimeout(() => fail(new Error("no answer")), 10_000));
  const calls = import("./http.js").then(({ api }) =>
    Promise.all([api("v1/models"), api("v1/models")]));
  window.both = Promise.race([late, calls.then((all) => all.map((one) => one.object))]);
}"""


def test_an_address_that_is_cut_opens_the_view(page: Any) -> None:
    page.goto("/ui/#/play/%")
    expect(page.locator("main.view-play h1")).to_be_attached()


def test_a_server_that_comes_back_is_told(
    new_page: NewPage, scripted: Callable[..., Scripted]
) -> None:
    script = {"hello": "Hello from the script."}
    server = scripted(script)
    page = new_page(server.url)
    page.watched.allowed += ["ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE"]
    page.goto("/ui/#/chat")
    expect(composer(page)).to_be_visible()
    server.stop()
    ask(page, "hello")
    expect(settle(page, 1).locator(".failure")).to_contain_text("the server does not answer")
    expect(page.get_by_role("status")).to_have_text("server unreachable, trying again")
    scripted(script, port=server.port)
    expect(page.get_by_role("status")).to_have_text("server is back")
    page.get_by_role("button", name="Try again").click()
    expect(settle(page, 1).locator(".md")).to_have_text("Hello from the script.")


def test_a_sleeping_laptop_reconnects(page: Any) -> None:
    page.clock.install()
    page.goto("/ui/#/live")
    status = page.get_by_role("banner").get_by_role("status")
    expect(status).to_have_text("connected")
    with page.expect_request("**/live/events*"):
        page.clock.fast_forward("01:00:00")
        page.clock.run_for(3000)
    expect(status).to_have_text("connected")


def test_the_page_lies_below_a_path(new_page: NewPage, scripted: Callable[..., Scripted]) -> None:
    server = scripted({"hello": "Hello from below."}, fastapi_root_path="/api/lm")
    page = new_page(server.url)
    page.goto("/api/lm")
    expect(page).to_have_url(f"{server.url}/api/lm/ui/")
    ask(page, "hello")
    expect(settle(page, 1).locator(".md")).to_have_text("Hello from below.")


def test_the_page_can_be_left_out(scripted: Callable[..., Scripted]) -> None:
    server = scripted({}, disable_ui=True)
    for path in ("/ui", "/ui/", "/ui/main.js", "/ui/info"):
        got = httpx.get(server.url + path)
        assert got.status_code == 404 and "--disable-ui" in got.text, path
    got = httpx.get(server.url + "/", headers={"Accept": "text/html"})
    assert got.status_code == 200 and "is running" in got.text


def test_links_of_other_sites_open_the_page_and_no_more(server: RunningServer) -> None:
    foreign = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Accept": "text/html"}
    assert httpx.get(server.url + "/ui/", headers=foreign).status_code == 200
    assert httpx.get(server.url + "/server_info", headers=foreign).status_code == 403
    # another name for this address: the page's files are no secret, the server's facts are
    assert httpx.get(server.url + "/ui/info", headers={"Host": "evil.example"}).status_code == 403


def test_every_file_has_the_policy_and_the_key_is_in_no_answer(
    scripted: Callable[..., Scripted],
) -> None:
    server = scripted({}, api_key="the-key-itself", admin_api_key="the-other-key")
    for path in ("/ui/", "/ui/main.js", "/ui/app.css", "/ui/nothing", "/favicon.ico"):
        got = httpx.get(server.url + path)
        assert "frame-ancestors 'none'" in got.headers["content-security-policy"], path
        assert got.headers["x-content-type-options"] == "nosniff"
    told = httpx.get(server.url + "/ui/info").json()
    assert told["needs_key"] and told["has_key"] and told["model"] is None
    assert httpx.get(server.url + "/v1/models").status_code == 401
