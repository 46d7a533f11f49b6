"""The tree view on a made-up feed: places, keyboard, search, evictions, hostile texts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ui.conftest import NewPage, sync_api
from tests.ui.fake_feed import feed, send
from tests.ui.recorded_feed import HOSTILE, hello, short, tree

expect = sync_api.expect
NODE = "[data-serial='{}'] rect:first-child"


def box(page: Any, serial: int) -> dict[str, float]:
    found: dict[str, float] = page.locator(NODE.format(serial)).bounding_box()
    return found


def test_nodes_lie_below_their_parents_as_wide_as_their_tokens(page: Any) -> None:
    feed(page, [hello(), tree()])
    page.goto("/ui/#/tree")
    expect(page.locator(".node")).to_have_count(85)
    nodes = {node[0]: node for node in tree()[1]["nodes"]}
    total = {serial: nodes[serial][2] for serial in nodes}
    for serial in sorted(nodes, reverse=True):
        if nodes[serial][1]:
            total[nodes[serial][1]] += total[serial]
    svg = page.locator(".icicle svg")
    expect(svg).not_to_have_attribute("width", "800")  # it has been measured
    whole = svg.bounding_box()
    scale = whole["width"] / (total[1] + 2500)
    for serial in (1, 2, 5, 9, 30):
        found, parent = box(page, serial), box(page, nodes[serial][1] or serial)
        assert found["width"] == pytest.approx(total[serial] * scale - 1, abs=1.0)
        assert parent["x"] - 1 <= found["x"] <= parent["x"] + parent["width"]
        assert found["y"] >= parent["y"]
    expect(page.locator(".rest")).to_contain_text("40 more, 2500 tokens")
    locked = sum(node[4] > 0 for node in nodes.values())
    expect(page.locator(".node .hatch")).to_have_count(locked)
    expect(page.locator(".node rect.tomb")).to_have_count(sum(n[6] for n in nodes.values()))
    page.get_by_role("button", name="Show as table: Nodes of the prefix cache").click()
    lines = page.locator("#tree-panel tbody tr")
    expect(lines).to_have_count(85)
    assert lines.first.locator("td").all_inner_texts()[:5] == ["#1", "1", "512", "512", "90"]


def test_the_keyboard_moves_and_zooms(page: Any) -> None:
    feed(page, [hello(), tree()])
    page.goto("/ui/#/tree")
    page.locator("[data-serial='1']").focus()
    for key, serial in (("ArrowDown", 2), ("ArrowRight", 3), ("ArrowDown", 10), ("ArrowUp", 3)):
        page.keyboard.press(key)
        expect(page.locator(f"[data-serial='{serial}']")).to_be_focused()
        expect(page.locator(".tree-focus")).to_contain_text(f"#{serial} · ")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Whole tree")).to_be_visible()
    assert box(page, 3)["width"] > 1000
    page.keyboard.press("Escape")  # to its parent
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Whole tree")).to_have_count(0)
    assert box(page, 1)["width"] > box(page, 3)["width"]


@pytest.mark.parametrize(
    "motion", ["no-preference", pytest.param("reduce", marks=pytest.mark.slow)]
)
def test_hits_colour_and_evictions_flash(new_page: NewPage, motion: str) -> None:
    page = new_page(reduced_motion=motion)
    feed(page, [hello(), tree()])
    page.goto("/ui/#/tree")
    expect(page.locator(NODE.format(4))).to_have_class("heat-0")
    send(page, [tree(1)])
    expect(page.locator(NODE.format(1))).to_have_class("heat-4")  # 9 hits in at most 10 s
    expect(page.locator(NODE.format(5))).to_have_class("heat-0")  # none
    page.evaluate(
        "() => { window.ghosts = 0; new MutationObserver((all) => all.forEach((one) =>"
        " one.addedNodes.forEach((n) => { window.ghosts += n.classList?.contains('gone'); })))"
        ".observe(document.querySelector('.icicle'), { subtree: true, childList: true }); }"
    )
    send(page, [tree(2)])
    expect(page.locator(".node")).to_have_count(84)
    expect(page.locator(".gone")).to_have_count(0)  # they leave again
    assert page.evaluate("window.ghosts") == (1 if motion == "no-preference" else 0)


def test_texts_and_searches_are_text(page: Any) -> None:
    feed(page, [hello(), tree(texts=True)])
    page.goto("/ui/#/tree")
    assert page.locator("#tree-hot tbody tr").nth(1).locator("td").first.inner_text() == HOSTILE[2]
    assert page.locator(".tree :is(img, script)").count() == 0
    asked: list[str] = []
    page.route(
        "**/live/tree?*",
        lambda route: [asked.append(route.request.url), route.fulfill(json=FOUND)],
    )
    page.get_by_label("Prompt that begins with").fill("a&b=c #d")
    page.get_by_role("button", name="Find").click()
    expect(page.get_by_role("search").get_by_role("status")).to_contain_text("650 tokens of it")
    expect(page.locator("rect.marked")).to_have_count(2)
    assert asked[0].endswith("/live/tree?text=a%26b%3Dc%20%23d")
    page.get_by_role("button", name="Clear").click()
    expect(page.locator("rect.marked")).to_have_count(0)


FOUND = {"path": [1, 2], "tokens": 650}


@pytest.mark.slow
def test_axe_finds_nothing(new_page: NewPage, axe: str) -> None:
    page = new_page(color_scheme="light", viewport={"width": 320, "height": 700})
    feed(page, short())
    page.goto("/ui/#/tree")
    expect(page.locator(".node")).to_have_count(85)
    assert page.evaluate("document.querySelector('main').scrollWidth") <= 320
    page.evaluate(axe)
    found = page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
    assert [(one["id"], one["nodes"][0]["html"]) for one in found] == []
