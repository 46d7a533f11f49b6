"""The live view: on a made-up feed, then on a server whose requests are chunked, retracted and
held while their engine dies."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.server import RunningServer
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


SCRIPTS = Path(__file__).parent
HOUR = (SCRIPTS / "hour.js").read_text()
DRAWING = (SCRIPTS / "drawing.js").read_text()
NAMES = ("long", "first", "second", "killed")


def bare(phases: str) -> str:
    """Phases without their times."""
    return re.sub(r" [\d.]+( ms| s)(?= →|$)| –(?= →|$)", "", phases)


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
    order = [bare(line[2]) for line in falls]
    assert order[0] == "queue"
    assert order[1] == "queue → prefill → decode"
    assert order[3] == "grammar compile → queue → prefill → decode"
    assert order[4] == "queue → prefill → decode → engine dead → queue → prefill → decode"
    assert order[5] == "queue → prefill → decode → retracted → prefill → decode"
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


@pytest.mark.slow
def test_axe_finds_nothing(new_page: NewPage, axe: str) -> None:
    """With all tables open, as narrow as a phone; every view's charts are in test_guard."""
    options = {"viewport": {"width": 320, "height": 700}, "reduced_motion": "reduce"}
    page = new_page(color_scheme="dark", **options)
    feed(page, short())
    page.goto("/ui/#/live")
    expect(page.locator("#live-requests .summary")).to_contain_text("14 requests")
    assert page.evaluate("document.querySelector('main').scrollWidth") <= 320
    for button in page.get_by_role("button", name=re.compile("^Show as table")).all():
        button.click()
    page.evaluate(axe)
    found = page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
    assert [(one["id"], one["nodes"][0]["html"]) for one in found] == []


@pytest.fixture(scope="module")
def small() -> Iterator[RunningServer]:
    """A server with room for 512 tokens, that prefills 128 in a step."""
    flags = ("--max-total-tokens", "512", "--chunked-prefill-size", "128")
    with RunningServer(*flags, "--max-engine-restarts", "9") as running:
        yield running


def generate(server: RunningServer, name: str, prompt: int, new: int) -> dict[str, Any]:
    """What /generate says of a request that is called ``name``."""
    ids = [(len(name) * 31 + at * 7) % 500 + 5 for at in range(prompt)]
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": new, "ignore_eos": True}}
    got = server.client.post("/generate", json=body, headers={"X-Request-Id": name})
    found: dict[str, Any] = got.json()["meta_info"]
    return found


def test_steps_and_tree_agree_with_the_engine(new_page: NewPage, small: RunningServer) -> None:
    page = new_page(small.url)
    page.goto("/ui/#/tree")
    text = "The page shows what the engine does. " * 9
    # two drawn outputs would differ, and what follows the prompt be cached twice
    sampling = {"max_new_tokens": 4, "ignore_eos": True, "temperature": 0}
    metas = [small.post("/generate", text=text, sampling_params=sampling).json()["meta_info"]]
    page.get_by_label("Prompt that begins with").fill(text)
    page.get_by_role("button", name="Find").click()
    expect(page.get_by_role("search").get_by_role("status")).to_contain_text("tokens of it")
    said = page.get_by_role("search").get_by_role("status").inner_text()
    metas += [small.post("/generate", text=text, sampling_params=sampling).json()["meta_info"]]
    page_size = 16  # the search finds whole pages
    assert int(said.split()[0]) == metas[1]["cached_tokens"] // page_size * page_size > 0
    expect(page.locator("#tree-panel .node rect.marked").first).to_be_attached()
    expect(page.locator(".tree-focus")).to_contain_text(", 1 hits")
    nodes = rows(page, "tree-panel", "Nodes of the prefix cache")
    # prompt and output, but for the last token, which no step has read
    assert sum(int(line[2]) for line in nodes) == metas[0]["prompt_tokens"] + 3
    page.goto("/ui/#/live")
    count = small.info()["num_steps"]
    expect(page.locator("#live-steps .summary")).to_contain_text(f"{count} steps")
    steps_of = rows(page, "live-steps", "Steps")
    assert [int(line[0]) for line in steps_of] == list(range(count))[::-1]
    computed = sum(meta["prompt_tokens"] - meta["cached_tokens"] for meta in metas)
    warmup = int(steps_of[-1][9])
    assert sum(int(line[9]) for line in steps_of) == computed + warmup
    assert sum(int(line[8]) for line in steps_of) == 2 * (4 - 1)  # the prefill makes the first


def test_logs_are_not_sent_again_when_a_view_is_left(
    new_page: NewPage, small: RunningServer
) -> None:
    page = new_page(small.url)
    page.goto("/ui/#/live")
    line = page.locator("#live-log .log-line")
    expect(line.first).to_be_attached()
    page.goto("/ui/#/tree")
    expect(page.get_by_role("banner").get_by_role("status")).to_have_text("connected")
    with page.expect_request(re.compile("live/events.*log")) as asked:
        page.goto("/ui/#/live")
    assert asked.value.headers["last-event-id"]


def test_chunks_a_retraction_and_a_death_in_the_waterfall(
    new_page: NewPage, small: RunningServer
) -> None:
    """A long prompt; two requests that outgrow the cache; one whose engine is killed."""
    page = new_page(small.url)
    page.goto("/ui/#/live")
    generate(small, "long", 400, 4)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: generate(small, name, 40, 250), ("first", "second")))
        killed = pool.submit(generate, small, "killed", 40, 250)
        row_of = "/live/request/killed"
        small.wait_for(
            lambda: (got := small.client.get(row_of)).status_code == 200 and got.json()["out"] > 9
        )
        small.engine().kill()
        assert killed.result(60)["completion_tokens"] == 250
    expect(page.locator("#live-deaths tbody tr")).to_have_count(1)
    expect(page.locator("#live-deaths tbody")).to_contain_text(re.compile(r"1: [\d.]+ m?s to"))
    expect(page.locator("#live-requests .summary")).to_contain_text("0 open")
    falls = {line[0]: line for line in rows(page, "live-requests", "Requests")}
    name_of = {name: hashlib.sha256(name.encode()).hexdigest()[:12] for name in NAMES}
    order = [line for line in falls if line in name_of.values()]
    assert order[0] == name_of["killed"] and order[3] == name_of["long"]  # newest on top
    phases = {name: bare(falls[name_of[name]][2]) for name in NAMES}
    assert phases["long"] == "queue → prefill → decode"
    dead = "queue → prefill → decode → engine dead → prefill → decode"
    assert phases["killed"] == dead
    retracted = "queue → prefill → decode → retracted → prefill → decode"
    assert sorted([phases["first"], phases["second"]]) == sorted([phases["long"], retracted])
    assert falls[name_of["killed"]][3:8:2] == ["40", "250", "length"]
    page.get_by_role("button", name=name_of["long"]).click()
    spans = page.locator(".detail table").first.locator("tbody tr")
    expect(spans).to_have_text([re.compile(p) for p in ("^queue", *("^prefill",) * 4, "^decode")])
    tokens = spans.locator("td:nth-child(4)").all_inner_texts()
    assert tokens == ["0", "128", "112", "96", "64", "4"]


@pytest.mark.slow
def test_a_line_stays_in_its_tile(page: Any) -> None:
    """An engine that restarts tells of no cache, below the pages that were used before."""
    page.goto("/ui/#/chat")
    path = page.evaluate(
        """async () => {
          const { render, html } = await import("./vendor/preact.js");
          const { Sparkline } = await import("./lib/chart.js");
          const place = document.createElement("div");
          render(html`<${Sparkline} values=${[0, 2048, 0]} max=${0} />`, place);
          return place.querySelector("path").getAttribute("d");
        }"""
    )
    assert path == "M0.0 23.0L50.0 1.0L100.0 23.0"


def test_an_hour_of_frames_fits_in_the_heap(page: Any) -> None:
    feed(page, recorded())
    page.goto("/ui/#/live")
    expect(page.locator("#live-requests .summary")).to_contain_text("200 requests")
    tools = page.context.new_cdp_session(page)

    def heap_bytes() -> int:
        tools.send("HeapProfiler.collectGarbage")
        return int(tools.send("Runtime.getHeapUsage")["usedSize"])

    frames = {"row": row(3), "head": head()[1], "columns": steps()[1]["columns"]}
    page.evaluate(HOUR, {"frames": frames, "count": 3000})  # caches are full from here on
    before = heap_bytes()
    told = page.evaluate(HOUR, {"frames": frames, "count": 36_000})
    assert told["steps"] == 600 and told["rows"] <= 260
    assert heap_bytes() - before < 5e6


@pytest.mark.slow
def test_two_hundred_rows_draw_in_a_frame(page: Any) -> None:
    """The time of one drawing, measured; a machine under load may be slower than 60 a second."""
    feed(page, recorded())
    page.set_viewport_size({"width": 1600, "height": 9000})  # all rows in sight
    page.goto("/ui/#/live")
    expect(page.locator("#live-requests .summary")).to_contain_text("200 requests")
    took = page.evaluate(DRAWING)
    print(f"200 rows: {took:.1f} ms a drawing")
    assert took < 500
