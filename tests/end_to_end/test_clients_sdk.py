"""The official SDKs, unmodified, against the real server: cases beyond test_openai_client.py."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import ollama
import openai
import pytest
from pydantic import BaseModel

MODEL = "radix-tiny"
ASK: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
SUM = "What is 17 + 25?"
# bounded fields, because a tiny model never ends a text
SHORT = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


class GetWeather(BaseModel):
    """Weather of a city."""

    city: str


class Verdict(BaseModel):
    ok: bool
    grade: Literal[1, 2, 3, 4, 5]  # bounded, because a sampled number may have no end


@pytest.fixture(scope="module")
def gpt(client_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{client_url}/v1", api_key="x", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def claude(client_url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=client_url, api_key="x", max_retries=0) as made:
        yield made


@pytest.mark.parametrize("num", [1, 3])
def test_openai_tool_helpers(gpt: openai.OpenAI, num: int) -> None:
    tool = openai.pydantic_function_tool(GetWeather)
    body: Any = {"model": MODEL, "messages": ASK, "tools": [tool], "tool_choice": "required"}
    got = gpt.chat.completions.parse(**body, n=num, max_tokens=100, temperature=0)
    assert [choice.finish_reason for choice in got.choices] == ["tool_calls"] * num
    for choice in got.choices:
        calls: Any = choice.message.tool_calls
        assert isinstance(calls[0].function.parsed_arguments, GetWeather)
        assert choice.message.content is None
    with gpt.chat.completions.stream(**body, n=num, max_tokens=100, temperature=0) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert [c.message.tool_calls[0].function.arguments for c in final.choices] == [  # type: ignore[index]
        c.message.tool_calls[0].function.arguments  # type: ignore[index]
        for c in got.choices
    ]


def test_openai_streams_a_parsed_answer(gpt: openai.OpenAI) -> None:
    body: Any = {"model": MODEL, "messages": ASK, "response_format": Verdict, "max_tokens": 60,
                 "temperature": 0}  # fmt: skip
    with gpt.chat.completions.stream(**body, stream_options={"include_usage": True}) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(final.choices[0].message.parsed, Verdict)
    assert final.usage and final.usage.completion_tokens > 0
    assert final.system_fingerprint


def test_openai_responses(gpt: openai.OpenAI) -> None:
    parsed = gpt.responses.parse(
        model=MODEL, input="Judge.", text_format=Verdict, max_output_tokens=60, temperature=0
    )
    assert isinstance(parsed.output_parsed, Verdict)
    with gpt.responses.stream(
        model=MODEL, input="Judge.", text_format=Verdict, max_output_tokens=60, temperature=0
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Verdict)
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    tool: Any = {"type": "function", "name": "get_weather", "strict": True}
    tool["parameters"] = GetWeather.model_json_schema()
    first = gpt.responses.create(
        model=MODEL, input="Weather in Paris?", tools=[tool], tool_choice="required", temperature=0
    )
    call: Any = first.output[-1]
    assert json.loads(call.arguments)["city"]
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    second = gpt.responses.create(
        model=MODEL, previous_response_id=first.id, input=result, max_output_tokens=20
    )
    assert second.previous_response_id == first.id and second.usage
    assert gpt.responses.input_tokens.count(model=MODEL, input="hi").input_tokens > 0


def test_openai_background_and_cancel(gpt: openai.OpenAI) -> None:
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "array", "minItems": 900}}
    made = gpt.responses.create(
        model=MODEL, input="Count.", background=True, text={"format": schema}  # type: ignore[arg-type,typeddict-item]
    )  # fmt: skip
    assert made.status in ("queued", "in_progress")
    assert gpt.responses.cancel(made.id).status == "cancelled"
    gpt.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        gpt.responses.retrieve(made.id)
    events = list(
        gpt.responses.create(
            model=MODEL, input=SUM, background=True, stream=True, max_output_tokens=20
        )
    )
    again = list(gpt.responses.retrieve(events[0].response.id, stream=True, starting_after=1))  # type: ignore[union-attr]
    assert [e.sequence_number for e in again] == [e.sequence_number for e in events[2:]]


def test_openai_files_and_batches(gpt: openai.OpenAI) -> None:
    body = {"model": MODEL, "messages": ASK, "max_tokens": 4}
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for i in range(3)
    ]
    content = "\n".join(json.dumps(line) for line in lines).encode()
    kept = gpt.files.create(file=("in.jsonl", content), purpose="batch")
    batch = gpt.batches.create(
        input_file_id=kept.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    deadline_s = time.monotonic() + 60
    while batch.status not in ("completed", "failed") and time.monotonic() < deadline_s:
        time.sleep(0.05)
        batch = gpt.batches.retrieve(batch.id)
    assert batch.status == "completed" and batch.request_counts
    assert batch.request_counts.completed == 3
    out = [json.loads(line) for line in gpt.files.content(batch.output_file_id or "").iter_lines()]
    assert sorted(line["custom_id"] for line in out) == ["0", "1", "2"]
    assert all(line["response"]["status_code"] == 200 for line in out)
    assert kept.id in [file.id for file in gpt.files.list()]
    assert gpt.files.delete(kept.id).deleted


def test_anthropic_tool_runner_and_parse(claude: anthropic.Anthropic) -> None:
    asked: list[str] = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Weather of a city.

        Args:
            city: the city
        """
        asked.append(city)
        return "sunny"

    for streams in (False, True):
        runner: Any = claude.beta.messages.tool_runner(
            model=MODEL, max_tokens=60, messages=ASK, tools=[get_weather], max_iterations=2,
            stream=streams, tool_choice={"type": "any"}, extra_body={"temperature": 0},
        )  # fmt: skip
        for message in runner:
            if streams:
                kinds = {event.type for event in message}
                assert "message_stop" in kinds
    assert len(asked) >= 2
    parsed = claude.messages.parse(
        model=MODEL,
        max_tokens=60,
        messages=ASK,
        output_format=Verdict,
        extra_body={"temperature": 0},
    )
    assert isinstance(parsed.parsed_output, Verdict)


def test_anthropic_thinking_counts_and_models(claude: anthropic.Anthropic) -> None:
    user: Any = [{"role": "user", "content": SUM}]
    got = claude.messages.create(
        model=MODEL,
        max_tokens=1500,
        messages=user,
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    assert got.content[0].type == "thinking" and got._request_id
    begun = claude.messages.create(
        model=MODEL, max_tokens=5, messages=[*user, {"role": "assistant", "content": "It is"}]
    )
    counted = claude.messages.count_tokens(model=MODEL, messages=user)
    read = begun.usage.input_tokens + (begun.usage.cache_read_input_tokens or 0)
    assert counted.input_tokens < read < counted.input_tokens + 12
    (model,) = claude.models.list()
    assert (model.id, model.type) == (MODEL, "model")


def test_ollama(client_url: str) -> None:
    client = ollama.Client(host=client_url)
    try:
        got = client.chat(MODEL, ASK, format=SHORT, options={"temperature": 0, "num_predict": 40})
        assert isinstance(json.loads(got.message.content or "")["ok"], bool)
        parts = list(client.generate(MODEL, SUM, stream=True, options={"num_predict": 5}))
        assert parts[-1].done and parts[-1].eval_count
    finally:
        client._client.close()


def test_embeddings(vector_url: str) -> None:
    with openai.OpenAI(base_url=f"{vector_url}/v1", api_key="x", max_retries=0) as client:
        floats = client.embeddings.create(model="default", input=["a", "b"])
        texts: Any = client.embeddings.create(
            model="default", input=["a", "b"], encoding_format="float"
        )
        assert len(floats.data) == 2
        assert floats.data[1].embedding == pytest.approx(texts.data[1].embedding, abs=1e-5)
