"""Options of the server that stand in for fields that requests leave out, and lines of requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.http_server import scripted_server

from radixlm.base.errors import ConfigError, Overloaded
from radixlm.entrypoints.http.admin.request_log import RequestLog
from radixlm.intake.facts import IntakeFacts
from radixlm.intake.records import GenerateRequest
from radixlm.intake.validation import RequestValidator
from radixlm.observe.requestlog import RequestLines
from radixlm.wire.sampling_params import SamplingParams

CHAT, BODY = "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}


async def test_variables_of_the_chat_template(toy_folder: Any) -> None:
    defaults = json.dumps({"enable_thinking": True})
    async with scripted_server(toy_folder, {}, default_chat_template_kwargs=defaults) as made:
        plain = await made.client.post("/apply-template", json=BODY)
        own = {"chat_template_kwargs": {"enable_thinking": False}}
        asked = await made.client.post("/apply-template", json=BODY | own)
    assert "</think>" not in plain.json()["prompt"]
    assert "</think>" in asked.json()["prompt"]


@pytest.mark.parametrize("name", ["SGLANG_DEFAULT_THINKING", "RADIXLM_DEFAULT_THINKING"])
async def test_whether_chats_reason_that_say_nothing(
    toy_folder: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = []
    for value in ("1", "0"):
        monkeypatch.setenv(name, value)
        async with scripted_server(toy_folder, {}) as made:
            for own in ({}, {"enable_thinking": value == "0"}):
                body = BODY | {"chat_template_kwargs": own}
                got = await made.client.post("/apply-template", json=body)
                prompts.append("</think>" in got.json()["prompt"])
    assert prompts == [False, True, True, False]


@pytest.mark.parametrize("level", ["0", "1", "2"])
async def test_tools_that_are_not_strict(
    toy_folder: Any, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header tells what the grammar of the arguments leaves out, where there is one."""
    monkeypatch.setenv("SGLANG_TOOL_STRICT_LEVEL", level)
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    async with scripted_server(toy_folder, {}, tool_call_parser="hermes") as made:
        for choice in ("auto", "none"):
            body = BODY | {"tools": [tool], "tool_choice": choice, "max_tokens": 2}
            answer = await made.client.post(CHAT, json=body)
            assert answer.status_code == 200, answer.text
            is_told = "uniqueItems" in answer.headers.get("X-RadixLM-Warning", "")
            assert is_told == (level == "2" and choice == "auto")


async def test_a_strict_level_that_is_none(
    toy_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_TOOL_STRICT_LEVEL", "3")
    with pytest.raises(ConfigError, match="SGLANG_TOOL_STRICT_LEVEL='3': not 0, 1 or 2"):
        async with scripted_server(toy_folder, {}):
            pass


def test_a_limit_of_all_answers() -> None:
    check = RequestValidator(IntakeFacts(10, 100, max_new_tokens=5), None)
    for asked, given in ((None, 5), (3, 3), (99, 5), (1000, 5)):
        request = GenerateRequest(SamplingParams(max_new_tokens=asked), input_ids=[1])
        assert check.sampling(request, 1).max_new_tokens == given


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_streams_end_with_the_usage(toy_folder: Any, path: str) -> None:
    body = {"stream": True, "max_tokens": 2} | (BODY if path == CHAT else {"prompt": "hi"})
    async with scripted_server(toy_folder, {}, stream_response_default_include_usage=True) as made:
        lines = (await made.client.post(path, json=body)).text.split("\n\n")
    last = json.loads(lines[-3].removeprefix("data: "))
    assert lines[-2] == "data: [DONE]" and last["usage"]["completion_tokens"] == 2


async def test_labels_of_every_metric(toy_folder: Any) -> None:
    labels = json.dumps({"team": "search"})
    async with scripted_server(
        toy_folder, {}, enable_metrics=True, extra_metric_labels=labels
    ) as made:
        await made.client.post(CHAT, json=BODY | {"max_tokens": 2})
        shown = (await made.client.get("/metrics")).text
    lines = [line for line in shown.splitlines() if line.startswith("sglang:")]
    assert lines and all('team="search"' in line for line in lines)


def test_priorities() -> None:
    facts = IntakeFacts(10, 10, default_priority=7)
    assert (facts.priority_of(None), facts.priority_of(0)) == (7, 0)
    refusing = IntakeFacts(10, 10, refuses_priorities=True)
    assert refusing.priority_of(None) == 0
    with pytest.raises(Overloaded, match="--enable-priority-scheduling"):
        refusing.priority_of(0)


async def test_lines_of_requests_as_json_in_a_folder(toy_folder: Any, tmp_path: Path) -> None:
    options = {
        "log_requests": True, "log_requests_level": 2, "log_requests_format": "json",
        "log_requests_target": [str(tmp_path / "logs")],
    }  # fmt: skip
    async with scripted_server(toy_folder, {}, **options) as made:
        await made.client.post(CHAT, json=BODY | {"max_tokens": 2, "rid": "mine"})
        await made.post("/configure_logging", log_requests_format="text")
        await made.client.post(CHAT, json=BODY | {"max_tokens": 2, "rid": "later"})
        made.state.extra(RequestLog).lines.close()
    (file,) = (tmp_path / "logs").iterdir()
    body, received, finished, *later = file.read_text().splitlines()
    whole = json.loads(body)
    assert whole["event"] == "request.received.openai" and whole["obj"]["rid"] == "mine"
    first, last = json.loads(received), json.loads(finished)
    assert (first["event"], last["event"]) == ("request.received", "request.finished")
    assert first["rid"] == last["rid"] == "mine" and "hi" in first["obj"]["text"]
    assert first["obj"]["sampling_params"]["max_new_tokens"] == 2
    assert last["out"]["meta_info"]["completion_tokens"] == 2
    words = ("Receive OpenAI: obj={", "Receive: obj=GenerateReqInput(rid='later'", "Finish: obj=")
    assert all(word in line for word, line in zip(words, later, strict=True))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--log-requests-target .*a folder that can be written"):
        RequestLines([str(tmp_path / "file" / "logs")], "text")
