"""Every row of the wire contract that is a route, a field or a key of an answer: it is there, it
has its effect, or it is refused by its name."""

from __future__ import annotations

import gzip
import re
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest
from tests.entrypoints.http.conftest import SCRIPT
from tests.fakes.http_server import ScriptedServer, scripted_server

from radixlm.entrypoints.http.not_implemented import UNBUILT

USER = [{"role": "user", "content": "hi"}]
THINK = [{"role": "user", "content": "think about"}]
SUM = [{"role": "user", "content": "sum please"}]
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": ADD}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class Row:
    """A call, its status, and dotted paths into its answer with what stands there (... : any)."""

    ids: str
    call: str
    body: Any = None
    status: int = 200
    has: dict[str, Any] = field(default_factory=dict)


def chat(ids: str, status: int = 200, has: Any = None, **body: Any) -> Row:
    return Row(ids, f"POST {CHAT}", {"messages": USER} | body, status, has or {})


def text(ids: str, status: int = 200, has: Any = None, **body: Any) -> Row:
    return Row(ids, f"POST {TEXT}", {"prompt": "hi"} | body, status, has or {})


def native(ids: str, status: int = 200, has: Any = None, **body: Any) -> Row:
    return Row(ids, "POST /generate", {"text": "hi"} | body, status, has or {})


def sampling(ids: str, value: Any, status: int = 200, has: Any = None) -> Row:
    return native(ids, status, has, sampling_params=value)


REFUSED = 400
NAMED = {"error.message": ...}
ROWS = [
    *(Row("NH-01", f"{m} /health") for m in ("GET", "HEAD")),
    Row("NH-02", "GET /health_generate"),
    Row("NH-03", "GET /ready"),
    Row("NH-04", "GET /get_model_info", has={"model_path": ..., "weight_version": "default"}),
    Row("NH-04", "GET /model_info", has={"is_generation": True, "tokenizer_path": ...}),
    Row("NH-05", "GET /get_server_info", has={"internal_states.0.load": 0, "status": "ready"}),
    Row("NH-05", "GET /server_info", has={"version": ..., "max_req_input_len": ...}),
    Row("NH-06", "GET /get_weight_version", has={"weight_version": "default"}),
    Row("NH-07", "GET /get_load", has={"0.dp_rank": 0, "0.num_reqs": 0}),
    Row("NH-07", "GET /v1/loads?include=core,memory", has={"loads.0.token_usage": ...}),
    *(Row("NH-08", f"{m} /set_internal_state", {"server_args": {}}) for m in ("POST", "PUT")),
    Row("NH-08", "POST /set_internal_state", {"server_args": {"tp_size": 2}}, REFUSED, NAMED),
    native("NH-09 MI-01", has={"text": "Hello there.", "meta_info.id": "a"}, rid="a"),
    Row("NH-09", "PUT /generate", {"text": ["hi", "hi"]}, has={"1.text": "Hello there."}),
    Row("NH-10", "POST /generate_from_file", None, REFUSED, {"error.param": "file"}),
    Row("NH-12", "POST /classify", {"text": "a"}, REFUSED, NAMED),  # no reward model
    *(Row("NH-13", f"{m} /flush_cache") for m in ("GET", "POST")),
    *(Row("NH-16", f"{m} /freeze_gc") for m in ("GET", "POST")),
    Row("NH-23", "POST /update_weight_version", {"new_version": "default"}, has={"success": True}),
    *(Row("NH-24", f"{m} /get_weights_by_name?name=x") for m in ("GET", "POST")),
    *(Row("NH-26", f"{m} /slow_down?forward_sleep_time=0") for m in ("GET", "POST")),
    *(Row("NH-29", f"{m} /open_session?capacity_of_str_len=9") for m in ("GET", "POST")),
    Row("NH-29 NH-30", "POST /open_session", {"capacity_of_str_len": 9, "session_id": "s"}),
    *(Row("NH-30", f"{m} /close_session?session_id=s", None, s) for m, s in (("GET", 200),)),
    Row("NH-31", "POST /configure_logging", {"log_requests": False, "log_requests_level": 0}),
    Row("NH-32", "POST /abort_request", {"rid": "x", "abort_all": False}, has={"success": False}),
    Row(
        "NH-33",
        "POST /parse_function_call",
        {"text": '<tool_call>{"name": "f"}</tool_call>', "tools": [], "tool_call_parser": "qwen25"},
        has={"calls.0.name": "f", "calls.0.tool_index": 0, "normal_text": ""},
    ),
    Row(
        "NH-34",
        "POST /separate_reasoning",
        {"text": "a</think>b", "reasoning_parser": "deepseek-r1"},
        has={"reasoning_text": "a", "text": "b"},
    ),
    Row("NH-35", "POST /pause_generation", {"mode": "in_place"}, has={"status": "ok"}),
    Row("NH-35", "POST /continue_generation", has={"status": "ok"}),
    Row("NH-37", "GET /ping"),
    Row("NH-37", "POST /invocations", {"messages": USER}, has={"object": "chat.completion"}),
    Row(
        "NH-38",
        "POST /vertex_generate",
        {"instances": [{"text": "hi"}], "parameters": {"max_new_tokens": 2}},
        has={"predictions.0.text": ...},
    ),
    *(
        Row("NH-39", f"POST {v}/tokenize", {"prompt": "hi"}, has={"tokens": ..., "count": ...})
        for v in ("", "/v1")
    ),
    Row("NH-39", "POST /tokenize", {"messages": USER}, has={"max_model_len": 2048}),
    Row("NH-39", "POST /detokenize", {"tokens": [5]}, has={"text": ...}),
    Row("NH-39", "POST /v1/detokenize", {"tokens": [5]}, has={"text": ...}),
    *(Row("NH-42", f"{m} /") for m in ("GET", "HEAD")),
    Row(
        "NH-42",
        "POST /api/chat",
        {"model": "tiny", "messages": USER, "stream": False, "logprobs": True, "top_logprobs": 2},
        has={"message.content": "Hello there.", "done": True, "logprobs.0.top_logprobs.1": ...},
    ),
    Row(
        "NH-42",
        "POST /api/generate",
        {"model": "tiny", "prompt": "hi", "stream": False, "keep_alive": "5m", "think": False},
        has={"response": "Hello there.", "eval_count": ...},
    ),
    Row("NH-42", "POST /api/show", {"model": "tiny"}, has={"details.family": ...}),
    Row("NH-42", "GET /api/tags", has={"models.0.name": "tiny"}),
    Row("NH-42", "GET /api/version", has={"version": ...}),
    Row(
        "NH-43",
        "POST /v1/messages",
        {"messages": USER, "max_tokens": 9, "metadata": {"user_id": "u"}, "system": "Be brief."},
        has={"content.0.type": "text", "usage.input_tokens": ..., "stop_reason": ...},
    ),
    Row("NH-43", "POST /v1/messages/count_tokens", {"messages": USER}, has={"input_tokens": ...}),
    *(
        Row(
            "NH-43",
            "POST /v1/messages",
            {"messages": USER, "max_tokens": 2, "context_management": {"edits": edits}},
            status,
            has,
        )
        for edits, status, has in (
            ([], 200, {}),
            ([{"type": "clear_thinking_20251015", "keep": "all"}], 200, {"role": "assistant"}),
            ([{"type": "clear_thinking_20251015"}], REFUSED, {"error.param": "context_management"}),
            ([{"type": "clear_tool_uses_20250919", "keep": "all"}], REFUSED, {}),
        )
    ),
    # ---- OpenAI ------------------------------------------------------------------------------
    text(
        "OA-01",
        has={"choices.0.text": "Hello there.", "choices.0.matched_stop": ..., "metadata": ...},
        max_tokens=50,
    ),
    chat("OA-02", has={"choices.0.message.content": "Hello there.", "system_fingerprint": ...}),
    Row("OA-04", "GET /v1/models", has={"data.0.owned_by": "sglang", "data.0.parent": None}),
    Row("OA-04", "GET /v1/models/tiny", has={"root": ..., "max_model_len": 2048}),
    Row("OA-04", "GET /v1/models/x", None, 404, {"error.code": "model_not_found"}),
    Row(
        "OA-05",
        "POST /v1/score",
        {"query": "a", "items": ["b"], "label_token_ids": [1, 2], "apply_softmax": True},
        has={"scores.0.1": ..., "object": "scoring"},
    ),
    Row("OA-07", "POST /v1/responses", {"input": "hi"}, has={"status": "completed"}),
    Row("OA-07", "GET /v1/responses/resp_x", None, 404, NAMED),
    Row("OA-07", "POST /v1/responses/resp_x/cancel", None, 404, NAMED),
    Row("OA-08", "POST /v1/classify", {"input": "a"}, REFUSED, NAMED),  # no classifier
    Row("OA-10", "GET /v1/files", has={"object": "list"}),
    Row("OA-10", "GET /v1/batches", has={"object": "list"}),
    text("OA-11", has={"usage.completion_tokens": 16}, prompt="forever"),
    chat("OA-12", response_format={"type": "text"}),
    chat("OA-12", REFUSED, {"error.param": ...}, response_format={"type": "xml"}),
    chat(
        "OA-13",
        has={
            "choices.0.finish_reason": "tool_calls",
            "choices.0.message.tool_calls.0.function.name": "add",
            "choices.0.message.tool_calls.0.id": re.compile(r"call_[0-9a-f]{24}"),
        },
        messages=SUM,
        tools=TOOLS,
    ),
    chat("OA-13", has={"choices.0.finish_reason": "stop"}, messages=SUM, tool_choice="none"),
    chat("OA-13", REFUSED, {"error.param": "tool_choice"}, tool_choice="required"),
    chat(
        "OA-13",
        REFUSED,
        NAMED,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "nobody"}},
    ),
    chat(
        "OA-14",
        has={
            "choices.0.message.reasoning_content": ...,
            "usage.reasoning_tokens": ...,
            "choices.0.message.content": ...,
        },
        messages=THINK,
        chat_template_kwargs={"enable_thinking": True},
    ),
    *(chat("OA-14", reasoning_effort=e) for e in ("none", "low", "medium", "high", 0.5)),
    chat(
        "OA-14",
        has={"choices.0.message.reasoning_content": None},
        messages=THINK,
        separate_reasoning=False,
        stream_reasoning=False,
    ),
    chat(
        "OA-15",
        top_k=5,
        min_p=0.1,
        min_tokens=1,
        repetition_penalty=1.1,
        stop_token_ids=[3],
        no_stop_trim=True,
        ignore_eos=False,
        skip_special_tokens=True,
        rid="r1",
        logit_bias={"5": 1.0},
        seed=3,
        lora_path=None,
        bootstrap_host=None,
        bootstrap_port=None,
        bootstrap_room=None,
        return_hidden_states=False,
    ),
    chat(
        "OA-15",
        has={"choices.0.message.content": "Hello there."},
        messages=[*USER, {"role": "assistant", "content": "Well"}],
        continue_final_message=True,
    ),
    chat("OA-15", REFUSED, {"error.param": "lora_path"}, lora_path="x"),
    chat("OA-15", REFUSED, {"error.param": "return_hidden_states"}, return_hidden_states=True),
    chat(
        "OA-16",
        has={"choices.0.token_ids": ..., "choices.0.meta_info": ...},
        priority=1,
        extra_key="k",
        cache_salt="s",
        stop_regex="x+",
        data_parallel_rank=0,
        routed_dp_rank=0,
        return_token_ids=True,
        return_meta_info=True,
        custom_labels={"a": "b"},
    ),
    chat("OA-16", REFUSED, {"error.param": "data_parallel_rank"}, data_parallel_rank=1),
    chat("OA-16", REFUSED, {"error.param": "routed_dp_rank"}, routed_dp_rank=-1),
    chat("OA-16", REFUSED, {"error.param": "input_ids"}, input_ids=[]),
    chat("OA-16", REFUSED, {"error.param": "max_completion_tokens"}, max_completion_tokens=9999),
    chat("OA-16", REFUSED, {"error.param": "max_tokens"}, max_tokens=9999),
    Row(
        "OA-07",
        "POST /v1/responses",
        {"input": "hi", "max_output_tokens": 9999},
        REFUSED,
        {"error.param": "max_output_tokens"},
    ),
    Row(
        "NH-42",
        "POST /api/chat",
        {"model": "tiny", "messages": USER, "options": {"num_predict": 9999}},
        REFUSED,
        {"error": ...},
    ),
    sampling("SP-01", {"max_new_tokens": 9999}, REFUSED, {"error.param": "max_new_tokens"}),
    native("OA-16", REFUSED, {"error.param": "routed_dp_rank"}, routed_dp_rank=4),
    native(
        "MI-05",
        has={"meta_info.input_token_logprobs.0.0": None, "meta_info.input_token_logprobs.1.0": ...},
        text="hi there, you",
        return_logprob=True,
        sampling_params={"max_new_tokens": 0},
    ),
    chat("OA-16", REFUSED, NAMED, routed_dp_rank=0, data_parallel_rank=1),
    native("OA-16", REFUSED, {"error.param": "data_parallel_rank"}, data_parallel_rank=1),
    native("OA-16", REFUSED, {"error.param": "data_parallel_rank"}, data_parallel_rank=True),
    *(
        chat("OA-16", REFUSED, {"error.param": name}, **{name: value})
        for name, value in {
            "watermark": {"a": 1},
            "return_routed_experts": True,
            "mm_processor_kwargs": {"a": 1},
            "session_id": "s",
            "images_config": {"a": 1},
        }.items()
    ),
    chat("OA-17", has={"usage.prompt_tokens_details.cached_tokens": ...},
         return_cached_tokens_details=True),
    chat("OA-18", messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]),
    chat(
        "OA-18",
        REFUSED,
        NAMED,
        messages=[{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x"}}]}],
    ),
    chat(
        "OA-18",
        messages=[
            *USER,
            {"role": "assistant", "reasoning_content": "hm", "content": None, "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "3"},
        ],
    ),
    chat(
        "OA-19",
        has={"choices.0.logprobs.content.0.top_logprobs.1.bytes": ...},
        logprobs=True,
        top_logprobs=2,
    ),
    text(
        "OA-19",
        has={
            "choices.0.logprobs.token_logprobs.0": None,
            "choices.0.logprobs.text_offset.0": 0,
            "choices.0.logprobs.tokens.0": ...,
        },
        echo=True,
        logprobs=2,
    ),
    # ---- /generate ---------------------------------------------------------------------------
    sampling("SP-01", {"max_new_tokens": 2}, has={"meta_info.finish_reason.type": "length"}),
    sampling("SP-02", {"stop": ["there"]}, has={"text": "Hello "}),
    sampling("SP-03", {"stop_token_ids": [10**9]}, REFUSED, NAMED),
    *(sampling("SP-04", {"temperature": t}) for t in (0, 2.5)),
    *(sampling(f"SP-{i:02}", bad, REFUSED, NAMED) for i, bad in [
        (4, {"temperature": -1}), (5, {"top_p": 0}), (6, {"top_k": 0}), (7, {"min_p": 2}),
        (8, {"frequency_penalty": 3}), (9, {"presence_penalty": -3}),
        (10, {"repetition_penalty": 3}), (11, {"min_new_tokens": 9, "max_new_tokens": 2}),
        (12, {"n": 0}), (14, {"structural_tag": 5}), (20, {"logit_bias": {"999999": 1}}),
    ]),
    sampling(
        "SP-05 SP-06 SP-07 SP-08 SP-09 SP-10 SP-11 SP-15 SP-16 SP-17 SP-19 SP-20 SP-21",
        {
            "top_p": 0.9, "top_k": 40, "min_p": 0.1, "frequency_penalty": 0.5,
            "presence_penalty": -0.5, "repetition_penalty": 1.1, "min_new_tokens": 1,
            "ignore_eos": False, "skip_special_tokens": True,
            "spaces_between_special_tokens": True, "stream_interval": 2, "logit_bias": {"5": -1},
            "custom_params": {"a": 1},
        },
    ),
    sampling("SP-12", {"n": 2}, has={"1.text": "Hello there."}),
    sampling(
        "SP-13",
        {"regex": "a", "ebnf": 'root ::= "a"'},
        REFUSED,
        {"error.message": "Only one of regex, json_schema, or ebnf can be set."},
    ),
    sampling("SP-18", {"stop": ["there"], "no_stop_trim": True}, has={"text": "Hello there"}),
    sampling("SP-22", {"sampling_seed": 3, "stop_regex": "the.e"}, has={"text": "Hello "}),
    sampling("SP-22", {"beam_width": 4}, 501, NAMED),
    native(
        "MI-02 MI-03 MI-04 MI-10",
        has={
            "meta_info.finish_reason.type": "stop",
            "meta_info.finish_reason.matched": ...,
            "meta_info.prompt_tokens": ...,
            "meta_info.completion_tokens": ...,
            "meta_info.cached_tokens": ...,
            "meta_info.weight_version": "default",
            "meta_info.e2e_latency": ...,
            "meta_info.num_retractions": 0,
        },
    ),
    native(
        "MI-05 MI-06 MI-07",
        has={
            "meta_info.input_token_logprobs.0.0": None,
            "meta_info.output_token_logprobs.0.2": ...,
            "meta_info.output_top_logprobs.0.1": ...,
            "meta_info.output_token_ids_logprobs.0.0.1": 7,
        },
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        token_ids_logprob=[7],
        return_text_in_logprobs=True,
    ),
    native("MI-08", REFUSED, NAMED, return_hidden_states=True),
    native("NH-09", REFUSED, {"error.param": "lora_path"}, lora_path="x"),
    native("NH-09", **dict.fromkeys(  # a router sends all of the reference's fields
        "image_data video_data audio_data modalities session_params lora_path bootstrap_host "
        "bootstrap_port bootstrap_room data_parallel_rank conversation_id label priority "
        "session_id mm_hashes video_config routing_key extra_key no_logs custom_labels "
        "max_thinking_tokens kv_hints watermark".split())),
]  # fmt: skip
# a server with --is-embedding
VECTORS = [
    *(
        Row("NH-11", f"{m} /encode", {"text": "a"}, has={"embedding": ..., "meta_info.id": ...})
        for m in ("POST", "PUT")
    ),
    Row("NH-11", "POST /encode", {"input_ids": [[1], [2]]}, has={"1.embedding": ...}),
    Row(
        "OA-03",
        "POST /v1/embeddings",
        {"input": ["a", "b"], "encoding_format": "base64", "user": "u"},
        has={"data.1.embedding": ..., "usage.prompt_tokens": ...},
    ),
]
# built by other tests' servers, or features of their own with tests of their own
ELSEWHERE = {
    "NH-14": "501 below", "NH-15": "test_profile.py beside this", "NH-17": "501 below",
    "NH-18": "501 below", "NH-19": "501 below", "NH-20": "501 below", "NH-21": "501 below",
    "NH-22": "501 below",
    "NH-25": "501 below", "NH-27": "501 below", "NH-28": "501 below", "NH-40": "501 below",
    "NH-41": "501 below", "OA-09": "501 below",
    "NH-36": "test_app.py: only with --enable-metrics",
    "NH-44": "gRPC and TLS are flags of their own",
    "OA-06": "test_pooled.py",
    "OA-20": "tests/text/test_template.py",
    "MI-09": "speculation",
}  # fmt: skip


def at(value: Any, path: str) -> Any:
    """What stands at a dotted path."""
    for part in path.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.ids} {row.call}")
async def test_a_row_is_met(server: ScriptedServer, row: Row) -> None:
    await check(server, row)


@pytest.mark.parametrize("row", VECTORS, ids=lambda row: f"{row.ids} {row.call}")
async def test_a_row_of_vectors_is_met(toy_folder: Any, row: Row) -> None:
    async with scripted_server(toy_folder, SCRIPT, is_pooled=True) as made:
        await check(made, row)


async def check(server: ScriptedServer, row: Row) -> None:
    method, path = row.call.split(" ", 1)
    if "close_session" in path:
        await server.post("/open_session", session_id="s")
    content = None if row.body is None else orjson.dumps(row.body)
    headers = {} if content is None else {"content-type": "application/json"}
    got = await server.client.request(method, path, content=content, headers=headers)
    assert got.status_code == row.status, got.text
    for where, expected in row.has.items():
        found = at(got.json(), where)
        if isinstance(expected, re.Pattern):
            assert expected.fullmatch(found), (where, found)
        else:
            assert expected is ... or found == expected, (where, found)


@pytest.mark.parametrize(("path", "methods", "why"), UNBUILT)
async def test_what_is_not_built_is_a_501_that_says_why(
    server: ScriptedServer, path: str, methods: tuple[str, ...], why: str
) -> None:
    for method in methods:
        got = await server.client.request(method, path.replace("{method}", "x"))
        assert got.status_code == 501 and why in got.json()["error"]["message"]


def test_every_row_of_the_contract_is_here() -> None:
    met = {name for row in (*ROWS, *VECTORS) for name in row.ids.split()} | set(ELSEWHERE)
    wanted = {f"NH-{i:02}" for i in range(1, 45)} | {f"OA-{i:02}" for i in range(1, 21)}
    wanted |= {f"SP-{i:02}" for i in range(1, 23)} | {f"MI-{i:02}" for i in range(1, 11)}
    assert wanted - met == set()


async def test_streams_of_chat_say_role_parts_one_end_and_usage(server: ScriptedServer) -> None:
    """OA-02, OA-13, OA-17: with n samples and tools."""
    events = await server.events(
        CHAT,
        messages=[{"role": "user", "content": "two calls"}],
        tools=TOOLS,
        n=2,
        stream_options={"include_usage": True},
    )
    *chunks, last = events
    assert last["choices"] == [] and last["usage"]["completion_tokens"] > 0
    assert all(chunk["usage"] is None for chunk in chunks)
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        reasons = [c["finish_reason"] for c in mine if c["finish_reason"]]
        assert reasons == ["tool_calls"] and mine[-1]["finish_reason"] == "tool_calls"
        heads = [t for c in mine for t in c["delta"].get("tool_calls", ()) if "id" in t]
        assert [t["index"] for t in heads] == [0, 1]
        assert len({t["id"] for t in heads}) == 2
        assert all(t["type"] == "function" and t["function"]["name"] == "add" for t in heads)
        for number in (0, 1):
            parts = [
                t["function"]["arguments"]
                for c in mine
                for t in c["delta"].get("tool_calls", ())
                if t["index"] == number
            ]
            assert orjson.loads("".join(parts)) == {"a": 1, "b": 2}


async def test_bodies_that_cannot_be_read_say_why(server: ScriptedServer) -> None:
    packed, deep = gzip.compress(b"{}"), b'{"messages": ' + b"[" * 300 + b"]" * 300 + b"}"
    for headers, data, words in (
        ({"content-encoding": "gzip"}, packed, "Content-Encoding 'gzip'"),
        ({"content-encoding": "Identity"}, b"{", "not valid JSON"),
        ({}, deep, "nested too deeply"),
    ):
        for path in (CHAT, "/generate") if data is not deep else (CHAT,):
            sent = {"content-type": "application/json"} | headers
            got = await server.client.post(path, content=data, headers=sent)
            assert got.status_code == 400 and words in got.json()["error"]["message"], got.text


async def test_fields_without_effect_are_taken_and_tiers_told(server: ScriptedServer) -> None:
    plain = (await server.post(CHAT, messages=USER)).json()
    got = await server.post(
        CHAT,
        messages=[{"role": "developer", "content": "Be brief."}, *USER],
        max_completion_tokens=20,
        user="u",
        store=True,
        metadata={"a": "b"},
        service_tier="auto",
        prediction={"type": "content", "content": "hi"},
        stop=["x", "y"],
        safety_identifier="s",
        verbosity="low",
    )
    assert got.status_code == 200, got.text
    assert got.json()["service_tier"] == "default" and "service_tier" not in plain
    assert got.json()["system_fingerprint"] == plain["system_fingerprint"]


async def test_errors_have_openais_form(toy_folder: Any) -> None:
    async with scripted_server(toy_folder, SCRIPT, api_key="k", max_request_bytes=1000) as made:
        key = {"Authorization": "Bearer k"}

        async def error(expected: int, body: Any, headers: Any = key) -> tuple[Any, ...]:
            got = await made.client.post(CHAT, json=body, headers=headers)
            assert got.status_code == expected, got.text
            assert set(got.json()["error"]) == {"message", "type", "param", "code"}
            shown = got.json()["error"]
            return shown["type"], shown["param"], shown["code"]

        invalid = "invalid_request_error"
        assert await error(400, {"messages": USER, "n": 0}) == (invalid, "n", "invalid_value")
        assert await error(400, {"messages": USER, "x": 0}) == (invalid, "x", "unknown_parameter")
        assert await error(401, {}, {}) == (invalid, None, "invalid_api_key")
        model = {"messages": USER, "model": "gpt"}
        assert await error(404, model) == (invalid, "model", "model_not_found")
        assert await error(413, {"messages": USER, "user": "x" * 999}) == (
            invalid,
            None,
            "payload_too_large",
        )
        long = {"messages": USER, "max_tokens": 10**7}
        assert (await error(400, long))[0] == invalid
        made.engine.intake.is_accepting = False
        assert await error(503, {"messages": USER}) == ("server_error", None, "overloaded")
