"""The playground in a browser: what it shows is what the API says."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from tests.end_to_end.server import RunningServer
from tests.ui.conftest import NewPage, sync_api

expect = sync_api.expect
HOSTILE = "<img src=x onerror=alert(1)>\u202e<script>alert(2)</script>"


def generate(page: Any, **fields: str) -> None:
    """Fill the form of the first pane and wait for the answer."""
    page.goto("/ui/#/play")
    for label, value in fields.items():
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_role("button", name="Generate").click()
    expect(page.locator(".tok-strip button").first).to_be_visible()


def texts(page: Any) -> list[str]:
    return page.locator(".tok-strip button").all_inner_texts()


def test_tokens_are_those_of_the_api_and_may_be_continued(page: Any, server: RunningServer) -> None:
    generate(page, Temperature="0", **{"Max tokens": "8", "Text to continue": "Rita is"})
    body = {"text": "Rita is", "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=60).json()
    assert "".join(texts(page)).replace("↵", "\n").startswith(answer["text"])
    strip = page.locator(".tok-strip button")
    strip.nth(2).hover()
    panel = page.get_by_role("complementary", name="Alternatives")
    expect(panel.get_by_role("heading")).to_contain_text("Token 3")
    expect(panel.locator("tbody tr")).to_have_count(5)
    before = texts(page)
    strip.nth(2).click()  # goes to the alternatives
    expect(panel.get_by_role("button").first).to_be_focused()
    other = panel.locator("tbody tr").nth(1)
    token = int(other.locator("td").nth(1).inner_text())
    other.get_by_role("button").click()
    expect(page.get_by_role("group", name="Branches").get_by_role("button")).to_have_count(2)
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": "Rita is"}).json()["tokens"]
    kept = answer["output_ids"][:2]
    again = {**body, "input_ids": [*ids, *kept, token], "resume": {"num_emitted": 3}}
    del again["text"]
    rest = httpx.post(f"{server.url}/generate", json=again, timeout=60).json()
    expect(strip).to_have_count(3 + len(rest["output_ids"]))
    assert texts(page)[:2] == before[:2]
    expect(strip.nth(2)).to_have_class(re.compile("chosen"))
    page.get_by_role("button", name="First answer").click()
    expect(strip).to_have_text(before)


def test_a_grammar_is_checked_and_traced(page: Any) -> None:
    page.goto("/ui/#/play")
    page.get_by_role("combobox", name="Grammar").select_option("regex")
    area = page.get_by_role("textbox", name="Regular expression")
    area.fill("ab(c")
    check = page.locator("#grammar-check")
    expect(check).to_contain_text("unclosed group")
    check.get_by_role("button", name="Line 1, column 3").click()
    expect(area).to_be_focused()
    assert page.evaluate("document.activeElement.selectionStart") == 2
    area.fill("(yes|no)!")
    expect(check).to_contain_text("can be used")
    page.get_by_role("button", name="Generate").click()
    strip = page.locator(".tok-strip button")
    expect(strip.first).to_have_class(re.compile("masked"))
    assert "".join(texts(page)).startswith(("yes!", "no!"))
    expect(page.locator(".tok-strip .forced").first).to_be_visible()
    expect(strip.first).to_have_accessible_name(re.compile(r"the grammar allowed \d+ of 2,048"))
    strip.first.focus()
    expect(page.locator(".alternatives")).to_contain_text("allowed")


def test_the_keyboard_walks_the_tokens(page: Any) -> None:
    generate(page, Temperature="0", **{"Max tokens": "6", "Text to continue": "Rita is"})
    page.locator(".tok-strip button").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".tok-strip button").nth(2)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".alternatives td button").first).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator(".tok-strip button").nth(2)).to_be_focused()
    page.get_by_role("button", name="Show as table: Entropy of each token").click()
    expect(page.locator(".twin tbody tr")).to_have_count(len(texts(page)))


def test_settings_with_one_seed_are_compared(page: Any) -> None:
    page.goto("/ui/#/play/diff")
    for side in range(2):
        page.get_by_label("Temperature").nth(side).fill("0")
    page.get_by_role("button", name="Compare").click()
    expect(page.locator(".output .summary")).to_contain_text("Both answers are equal")
    page.get_by_label("Temperature").nth(1).fill("3")
    page.get_by_role("button", name="Compare").click()
    expect(page.locator(".output .summary")).to_contain_text("then they part")
    expect(page.locator(".only").first).to_be_visible()


def test_parsers_chunk_by_chunk(page: Any) -> None:
    page.goto("/ui/#/play/parsers")
    text = f'{HOSTILE}<tool_call>\n{{"name": "f", "arguments": {{"a": "<b>"}}}}\n</tool_call>'
    page.get_by_label("Message of the model").fill(text)
    page.get_by_label("Characters a chunk").fill("4")
    page.get_by_role("combobox", name="Parser", exact=True).select_option("hermes")
    page.get_by_role("button", name="Parse").click()
    expect(page.locator(".pairs dd").first).to_have_text(HOSTILE)
    expect(page.locator(".pairs dd").nth(1)).to_contain_text('f {"a": "<b>"}')
    expect(page.locator("table tbody tr")).to_have_count(-(-len(text) // 4) + 1)
    assert page.locator("main img, main script").count() == 0


def test_tokenizer_shows_bytes_and_the_template(page: Any) -> None:
    page.goto("/ui/#/play/tokenizer")
    text = f"naïve {HOSTILE} 👋"
    page.get_by_role("textbox", name="Text").fill(text)
    page.get_by_role("button", name="Tokenize").click()
    expect(page.locator(".pieces")).to_have_text(text)
    assert page.locator("main img, main script").count() == 0
    page.get_by_label("Input").select_option("messages")
    messages = json.dumps([{"role": "user", "content": "Hi"}])
    page.get_by_role("textbox", name="Messages as JSON").fill(messages)
    page.get_by_role("button", name="Tokenize").click()
    expect(page.locator(".piece.special").first).to_have_text("<|im_start|>")
    page.get_by_role("textbox", name="Messages as JSON").fill("{")
    page.get_by_role("button", name="Tokenize").click()
    expect(page.get_by_role("alert")).to_contain_text("not JSON")


def test_scores_and_what_the_model_lacks(page: Any) -> None:
    page.goto("/ui/#/play/scores")
    page.get_by_label("Labels, separated by commas").fill("is, was")
    page.get_by_role("button", name="Score").click()
    expect(page.locator("table tbody tr")).to_have_count(2)
    page.get_by_label("Labels, separated by commas").fill("antidisestablishment")
    page.get_by_role("button", name="Score").click()
    expect(page.get_by_role("alert")).to_contain_text("a label is one token")
    page.get_by_role("button", name="Embed").click()
    expect(page.get_by_text("has no embeddings")).to_be_visible()


def test_similarities_of_vectors(page: Any) -> None:
    vectors = [[3.0, 4.0], [4.0, 3.0], [-3.0, -4.0]]
    page.route("**/model_info", lambda route: route.fulfill(json={"is_generation": False}))
    data = [{"embedding": vector} for vector in vectors]
    page.route("**/v1/embeddings", lambda route: route.fulfill(json={"data": data}))
    page.goto("/ui/#/play/scores")
    page.get_by_role("button", name="Embed").click()
    row = page.get_by_role("group", name="Cosine").locator("tbody tr").first
    expect(row.locator("td.num")).to_have_text(["1.000", "0.960", "-1.000"])
    expect(page.get_by_text("3 vectors of 2 numbers")).to_be_visible()


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe(new_page: NewPage, axe: str, theme: str) -> None:
    page = new_page(color_scheme=theme)
    generate(page, Seed="2", **{"Max tokens": "8"})
    page.locator(".tok-strip button").nth(1).focus()
    found = run_axe(page, axe)
    for pane, button in (("tokenizer", "Tokenize"), ("parsers", "Parse"), ("diff", "Compare")):
        page.goto(f"/ui/#/play/{pane}")
        page.get_by_role("button", name=button).click()
        expect(page.locator(".output .summary")).to_be_visible()
        found += run_axe(page, axe)
    assert found == []


def run_axe(page: Any, axe: str) -> list[str]:
    page.evaluate(axe)
    return [f"{v['id']}: {v['nodes'][0]['html']}" for v in page.evaluate("axe.run()")["violations"]]


def test_a_narrow_window_needs_no_sideways_scrolling(new_page: NewPage) -> None:
    page = new_page(viewport={"width": 320, "height": 640})
    generate(page, **{"Max tokens": "8"})
    assert page.evaluate("document.querySelector('main').scrollWidth") <= 320
