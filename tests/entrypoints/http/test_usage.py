"""Usage of several prompts and samples."""

from __future__ import annotations

from typing import Any

from tests.fakes.http_server import ScriptedServer

from radixlm.entrypoints.http.openai.usage import usage
from radixlm.intake.records import Output


def _output(prompt: int, cached: int, completion: int) -> Output:
    return Output(rid="r", prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion)


OUTPUTS = [_output(10, 8, 1), _output(10, 9, 2), _output(20, 4, 3), _output(20, 5, 4)]


def test_a_prompt_and_its_cached_tokens_count_once() -> None:
    found = usage(OUTPUTS, shows_cached=True, num_prompts=2)
    assert (found["prompt_tokens"], found["completion_tokens"]) == (30, 10)
    assert found["total_tokens"] == 40
    assert found["prompt_tokens_details"] == {"cached_tokens": 12}
    assert usage(OUTPUTS, shows_cached=False, num_prompts=2)["prompt_tokens_details"] is None


def test_samples_of_one_prompt() -> None:
    found = usage(OUTPUTS[:2], shows_cached=True, reasoning_tokens=2)
    assert (found["prompt_tokens"], found["completion_tokens"]) == (10, 3)
    assert found["prompt_tokens_details"] == {"cached_tokens": 8}
    assert found["reasoning_tokens"] == 2


async def test_usage_of_a_stream_counts_each_sample_by_itself(server: ScriptedServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "n": 2}
    chunks = await server.events("/v1/chat/completions", **body, stream_options=options)
    *parts, last = chunks
    ends: dict[int, int] = {}
    for chunk in parts:
        index = chunk["choices"][0]["index"]
        count = chunk["usage"]["completion_tokens"]
        assert count >= ends.get(index, 0)
        ends[index] = count
    assert set(ends) == {0, 1} and min(ends.values()) > 0
    assert last["usage"]["completion_tokens"] == sum(ends.values())
    whole = (await server.post("/v1/chat/completions", **body)).json()["usage"]
    assert last["usage"]["completion_tokens"] == whole["completion_tokens"]
    assert (
        last["usage"]["prompt_tokens"]
        == whole["prompt_tokens"]
        == parts[0]["usage"]["prompt_tokens"]
    )
