"""Fields that no table names: ignored with a warning, or refused (--unknown-fields); fields of
other servers with a counterpart; names of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.entrypoints.http.conftest import SCRIPT
from tests.fakes.http_server import ScriptedServer, scripted_server

from radixlm.wire import unknown
from radixlm.wire.sampling_params import SamplingParams

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HEADER = "X-RadixLM-Ignored"
USER = [{"role": "user", "content": "hi"}]
BODIES: list[tuple[str, dict[str, Any], str]] = [
    ("/generate", {"text": "a", "nonsense": 1}, "nonsense"),
    ("/generate", {"text": "a", "sampling_params": {"temprature": 1}}, "temprature"),
    (COMPLETIONS, {"prompt": "a", "nonsense": {"a": 1}}, "nonsense"),
    (CHAT, {"messages": USER, "nonsense": None}, "nonsense"),
    (CHAT, {"messages": USER, "stream_options": {"x": 1}, "stream": True}, "stream_options.x"),
    ("/v1/responses", {"input": "x", "nonsense": 1}, "nonsense"),
    ("/v1/messages", {"model": "m", "max_tokens": 9, "messages": USER, "nonsense": 1}, "nonsense"),
    ("/api/chat", {"model": "m", "messages": USER, "nonsense": 1}, "nonsense"),
    ("/api/chat", {"model": "m", "messages": USER, "options": {"warmth": 1}}, "options.warmth"),
    ("/tokenize", {"prompt": "a", "nonsense": 1}, "nonsense"),
    ("/vertex_generate", {"instances": [{"text": "a"}], "nonsense": 1}, "nonsense"),
]


@pytest.mark.parametrize(("path", "body", "name"), BODIES, ids=range(len(BODIES)))
async def test_an_unknown_field_is_ignored_and_named(
    server: ScriptedServer, path: str, body: dict[str, Any], name: str
) -> None:
    got = await server.post(path, **body)
    assert got.status_code == 200, got.text
    assert got.headers[HEADER] == name


@pytest.mark.parametrize("policy", ["ignore", "refuse"])
async def test_the_policy_is_of_the_flag(toy_folder: Path, policy: str) -> None:
    async with scripted_server(toy_folder, SCRIPT, unknown_fields=policy) as made:
        for path, body, name in BODIES:
            got = await made.post(path, **body)
            assert HEADER not in got.headers
            assert got.status_code == (200 if policy == "ignore" else 400), got.text
            if policy == "refuse" and path != "/api/chat":
                assert name in got.json()["error"]["message"]
                assert got.json()["error"]["param"].endswith(name)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/generate", "/tokenize", "/v1/responses"])
@pytest.mark.parametrize("token", ["NaN", "Infinity", "-Infinity"])
async def test_not_even_free_fields_hold_nan(server: ScriptedServer, path: str, token: str) -> None:
    for value, place in ((token, "Free"), (f'{{"a": [1, {{"b": {token}}}]}}', "Free.a[1].b")):
        data = f'{{"prompt": "NaN", "Free": {value}}}'
        headers = {"content-type": "application/json"}
        got = await server.client.post(path, content=data, headers=headers)
        assert got.status_code == 400
        message = got.json()["error"]["message"]
        assert message == f"{place}: NaN and infinities are not JSON"
        assert got.json()["error"]["param"] == place


async def test_nan_in_a_string_is_text(server: ScriptedServer) -> None:
    got = await server.post("/tokenize", prompt='{"a": NaN, "b": -Infinity}')
    assert got.status_code == 200, got.text


LAX: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (CHAT, {"max_tokens": "2", "n": 2.0, "logprobs": "on", "top_logprobs": "1"},
     {"max_tokens": 2, "n": 2, "logprobs": True, "top_logprobs": 1}),
    (COMPLETIONS, {"max_tokens": "2", "temperature": "0.5", "echo": 1, "ignore_eos": "yes"},
     {"max_tokens": 2, "temperature": 0.5, "echo": True, "ignore_eos": True}),
    (COMPLETIONS, {"stream": "false", "logit_bias": {"5": "-1"}},
     {"stream": False, "logit_bias": {"5": -1}}),
    (COMPLETIONS, {"prompt": [True], "priority": True}, {"prompt": [1], "priority": 1}),
    ("/generate", {"return_logprob": "true", "sampling_params": {"max_new_tokens": "2"}},
     {"return_logprob": True, "sampling_params": {"max_new_tokens": 2}}),
    ("/v1/messages", {"max_tokens": "2", "stream": 0}, {"max_tokens": 2, "stream": False}),
    ("/api/chat", {"stream": "off", "logprobs": "1"}, {"stream": False, "logprobs": True}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "lax", "plain"), LAX, ids=range(len(LAX)))
async def test_numbers_and_booleans_may_be_strings(
    server: ScriptedServer, path: str, lax: dict[str, Any], plain: dict[str, Any]
) -> None:
    """As pydantic's lax mode reads them, which SGLang's routes use."""
    base: dict[str, Any] = {"model": "tiny", "messages": USER}
    if path in ("/generate", COMPLETIONS):
        base = {"text" if path == "/generate" else "prompt": "a"}
    answers = [await server.post(path, **base | fields) for fields in (lax, plain)]
    assert {one.status_code for one in answers} == {200}, answers[0].text
    found = [parts_of(one.json()) for one in answers]
    assert found[0] == found[1]


def parts_of(answer: dict[str, Any]) -> list[Any]:
    """What an answer says, without ids and times."""
    usage = {**answer.get("usage", {}), **answer.get("meta_info", {})}
    count = usage.get("completion_tokens", usage.get("output_tokens", answer.get("eval_count")))
    names = ("choices", "text", "content", "message")
    return [count, *(answer.get(name) for name in names)]


async def test_a_field_is_logged_once(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unknown, "_warned", set())
    for _ in range(3):
        await server.post(CHAT, messages=USER, once="x")
    assert caplog.text.count("unknown field once") == 1


async def test_a_name_cannot_break_the_header(server: ScriptedServer) -> None:
    got = await server.post(CHAT, messages=USER, **{"a\r\nset-cookie: x": 1, "ü": 2})
    assert got.status_code == 200 and "set-cookie" not in got.headers
    assert got.headers[HEADER] == "a??set-cookie: x, \\xfc"


async def test_the_routers_fields_of_generate_are_known(server: ScriptedServer) -> None:
    """sglang-router adds "model": null, clients of OpenAI's form add stream_options."""
    got = await server.post("/generate", text="hi", model=None, stream_options={"a": 1}, user="u")
    assert got.status_code == 200 and HEADER not in got.headers


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ({"guided_json": {"type": "object"}}, {"json_schema": '{"type": "object"}'}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a.b", "c"]}, {"regex": r"(a\.b|c)"}),
        ({"guided_grammar": "root ::= 'a'"}, {"ebnf": "root ::= 'a'"}),
        ({"grammar": "root ::= 'a'"}, {"ebnf": "root ::= 'a'"}),
        ({"structured_outputs": {"regex": "a+", "json": None}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["x", "y"]}}, {"regex": "(x|y)"}),
        ({"include_stop_str_in_output": True}, {"no_stop_trim": True}),
        ({"n_predict": 7}, {"max_new_tokens": 7}),
        ({"n_predict": -1}, {}),
        ({"max_tokens": 7, "min_tokens": 2, "seed": 3}, None),
        ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ],
)
def test_fields_of_other_servers_are_read(
    sent: dict[str, Any], meant: dict[str, Any] | None
) -> None:
    if meant is None:
        meant = {"max_new_tokens": 7, "min_new_tokens": 2, "sampling_seed": 3}
    assert SamplingParams.from_dict(sent) == SamplingParams(**meant)


async def test_openais_routes_read_them_too(server: ScriptedServer) -> None:
    got = await server.post(CHAT, messages=USER, n_predict=2)
    assert got.json()["usage"]["completion_tokens"] == 2 and HEADER not in got.headers
    got = await server.post(CHAT, messages=USER, n_predict=2, max_tokens=1)
    assert got.json()["usage"]["completion_tokens"] == 1  # our own name takes precedence
    got = await server.post(
        COMPLETIONS,
        prompt="stop me",
        stop="STOP",
        include_stop_str_in_output=True,
        max_tokens=64,
    )
    assert got.json()["choices"][0]["text"].endswith("STOP")
    for name, wrong in (
        ("guided_regex", 5),
        ("guided_choice", "x"),
        ("structured_outputs", 1),
        ("structured_outputs", {"rule": "a"}),
    ):
        refused = await server.post(CHAT, messages=USER, **{name: wrong})
        assert refused.status_code == 400 and name in refused.json()["error"]["message"]


async def test_what_would_change_the_answer_is_refused_by_name(server: ScriptedServer) -> None:
    for name, value in (
        ("typical_p", 0.5),
        ("vllm_xargs", {"a": 1}),
        ("repetition_detection", {"max_pattern_size": 3}),
        ("mirostat", 2),
        ("logits_processors", ["x"]),
    ):
        got = await server.post(COMPLETIONS, prompt="a", **{name: value})
        assert got.status_code == 400 and got.json()["error"]["param"] == name, got.text
    off = await server.post(COMPLETIONS, prompt="a", typical_p=1.0, mirostat=0, keep_alive="5m")
    assert off.status_code == 200 and HEADER not in off.headers


async def test_tools_that_anthropic_defines_are_left_out(server: ScriptedServer) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": USER, "betas": ["x"]}
    tools = [{"type": "bash_20250124", "name": "bash"}]
    effort = {"effort": "minimal"}
    got = await server.post("/v1/messages", **body, tools=tools, output_config=effort)
    assert got.status_code == 200 and HEADER not in got.headers
    assert "bash_20250124 is left out" in got.headers["X-RadixLM-Warning"]
    tools = [{"type": "mcp_toolset", "name": "x"}]
    assert (await server.post("/v1/messages", **body, tools=tools)).status_code == 400


async def test_one_model_serves_every_name(server: ScriptedServer) -> None:
    for name in ("gpt-4o", "tiny:latest", "x/y"):
        got = await server.post(CHAT, model=name, messages=USER)
        assert got.status_code == 200 and got.json()["model"] == "tiny"
    assert (await server.client.get("/v1/models")).json()["data"][0]["root"] == "tiny"
    assert (await server.client.get("/v1/models/gpt-4o")).status_code == 404
    assert (await server.client.get("/v1/models/tiny:latest")).status_code == 200


async def test_stream_options_and_top_logprobs_need_nothing_else(server: ScriptedServer) -> None:
    """As in SGLang, where both have no effect then."""
    got = await server.post(CHAT, messages=USER, stream_options={"include_usage": True})
    assert got.status_code == 200
    got = await server.post(CHAT, messages=USER, top_logprobs=3)
    assert got.status_code == 200 and got.json()["choices"][0]["logprobs"] is None


async def test_vertex_parameters_are_the_fields_of_generate(server: ScriptedServer) -> None:
    for parameters in ({"sampling_params": {"max_new_tokens": 2}}, {"max_new_tokens": 2}):
        got = await server.post(
            "/vertex_generate", instances=[{"text": "hi"}], parameters=parameters
        )
        meta = got.json()["predictions"][0]["meta_info"]
        assert meta["completion_tokens"] == 2
    asked = {"return_logprob": True, "sampling_params": {"max_new_tokens": 1}}
    got = await server.post("/vertex_generate", instances=[{"text": "hi"}], parameters=asked)
    assert len(got.json()["predictions"][0]["meta_info"]["output_token_logprobs"]) == 1
