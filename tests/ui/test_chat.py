"""The chat view against a real server, and against a scripted endpoint for what models write."""

from __future__ import annotations

import base64
import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.end_to_end.server import RunningServer
from tests.ui.conftest import NewPage, sync_api

expect = sync_api.expect
PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAoAAAAKCAIAAAACUFjqAAAAEklEQVR4nGP4z8CAB+GTG8HSALfKY52fTcuYAAAAAElF"
    "TkSuQmCC"
)
WEATHER = [{"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {}}}}]


def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def stream(chunks: Sequence[dict[str, Any]]) -> str:
    """The body of a stream of /v1/chat/completions."""
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": None}
    ended = [*chunks, chunk({}, "stop"), {"choices": [], "usage": usage}]
    return "".join(f"data: {json.dumps(one)}\n\n" for one in ended) + "data: [DONE]\n\n"


class Endpoint:
    """Answers the page's chats in a server's place: with the next of ``answers`` each time."""

    def __init__(self, page: Any) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.answers: list[str] = []
        page.route("**/v1/chat/completions", self._answer)

    def say(self, *texts: str) -> None:
        self.answers += [stream([chunk({"content": text})]) for text in texts]

    def _answer(self, route: Any) -> None:
        self.bodies.append(route.request.post_data_json)
        body = self.answers.pop(0)
        route.fulfill(status=200, content_type="text/event-stream", body=body)


def composer(page: Any) -> Any:
    return page.get_by_role("textbox", name="Message", exact=True)


def ask(page: Any, text: str) -> None:
    composer(page).fill(text)
    composer(page).press("Enter")


def settle(page: Any, answers: int) -> Any:
    """Wait until so many messages of the model are whole; the last one."""
    whole = page.locator(".message.assistant:not([aria-busy])")
    expect(whole).to_have_count(answers)
    expect(page.locator("[aria-busy=true]")).to_have_count(0)
    return whole.last


def open_settings(page: Any) -> Any:
    page.get_by_role("button", name="Settings", exact=True).click()
    return page.get_by_role("complementary", name="Settings")


def test_an_answer_is_the_apis(page: Any, server: RunningServer) -> None:
    page.goto("/ui/#/chat")
    drawer = open_settings(page)
    drawer.get_by_label("temperature").fill("0")
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "Hello")
    got = settle(page, 1)
    body = asked.value.post_data_json
    assert body["temperature"] == 0 and isinstance(body["seed"], int)
    plain = {k: body[k] for k in ("messages", "temperature", "seed")}
    answer = server.post("/v1/chat/completions", **plain).json()
    assert got.locator(".md").inner_text() == answer["choices"][0]["message"]["content"]
    figures = got.locator(".figures")
    expect(figures).to_contain_text(f"{answer['usage']['prompt_tokens']} in")
    expect(figures).to_contain_text(f"{answer['usage']['completion_tokens']} out")
    expect(figures).to_contain_text(f"seed {body['seed']}")
    link = figures.get_by_role("link")
    expect(link).to_have_attribute("href", f"#/live/{body['rid']}")


def test_stop_keeps_what_came_and_ends_the_request(page: Any, server: RunningServer) -> None:
    page.goto("/ui/#/chat")
    drawer = open_settings(page)
    drawer.get_by_text("Length and stops").click()
    drawer.get_by_label("ignore_eos").select_option("true")
    drawer.get_by_label("max_completion_tokens").fill("3500")
    ask(page, "Hello")
    expect(page.locator(".message.assistant .md")).not_to_be_empty()
    page.keyboard.press("Escape")
    got = settle(page, 1)
    expect(got.locator(".figures")).to_contain_text("stopped")
    expect(got.locator(".md")).not_to_be_empty()
    server.wait_for(lambda: server.info()["num_running_reqs"] == 0, 20)


def test_edits_and_regenerations_are_branches(page: Any) -> None:
    endpoint = Endpoint(page)
    endpoint.say("first", "second", "of the edit")
    page.goto("/ui/#/chat")
    ask(page, "question")
    settle(page, 1).get_by_role("button", name="Regenerate").click()
    expect(page.locator(".message.assistant .md")).to_have_text("second")
    expect(page.get_by_text("2/2")).to_be_visible()
    page.get_by_role("button", name="Earlier branch").click()
    expect(page.locator(".message.assistant .md")).to_have_text("first")
    page.get_by_role("button", name="Compare").click()
    expect(page.locator(".column .assistant .md")).to_have_text(["second", "first"])
    page.get_by_role("button", name="End comparison").click()
    page.get_by_role("button", name="Edit").click()
    page.get_by_role("textbox", name="Edit").fill("changed")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant .md")).to_have_text("of the edit")
    assert [m["content"] for m in endpoint.bodies[2]["messages"]] == ["changed"]
    page.locator(".message.user").get_by_role("button", name="Earlier branch").click()
    expect(page.locator(".message.assistant .md")).to_have_text("first")
    # the tree outlives the page
    page.reload()
    page.get_by_role("navigation", name="Conversations").get_by_role(
        "button", name="question", exact=True
    ).click()
    expect(page.locator(".message.assistant .md")).to_have_text("first")


def test_tool_calls_of_the_real_model_go_round(page: Any) -> None:
    page.goto("/ui/#/chat")
    drawer = open_settings(page)
    drawer.get_by_label("Tools (JSON schemas)").fill(json.dumps(WEATHER))
    drawer.get_by_label("Tool choice").select_option("required")
    ask(page, "What is the weather in Berlin?")
    got = settle(page, 1)
    expect(got.locator(".call")).to_contain_text("get_weather")
    drawer.get_by_label("Tool choice").select_option("none")
    got.get_by_label("Result of get_weather").fill('{"celsius": 21}')
    with page.expect_request("**/v1/chat/completions") as asked:
        got.get_by_role("button", name="Send results").click()
    messages = asked.value.post_data_json["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "tool"]
    assert messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"]
    assert json.loads(messages[2]["content"]) == {"celsius": 21}
    expect(settle(page, 2).locator(".failure")).to_have_count(0)


def test_a_schema_is_obeyed(page: Any) -> None:
    page.goto("/ui/#/chat")
    drawer = open_settings(page)
    drawer.get_by_label("Structured output").select_option("json_schema")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    drawer.get_by_label("Schema, pattern").fill(json.dumps(schema) + "}")
    expect(drawer.locator(".problem")).to_be_visible()
    drawer.get_by_label("Schema, pattern").fill(json.dumps(schema))
    expect(drawer.locator(".problem")).to_have_count(0)
    ask(page, "Give me an integer.")
    text = settle(page, 1).locator(".md").inner_text()
    assert isinstance(json.loads(text)["a"], int)


def test_pictures_by_file_and_paste(page: Any, tmp_path: Path) -> None:
    endpoint = Endpoint(page)
    endpoint.say("a red square")
    page.goto("/ui/#/chat")
    (tmp_path / "red.png").write_bytes(base64.b64decode(PNG))
    (tmp_path / "no.txt").write_text("text")
    page.locator("input[type=file][multiple]").set_input_files(
        [tmp_path / "red.png", tmp_path / "no.txt"]
    )
    expect(page.get_by_role("alert")).to_contain_text("no.txt: only images")
    page.evaluate(
        """(data) => {
          const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
          const files = new DataTransfer();
          files.items.add(new File([bytes], "pasted.png", {type: "image/png"}));
          const event = new ClipboardEvent("paste", {clipboardData: files, bubbles: true});
          document.querySelector(".composer textarea").dispatchEvent(event);
        }""",
        PNG,
    )
    expect(page.locator(".composer img")).to_have_count(2)
    page.get_by_role("button", name="Remove pasted.png").click()
    ask(page, "What is it?")
    settle(page, 1)
    content = endpoint.bodies[0]["messages"][0]["content"]
    assert [part["type"] for part in content] == ["image_url", "text"]
    assert content[0]["image_url"]["url"] == f"data:image/png;base64,{PNG}"
    expect(page.locator(".message.user img")).to_be_visible()


def test_a_text_model_refuses_a_picture_in_its_own_words(page: Any, tmp_path: Path) -> None:
    page.watched.allowed.append("400 (Bad Request)")
    page.goto("/ui/#/chat")
    (tmp_path / "red.png").write_bytes(base64.b64decode(PNG))
    page.locator("input[type=file][multiple]").set_input_files(tmp_path / "red.png")
    ask(page, "What is it?")
    failure = settle(page, 1).locator(".failure")
    expect(failure).to_contain_text("this model reads text only, not image_url")
    expect(failure.locator("code")).to_have_text(re.compile(r"field: messages\[0\]"))


def test_an_error_within_a_stream_has_its_status(page: Any) -> None:
    page.goto("/ui/#/chat")
    ask(page, "a b c d e f " * 2000)  # longer than the context
    failure = settle(page, 1).locator(".failure")
    expect(failure).to_contain_text("Error 400")
    expect(failure).to_contain_text("is longer than the model's context length")


def test_thinking_is_folded(page: Any) -> None:
    endpoint = Endpoint(page)
    parts = [chunk({"reasoning_content": "Let me see."}), chunk({"content": "It is **42**."})]
    endpoint.answers.append(": prefill 100 of 200\n\n" + stream(parts))
    page.goto("/ui/#/chat")
    ask(page, "why")
    got = settle(page, 1)
    expect(got.locator("details.thinking")).not_to_have_attribute("open", "")
    expect(got.locator("strong")).to_have_text("42")
    got.locator("summary").click()
    expect(got.locator("details")).to_contain_text("Let me see.")


MARKDOWN = """# Title

A [link](https://example.org/x) and `code`, **bold**.

| a | b |
|---|--:|
| 1 | 2 |

```python
def add(a, b):
    return a + b  # sum
```

Euler: $e^{i\\pi} + 1 = 0$ costs $5 or $6.

$$
\\int_0^1 x^2\\,dx = \\frac{1}{3}
$$
"""


def test_markdown_becomes_nodes(page: Any) -> None:
    endpoint = Endpoint(page)
    endpoint.say(MARKDOWN)
    page.goto("/ui/#/chat")
    ask(page, "show")
    got = settle(page, 1)
    expect(got.locator("h3")).to_have_text("Title")
    expect(got.locator("td.align-right")).to_have_text("2")
    expect(got.locator(".hl-keyword").first).to_have_text("def")
    expect(got.locator("math")).to_have_count(2)
    expect(got.locator(".md")).to_contain_text("costs $5 or $6.")
    link = got.get_by_role("link", name="link", exact=True)
    expect(link).to_have_attribute("rel", "noopener noreferrer")
    expect(got.locator(".md")).to_contain_text("(example.org)")


def test_requests_are_copied_as_programs(new_page: NewPage, server: RunningServer) -> None:
    page = new_page(permissions=["clipboard-read", "clipboard-write"])
    page.goto("/ui/#/chat")
    drawer = open_settings(page)
    drawer.get_by_label("top_k").fill("5")
    drawer.get_by_label("System prompt").fill("It's brief.")
    ask(page, "Hello")
    settle(page, 1)
    copied = {}
    for kind in ("curl", "python", "openai"):
        page.locator(".assistant").get_by_label("Copy as").select_option(kind)
        copied[kind] = page.evaluate("navigator.clipboard.readText()")
    for kind in ("python", "openai"):
        compile(copied[kind], kind, "exec")
    assert copied["curl"].startswith(f"curl {server.url}/v1/chat/completions")
    assert '"top_k": 5' in copied["curl"] and "It'\\''s brief." in copied["curl"]
    assert "extra_body={" in copied["openai"]
    ran = subprocess.run(
        ["bash", "-c", copied["curl"]], capture_output=True, text=True, timeout=30, check=True
    )
    assert json.loads(ran.stdout)["choices"][0]["message"]["content"]


def test_export_forget_import(page: Any, tmp_path: Path) -> None:
    endpoint = Endpoint(page)
    endpoint.say("kept answer")
    page.goto("/ui/#/chat")
    ask(page, "keep me")
    settle(page, 1)
    with page.expect_download() as got:
        page.get_by_role("button", name="Export all").click()
    file = tmp_path / "chats.json"
    got.value.save_as(file)
    assert json.loads(file.read_text())["format"] == "radixlm-conversations"
    page.get_by_role("button", name="Forget all").click()
    page.get_by_role("button", name="Forget all").click()
    expect(page.get_by_text("No conversations yet.")).to_be_visible()
    page.reload()
    expect(page.get_by_text("No conversations yet.")).to_be_visible()
    page.locator(".chat-list input[type=file]").set_input_files(file)
    expect(page.locator(".message.assistant .md")).to_have_text("kept answer")
    (tmp_path / "bad.json").write_text('{"a": 1}')
    page.locator(".chat-list input[type=file]").set_input_files(tmp_path / "bad.json")
    expect(page.get_by_role("alert")).to_contain_text("bad.json: not a file of conversations")


def test_a_deleted_chat_ends_its_answer_and_stays_deleted(page: Any) -> None:
    held: list[Any] = []
    page.route("**/v1/chat/completions", lambda route: held.append(route))  # no answer
    page.goto("/ui/#/chat")
    ask(page, "forget me")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    with page.expect_event("requestfailed"):
        page.get_by_role("button", name="Delete “forget me”").click()
    expect(page.get_by_text("No conversations yet.")).to_be_visible()
    expect(page.get_by_role("button", name="Stop")).to_have_count(0)
    page.reload()
    expect(page.get_by_text("No conversations yet.")).to_be_visible()


def test_without_a_database_chats_work_and_may_be_deleted(new_page: NewPage) -> None:
    page = new_page()
    page.add_init_script("indexedDB.open = () => { throw new Error('not here'); };")
    endpoint = Endpoint(page)
    endpoint.say("answer")
    page.goto("/ui/#/chat")
    ask(page, "question")
    settle(page, 1)
    expect(page.get_by_text("This browser keeps nothing: Error: not here")).to_be_visible()
    page.get_by_role("button", name="Delete “question”").click()
    expect(page.get_by_text("No conversations yet.")).to_be_visible()


def test_the_keyboard_is_enough(page: Any) -> None:
    endpoint = Endpoint(page)
    endpoint.say("one", "two")
    page.goto("/ui/#/chat")
    expect(composer(page)).to_be_focused()
    page.keyboard.type("line one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("line two")
    page.keyboard.press("Enter")
    settle(page, 1)
    assert endpoint.bodies[0]["messages"][0]["content"] == "line one\nline two"
    page.keyboard.press("Control+k")
    expect(page.get_by_role("searchbox")).to_be_focused()
    page.keyboard.type("nowhere")
    expect(page.get_by_text("Nothing found.")).to_be_visible()
    for _ in "nowhere":
        page.keyboard.press("Backspace")
    names = []
    for _ in range(40):
        page.keyboard.press("Tab")
        names.append(page.evaluate("document.activeElement.textContent.trim()"))
        if names[-1] == "Regenerate":
            break
    assert names[-1] == "Regenerate", names
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant .md")).to_have_text("two")


def test_two_tabs_show_the_same_conversations(page: Any) -> None:
    endpoint = Endpoint(page)
    endpoint.say("answer")
    page.goto("/ui/#/chat")
    other = page.context.new_page()
    other.goto("/ui/#/chat")
    expect(other.get_by_text("No conversations yet.")).to_be_visible()
    ask(page, "from the first tab")
    settle(page, 1)
    other.get_by_role("button", name="from the first tab", exact=True).click()
    expect(other.locator(".message.assistant .md")).to_have_text("answer")


def test_every_sampling_field_has_a_control(server: RunningServer) -> None:
    """The drawer knows each sampling parameter of the API that works."""
    source = Path(__file__).parents[2] / "src/radixlm/assets/ui/views"
    known = set(re.findall(r'\["(\w+)", "', (source / "chat_options.js").read_text()))
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    table = page.partition("### Sampling parameters")[2].partition("\n### ")[0]
    wanted = set()
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 4 and "chat" in cells[4]:
            name = cells[1].strip("`")
            renamed = re.search(r"chat `(\w+)`", cells[4])
            wanted.add(renamed[1] if renamed else name)
    elsewhere = {"json_schema", "regex", "ebnf"}  # structured output
    assert len(wanted) > 20 and wanted - known - elsewhere == set()
