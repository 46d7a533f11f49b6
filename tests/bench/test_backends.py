"""Request bodies and answer meters of the three APIs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from radixlm.bench.backends import BACKENDS, NativeMeter, OpenAiMeter, RequestOptions, error_text
from radixlm.bench.datasets import Row

TEXT = Row("hello", None, 1, 5)
IDS = Row(None, [4, 5], 2, 5)


def native(count: int, text: str = "x", **meta: Any) -> bytes:
    info = {"prompt_tokens": 3, "completion_tokens": count, "cached_tokens": 2, **meta}
    return json.dumps({"text": text, "meta_info": info}, separators=(",", ":")).encode()


def chat(text: str | None, usage: dict[str, int] | None = None) -> bytes:
    choices = [] if text is None else [{"index": 0, "delta": {"content": text}}]
    return json.dumps({"choices": choices, "usage": usage}).encode()


def test_itl_divides_the_time_between_events_by_their_tokens() -> None:
    meter = NativeMeter(10.0)
    for count, now_s in ((0, 10.5), (1, 11.0), (3, 12.0), (3, 12.5), (4, 15.0)):
        meter.event(native(count, queue_time=0.25), now_s)
    meter.event(b"[DONE]", 16.0)
    meter.finish()
    out = meter.out
    assert (out.ttft_s, out.latency_s, out.itls_s) == (1.0, 5.0, [0.5, 0.5, 3.0])
    assert (out.num_prompt, out.num_output, out.num_cached, out.queue_s) == (3, 4, 2, 0.25)


def test_a_text_that_looks_like_a_count_is_only_text() -> None:
    meter = NativeMeter(0.0)
    meter.event(native(2, '"completion_tokens":99,'), 1.0)
    tail = json.loads(native(2))
    tail["note"] = '{"completion_tokens":77}'
    meter.event(json.dumps(tail).encode(), 2.0)
    meter.finish()
    assert (meter.out.num_output, meter.out.itls_s) == (2, [])


def test_native_errors_in_and_at_the_end_of_a_stream() -> None:
    meter = NativeMeter(0.0)
    meter.event(native(1), 1.0)
    meter.event(b'{"error":{"message":"too long","code":400}}', 2.0)
    meter.finish()
    assert (meter.out.error, meter.out.status) == ("too long", 400)
    meter = NativeMeter(0.0)
    reason = {"type": "abort", "message": "late", "status_code": 503}
    meter.event(native(1, finish_reason=reason), 1.0)
    meter.finish()
    assert (meter.out.error, meter.out.status) == ("late", 503)


def test_only_chunks_with_text_count_in_a_chat() -> None:
    meter = OpenAiMeter(0.0)
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    events = [(chat(""), 1.0), (chat("a"), 2.0), (chat("b"), 4.0), (chat(None, usage), 9.0)]
    for data, now_s in events:
        meter.event(data, now_s)
    meter.finish()
    out = meter.out
    assert (out.text, out.ttft_s, out.itls_s, out.latency_s) == ("ab", 2.0, [2.0], 4.0)
    assert (out.num_prompt, out.num_output) == (7, 3)


def test_completion_and_reasoning_text_is_counted() -> None:
    meter = OpenAiMeter(0.0)
    meter.event(b'{"choices":[{"text":"one"}]}', 1.0)
    meter.event(b'{"choices":[{"delta":{"reasoning_content":"two"}}]}', 2.0)
    call = {"function": {"arguments": "three"}}
    meter.event(json.dumps({"choices": [{"delta": {"tool_calls": [call]}}]}).encode(), 3.0)
    meter.finish()
    assert (meter.out.text, len(meter.out.itls_s)) == ("onetwothree", 2)


def test_an_answer_without_a_stream() -> None:
    meter = OpenAiMeter(0.0)
    message = {"message": {"content": "hi"}}
    meter.whole({"choices": [message], "usage": {"prompt_tokens": 1, "completion_tokens": 2}})
    assert (meter.out.text, meter.out.num_output) == ("hi", 2)


def test_native_bodies_merge_sampling_parameters() -> None:
    options = RequestOptions("m", extra={"sampling_params": {"top_p": 0.5}, "priority": 3})
    body = BACKENDS["sglang"].body(IDS, options)
    assert body["input_ids"] == [4, 5] and "text" not in body and body["priority"] == 3
    sampling = {"temperature": 0.0, "max_new_tokens": 5, "ignore_eos": True, "top_p": 0.5}
    assert body["sampling_params"] == sampling


@pytest.mark.parametrize("name", ["sglang-oai", "vllm", "lmdeploy"])
def test_completion_bodies(name: str) -> None:
    body = BACKENDS[name].body(IDS, RequestOptions("m", ignore_eos=False, return_logprob=True))
    assert body["prompt"] == [4, 5] and body["max_tokens"] == 5 and body["logprobs"] == 1
    assert body["model"] == "m" and body["ignore_eos"] is False
    assert body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("name", ["sglang-oai-chat", "vllm-chat", "lmdeploy-chat"])
def test_chat_bodies(name: str) -> None:
    adapted = Row("hello", None, 1, 5, adapter="lora")
    body = BACKENDS[name].body(
        adapted, RequestOptions("m", is_stream=False, extra={"temperature": 1.0})
    )
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert body["model"] == "lora" and body["temperature"] == 1.0 and "stream_options" not in body


@pytest.mark.parametrize(
    "body", [{"error": {"message": "m"}}, {"error": "m"}, {"message": "m"}, "m"]
)
def test_every_form_of_an_error_has_its_text(body: Any) -> None:
    assert error_text(body) == "m"
