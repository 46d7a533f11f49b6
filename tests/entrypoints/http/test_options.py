"""Options of the HTTP server: parser names, and bad values that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.entrypoints.http.conftest import SCRIPT
from tests.fakes.http_server import ScriptedServer, scripted_server

from radixlm.base.errors import ConfigError
from radixlm.base.record import replace
from radixlm.config.option import options
from radixlm.intake.interfaces import Share
from radixlm.intake.observer import Observer
from radixlm.intake.records import GenerateRequest
from radixlm.intake.request_state import RequestState
from radixlm.text.reasoning import registry as reasoning
from radixlm.text.tools import registry as tools
from radixlm.wire.sampling_params import SamplingParams


def test_the_options_list_all_parsers() -> None:
    for option, names in (("tool_call_parser", tools.NAMES), ("reasoning_parser", reasoning.NAMES)):
        allowed = options()[option].flag.allowed
        assert set(allowed) == {"auto", "none", "response_template", *names}


async def test_parsers_are_detected_named_or_off(toy_folder: Path) -> None:
    async with scripted_server(toy_folder, {}) as made:
        assert made.state.tool_format in ("qwen25", "hermes")
        assert made.state.reasoning_format == "qwen3"
    async with scripted_server(
        toy_folder, {}, tool_call_parser="mistral", reasoning_parser="deepseek-r1"
    ) as made:
        assert made.state.tool_format == "mistral"
        assert made.state.reasoning_format == "deepseek-r1"
    async with scripted_server(
        toy_folder, {}, tool_call_parser="none", reasoning_parser="none"
    ) as made:
        assert made.state.tool_format is None and made.state.reasoning_format is None


@pytest.mark.parametrize(
    "options",
    [
        {"chat_template": "/no/such/file"},
        {"completion_template": "no_such_name"},
        {"tool_call_parser": "telepathy"},
    ],
)
def test_bad_options_are_named_at_start(toy_folder: Path, options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options.values()))):
        ScriptedServer(toy_folder, {}, **options)


async def test_openai_defaults_by_flag(toy_folder: Path) -> None:
    async with scripted_server(toy_folder, {}) as made:
        assert made.state.defaults.temperature == 0.0, "the model's generation_config"
    async with scripted_server(toy_folder, {}, sampling_defaults="openai") as made:
        assert made.state.defaults.temperature == 1.0


async def test_preferred_values_count_where_a_request_is_silent(toy_folder: Path) -> None:
    preferred = '{"temperature": 0.3, "stop": "x", "max_new_tokens": 3}'
    async with scripted_server(toy_folder, {}, preferred_sampling_params=preferred) as made:
        sent: list[SamplingParams] = []
        submit = made.engine.intake.submit

        def note(request: GenerateRequest, share: Share | None = None) -> list[RequestState]:
            sent.append(request.sampling)
            return submit(request, share)

        made.engine.intake.submit = note  # type: ignore[method-assign]
        own = {"temperature": 0.7, "max_new_tokens": 2}
        await made.client.post("/generate", json={"text": "hi"})
        await made.client.post("/generate", json={"text": "hi", "sampling_params": own})
    assert [(s.temperature, s.stop, s.max_new_tokens) for s in sent] == [
        (0.3, ("x",), 3),
        (0.7, ("x",), 2),
    ]


@pytest.mark.parametrize(
    "value", ['{"temperature": -1}', '{"temprature": 1}', '{"top_k": "x"}', "[]"]
)
def test_preferred_values_are_checked_at_start(toy_folder: Path, value: str) -> None:
    with pytest.raises(ConfigError, match=r"preferred.sampling.params"):
        ScriptedServer(toy_folder, {}, preferred_sampling_params=value)


class Seen(Observer):
    """What is known of the requests that were sent."""

    def __init__(self, made: ScriptedServer) -> None:
        self.fair: list[str | None] = []
        self.routing: list[str | None] = []
        self.processors: list[str | None] = []
        intake = made.engine.intake
        intake.observers = (*intake.observers, self)

    def submitted(self, state: RequestState) -> None:
        self.fair.append(state.wire.fair_key)
        self.routing.append(state.wire.routing_key)
        self.processors.append(state.wire.processor)


async def test_the_fair_share_header_names_the_user(toy_folder: Path) -> None:
    async with scripted_server(toy_folder, {}, fair_share="X-User") as made:
        seen = Seen(made)
        ann = {"x-user": "ann"}
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        await made.client.post("/v1/chat/completions", json=chat, headers=ann)
        await made.client.post("/generate", json={"text": "hi"}, headers=ann)
        await made.client.post("/v1/responses", json={"input": "hi"}, headers=ann)
        await made.post("/v1/completions", prompt="hi")
    assert seen.fair == ["ann", "ann", "ann", "address 127.0.0.1"]


async def test_routing_keys_reach_the_engine(toy_folder: Path) -> None:
    """By the header of SGLang's router, or a field of /generate."""
    async with scripted_server(toy_folder, {}) as made:
        seen, header = Seen(made), {"x-smg-routing-key": "k"}
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        await made.client.post("/v1/chat/completions", json=chat, headers=header)
        await made.client.post("/generate", json={"text": "hi"}, headers=header)
        two = {"text": ["hi", "ho"], "routing_key": ["a", "b"]}
        await made.client.post("/generate", json=two, headers=header)
        await made.post("/v1/completions", prompt="hi")
    assert seen.routing == ["k", "k", "a", "b", None]


@pytest.mark.parametrize("is_strict", [False, True])
async def test_strict_thinking_is_of_chats_and_generate(toy_folder: Path, is_strict: bool) -> None:
    async with scripted_server(toy_folder, {}, enable_strict_thinking=is_strict) as made:
        intake = made.engine.intake
        intake.facts = replace(intake.facts, processors=("thinking_budget",))
        seen, chat = Seen(made), {"messages": [{"role": "user", "content": "hi"}]}
        await made.post("/v1/chat/completions", **chat)
        await made.post("/v1/messages", max_tokens=4, **chat)
        await made.post("/generate", text="hi")
        await made.post("/v1/completions", prompt="hi")
    name = "thinking_budget" if is_strict else None
    assert seen.processors == [name, name, name, None]


async def test_unknown_tools_are_passed_on_or_dropped(toy_folder: Path) -> None:
    asked = [{"role": "user", "content": "sum please"}]
    other = [{"type": "function", "function": {"name": "other"}}]
    for drop, reason in ((False, "tool_calls"), (True, "stop")):
        async with scripted_server(toy_folder, SCRIPT, drop_unknown_tools=drop) as made:
            got = await made.post("/v1/chat/completions", messages=asked, tools=other)
            choice = got.json()["choices"][0]
            assert choice["finish_reason"] == reason
            assert bool(choice["message"]["tool_calls"]) is not drop


@pytest.mark.parametrize("stream", [False, True])
async def test_ollama_tells_the_time_of_prompt_and_answer(toy_folder: Path, stream: bool) -> None:
    body = {"model": "toy", "prompt": "stop me", "stream": stream}
    async with scripted_server(toy_folder, SCRIPT, served_model_name="toy") as server:
        answer = await server.client.post("/api/generate", json=body)
    last = json.loads(answer.text.splitlines()[-1])
    parts = [last["prompt_eval_duration"], last["eval_duration"]]
    assert all(part > 0 for part in parts)
    assert sum(parts) == last["total_duration"]


async def test_a_budget_of_thinking_may_be_unbounded(
    server: ScriptedServer, asked_for: list[GenerateRequest]
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "thinking_token_budget": -1}
    assert (await server.post("/v1/chat/completions", **body)).status_code == 200
    assert asked_for[0].max_thinking_tokens is None
    got = await server.post("/v1/chat/completions", **body | {"thinking_token_budget": -2})
    assert got.json()["error"]["param"] == "thinking_token_budget"
