"""Every route, field and answer key of the wire contract exists, has its effect, or is refused by
its name."""

from __future__ import annotations

import gzip
import re
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest
from tests.entrypoints.http.conftest import SCRIPT
from tests.fakes.http_server import ScriptedServer, scripted_server

from radixlm.entrypoints.http.not_implemented import NOT_IMPLEMENTED

USER = [{"role": "user", "content": "hi"}]
THINK = [{"role": "user", "content": "think about"}]
SUM = [{"role": "user", "content": "sum please"}]
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": ADD}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class Row:
    """A call, its status, and expected values at dotted paths of its answer (... : any value)."""

    subjects: str
    call: str
    body: Any = None
    status: int = 200
    has: dict[str, Any] = field(default_factory=dict)


def chat(subjects: str, status: int = 200, has: Any = None, **body: Any) -> Row:
    return Row(subjects, f"POST {CHAT}", {"messages": USER} | body, status, has or {})


def text(subjects: str, status: int = 200, has: Any = None, **body: Any) -> Row:
    return Row(subjects, f"POST {TEXT}", {"prompt": "hi"} | body, status, has or {})


def native(subjects: str, status: int = 200, has: Any = None, **body: Any) -> Row:
    return Row(subjects, "POST /generate", {"text": "hi"} | body, status, has or {})


def sampling(subjects: str, value: Any, status: int = 200, has: Any = None) -> Row:
    return native(subjects, status, has, sampling_params=value)


REFUSED = 400
NAMED = {"error.message": ...}
ROWS = [
    *(Row("health", f"{m} /health") for m in ("GET", "HEAD")),
    Row("health_generate", "GET /health_generate"),
    Row("ready", "GET /ready"),
    Row("model_info", "GET /get_model_info", has={"model_path": ..., "weight_version": "default"}),
    Row("model_info", "GET /model_info", has={"is_generation": True, "tokenizer_path": ...}),
    Row(
        "server_info", "GET /get_server_info", has={"internal_states.0.load": 0, "status": "ready"}
    ),
    Row("server_info", "GET /server_info", has={"version": ..., "max_req_input_len": ...}),
    *(
        Row("weight_version", f"GET /{name}", has={"weight_version": "default"})
        for name in ("get_weight_version", "weight_version")
    ),
    Row("load", "GET /get_load", has={"0.dp_rank": 0, "0.num_reqs": 0}),
    Row("load", "GET /v1/loads?include=core,memory", has={"loads.0.token_usage": ...}),
    *(
        Row("internal_state", f"{m} /set_internal_state", {"server_args": {}})
        for m in ("POST", "PUT")
    ),
    Row(
        "internal_state",
        "POST /set_internal_state",
        {"server_args": {"tp_size": 2}},
        REFUSED,
        NAMED,
    ),
    native("generate meta_info.id", has={"text": "Hello there.", "meta_info.id": "a"}, rid="a"),
    Row("generate", "PUT /generate", {"text": ["hi", "hi"]}, has={"1.text": "Hello there."}),
    Row("generate_from_file", "POST /generate_from_file", None, REFUSED, {"error.param": "file"}),
    Row("classify", "POST /classify", {"text": "a"}, REFUSED, NAMED),  # not a reward model
    *(Row("flush_cache", f"{m} /flush_cache") for m in ("GET", "POST")),
    Row("flush_cache", "POST /reset_prefix_cache?reset_external=true"),
    *(Row("freeze_gc", f"{m} /freeze_gc") for m in ("GET", "POST")),
    Row(
        "update_weight_version",
        "POST /update_weight_version",
        {"new_version": "default"},
        has={"success": True},
    ),
    *(Row("weights_by_name", f"{m} /get_weights_by_name?name=x") for m in ("GET", "POST")),
    *(Row("slow_down", f"{m} /slow_down?forward_sleep_time=0") for m in ("GET", "POST")),
    *(Row("open_session", f"{m} /open_session?capacity_of_str_len=9") for m in ("GET", "POST")),
    Row(
        "open_session close_session",
        "POST /open_session",
        {"capacity_of_str_len": 9, "session_id": "s"},
    ),
    *(
        Row("close_session", f"{m} /close_session?session_id=s", None, s)
        for m, s in (("GET", 200),)
    ),
    Row(
        "configure_logging",
        "POST /configure_logging",
        {"log_requests": False, "log_requests_level": 0},
    ),
    Row(
        "abort_request",
        "POST /abort_request",
        {"rid": "x", "abort_all": False},
        has={"success": False},
    ),
    Row(
        "parse_function_call",
        "POST /parse_function_call",
        {"text": '<tool_call>{"name": "f"}</tool_call>', "tools": [], "tool_call_parser": "qwen25"},
        has={"calls.0.name": "f", "calls.0.tool_index": 0, "normal_text": ""},
    ),
    Row(
        "separate_reasoning",
        "POST /separate_reasoning",
        {"text": "a</think>b", "reasoning_parser": "DeepSeek-R1"},
        has={"reasoning_text": "a", "text": "b"},
    ),
    Row("pause_and_continue", "POST /pause_generation", {"mode": "in_place"}, has={"status": "ok"}),
    Row("pause_and_continue", "POST /continue_generation", has={"status": "ok"}),
    Row("sagemaker", "GET /ping"),
    Row("sagemaker", "POST /invocations", {"messages": USER}, has={"object": "chat.completion"}),
    Row(
        "vertex",
        "POST /vertex_generate",
        {"instances": [{"text": "hi"}], "parameters": {"max_new_tokens": 2}},
        has={"predictions.0.text": ...},
    ),
    *(
        Row("tokenize", f"POST {v}/tokenize", {"prompt": "hi"}, has={"tokens": ..., "count": ...})
        for v in ("", "/v1")
    ),
    Row("tokenize", "POST /tokenize", {"messages": USER}, has={"max_model_len": 2048}),
    *(
        Row("tokenize", "POST /tokenize", {"messages": USER, "reasoning_effort": effort}, status)
        for effort, status in (("none", 200), (0.5, 200), ("much", REFUSED))
    ),
    Row("tokenize", "POST /detokenize", {"tokens": [5]}, has={"text": ...}),
    Row("tokenize", "POST /v1/detokenize", {"tokens": [5]}, has={"text": ...}),
    *(Row("ollama", f"{m} /") for m in ("GET", "HEAD")),
    Row(
        "ollama",
        "POST /api/chat",
        {"model": "tiny", "messages": USER, "stream": False, "logprobs": True, "top_logprobs": 2},
        has={"message.content": "Hello there.", "done": True, "logprobs.0.top_logprobs.1": ...},
    ),
    Row(
        "ollama",
        "POST /api/generate",
        {"model": "tiny", "prompt": "hi", "stream": False, "keep_alive": "5m", "think": False},
        has={"response": "Hello there.", "eval_count": ...},
    ),
    Row("ollama", "POST /api/show", {"model": "tiny"}, has={"details.family": ...}),
    Row("ollama", "POST /api/pull", {"model": "x", "stream": False}, has={"status": "success"}),
    Row("ollama", "GET /api/tags", has={"models.0.name": "tiny:latest"}),
    Row("ollama", "GET /api/ps", has={"models.0.expires_at": "9999-12-31T23:59:59Z"}),
    Row("ollama", "GET /api/version", has={"version": ...}),
    Row(
        "anthropic",
        "POST /v1/messages",
        {"messages": USER, "max_tokens": 9, "metadata": {"user_id": "u"}, "system": "Be brief."},
        has={"content.0.type": "text", "usage.input_tokens": ..., "stop_reason": ...},
    ),
    Row(
        "anthropic", "POST /v1/messages/count_tokens", {"messages": USER}, has={"input_tokens": ...}
    ),
    *(
        Row(
            "anthropic",
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
        "completions",
        has={"choices.0.text": "Hello there.", "choices.0.matched_stop": ..., "metadata": ...},
        max_tokens=50,
    ),
    chat(
        "chat_completions",
        has={"choices.0.message.content": "Hello there.", "system_fingerprint": ...},
    ),
    Row("models", "GET /v1/models", has={"data.0.owned_by": "sglang", "data.0.parent": None}),
    Row("models", "GET /v1/models/tiny", has={"root": ..., "max_model_len": 2048}),
    Row("models", "GET /v1/models/x", None, 404, {"error.code": "model_not_found"}),
    Row(
        "score",
        "POST /v1/score",
        {"query": "a", "items": ["b"], "label_token_ids": [1, 2], "apply_softmax": True},
        has={"scores.0.1": ..., "object": "scoring"},
    ),
    Row("responses", "POST /v1/responses", {"input": "hi"}, has={"status": "completed"}),
    Row(
        "responses",
        "POST /v1/responses",
        {"input": "hi"},
        has={"usage.input_tokens_details.cache_write_tokens": 0},
    ),
    Row("responses", "GET /v1/responses/resp_x", None, 404, NAMED),
    Row("responses", "POST /v1/responses/resp_x/cancel", None, 404, NAMED),
    Row("openai_classify", "POST /v1/classify", {"input": "a"}, REFUSED, NAMED),  # not a classifier
    Row("files_and_batches", "GET /v1/files", has={"object": "list"}),
    Row("files_and_batches", "GET /v1/batches", has={"object": "list"}),
    text("max_tokens", has={"usage.completion_tokens": 16}, prompt="forever"),
    chat("response_format", response_format={"type": "text"}),
    chat("response_format", REFUSED, {"error.param": ...}, response_format={"type": "xml"}),
    chat(
        "tools",
        has={
            "choices.0.finish_reason": "tool_calls",
            "choices.0.message.tool_calls.0.function.name": "add",
            "choices.0.message.tool_calls.0.id": re.compile(r"call_[0-9a-f]{24}"),
        },
        messages=SUM,
        tools=TOOLS,
    ),
    chat("tools", has={"choices.0.finish_reason": "stop"}, messages=SUM, tool_choice="none"),
    chat("tools", REFUSED, {"error.param": "tool_choice"}, tool_choice="required"),
    chat(
        "tools",
        REFUSED,
        NAMED,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "nobody"}},
    ),
    chat(
        "reasoning",
        has={
            "choices.0.message.reasoning_content": ...,
            "usage.reasoning_tokens": ...,
            "choices.0.message.content": ...,
        },
        messages=THINK,
        chat_template_kwargs={"enable_thinking": True},
    ),
    *(chat("reasoning", reasoning_effort=e) for e in ("none", "low", "medium", "high", 0.5)),
    chat(
        "reasoning",
        has={"choices.0.message.reasoning_content": None},
        messages=THINK,
        separate_reasoning=False,
        stream_reasoning=False,
    ),
    chat(
        "sampling_extensions",
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
        "sampling_extensions",
        has={"choices.0.message.content": "Hello there."},
        messages=[*USER, {"role": "assistant", "content": "Well"}],
        continue_final_message=True,
    ),
    chat("sampling_extensions", REFUSED, {"error.param": "lora_path"}, lora_path="x"),
    chat(
        "sampling_extensions",
        REFUSED,
        {"error.param": "return_hidden_states"},
        return_hidden_states=True,
    ),
    chat(
        "request_extensions",
        has={"choices.0.token_ids": ..., "choices.0.meta_info": ..., "prompt_token_ids": ...},
        priority=1,
        extra_key="k",
        cache_salt="s",
        stop_regex="x+",
        data_parallel_rank=0,
        routed_dp_rank=0,
        return_token_ids=True,
        return_meta_info=True,
        custom_labels={"a": "b"},
        session_id="s",
    ),
    chat(
        "request_extensions", REFUSED, {"error.param": "data_parallel_rank"}, data_parallel_rank=1
    ),
    chat("request_extensions", REFUSED, {"error.param": "routed_dp_rank"}, routed_dp_rank=-1),
    chat(
        "request_extensions",
        has={"id": "mine"},
        rid=["mine"],
        extra_key=["k"],
        cache_salt=["s"],
        lora_path=[None],
        custom_logit_processor=[None],
    ),
    text(
        "request_extensions",
        has={"choices.1.text": "Hello there."},
        prompt=["hi", "hi"],
        rid=["a", "b"],
        extra_key=["k", "l"],
        lora_path=[None, None],
    ),
    text("request_extensions", REFUSED, {"error.param": "extra_key"}, extra_key=["k", "l"]),
    chat("request_extensions", REFUSED, {"error.param": "input_ids"}, input_ids=[]),
    chat(
        "request_extensions",
        REFUSED,
        {"error.param": "max_completion_tokens"},
        max_completion_tokens=9999,
    ),
    chat("request_extensions", REFUSED, {"error.param": "max_tokens"}, max_tokens=9999),
    Row(
        "responses",
        "POST /v1/responses",
        {"input": "hi", "max_output_tokens": 9999},
        REFUSED,
        {"error.param": "max_output_tokens"},
    ),
    Row(
        "ollama",
        "POST /api/chat",
        {"model": "tiny", "messages": USER, "options": {"num_predict": 9999}, "stream": False},
        has={"message.content": "Hello there."},
    ),
    sampling(
        "max_new_tokens", {"max_new_tokens": 9999}, REFUSED, {"error.param": "max_new_tokens"}
    ),
    native("request_extensions", REFUSED, {"error.param": "routed_dp_rank"}, routed_dp_rank=4),
    native(
        "meta_info.input_logprobs",
        has={"meta_info.input_token_logprobs.0.0": None, "meta_info.input_token_logprobs.1.0": ...},
        text="hi there, you",
        return_logprob=True,
        sampling_params={"max_new_tokens": 0},
    ),
    chat("request_extensions", REFUSED, NAMED, routed_dp_rank=0, data_parallel_rank=1),
    native(
        "request_extensions", REFUSED, {"error.param": "data_parallel_rank"}, data_parallel_rank=1
    ),
    native(
        "request_extensions",
        REFUSED,
        {"error.param": "data_parallel_rank"},
        data_parallel_rank=True,
    ),
    *(
        chat("request_extensions", REFUSED, {"error.param": name}, **{name: value})
        for name, value in {
            "watermark": {"a": 1},
            "return_routed_experts": True,
            "images_config": {"a": 1},
        }.items()
    ),
    chat(
        "usage",
        has={"usage.prompt_tokens_details.cached_tokens": ...},
        return_cached_tokens_details=True,
    ),
    chat("content_parts", messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]),
    *(
        chat(
            "content_parts",
            messages=[
                *USER,
                {"role": "assistant", "content": [part, {"type": "text", "text": "a"}]},
                *USER,
            ],
        )
        for part in (
            {"type": "thinking", "thinking": "hm"},
            {"type": "reasoning", "text": "hm"},
        )
    ),
    chat(
        "content_parts",
        REFUSED,
        NAMED,
        messages=[{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x"}}]}],
    ),
    chat(
        "content_parts",
        messages=[
            *USER,
            {
                "role": "assistant",
                "reasoning_content": "hm",
                "content": None,
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "3"},
        ],
    ),
    chat(
        "logprobs",
        has={"choices.0.logprobs.content.0.top_logprobs.1.bytes": ...},
        logprobs=True,
        top_logprobs=2,
    ),
    text(
        "logprobs",
        has={
            "choices.0.logprobs.token_logprobs.0": None,
            "choices.0.logprobs.text_offset.0": 0,
            "choices.0.logprobs.tokens.0": ...,
        },
        echo=True,
        logprobs=2,
    ),
    # ---- /generate ---------------------------------------------------------------------------
    sampling(
        "max_new_tokens", {"max_new_tokens": 2}, has={"meta_info.finish_reason.type": "length"}
    ),
    sampling("stop", {"stop": ["there"]}, has={"text": "Hello "}),
    sampling("stop_token_ids", {"stop_token_ids": [10**9]}),
    *(sampling("temperature", {"temperature": t}) for t in (0, 2.5)),
    *(
        sampling(next(iter(bad)), bad, REFUSED, NAMED)
        for bad in [
            {"temperature": -1},
            {"top_p": 0},
            {"top_k": 0},
            {"min_p": 2},
            {"frequency_penalty": 3},
            {"presence_penalty": -3},
            {"repetition_penalty": 3},
            {"min_new_tokens": 9, "max_new_tokens": 2},
            {"n": 0},
            {"structural_tag": 5},
            {"logit_bias": {"999999": 1}},
        ]
    ),
    sampling(
        "top_p top_k min_p frequency_penalty presence_penalty repetition_penalty min_new_tokens "
        "ignore_eos skip_special_tokens spaces_between_special_tokens stream_interval logit_bias "
        "custom_params",
        {
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.1,
            "frequency_penalty": 0.5,
            "presence_penalty": -0.5,
            "repetition_penalty": 1.1,
            "min_new_tokens": 1,
            "ignore_eos": False,
            "skip_special_tokens": True,
            "spaces_between_special_tokens": True,
            "stream_interval": 2,
            "logit_bias": {"5": -1},
            "custom_params": {"a": 1},
        },
    ),
    sampling("n", {"n": 2}, has={"1.text": "Hello there."}),
    sampling(
        "grammars",
        {"regex": "a", "ebnf": 'root ::= "a"'},
        REFUSED,
        {"error.message": "Only one of regex, json_schema, or ebnf can be set."},
    ),
    sampling(
        "no_stop_trim", {"stop": ["there"], "no_stop_trim": True}, has={"text": "Hello there"}
    ),
    sampling(
        "seed_and_stop_regex", {"sampling_seed": 3, "stop_regex": "the.e"}, has={"text": "Hello "}
    ),
    sampling("seed_and_stop_regex", {"beam_width": 4}, has={"meta_info.beam_results.0.text": ...}),
    sampling("seed_and_stop_regex", {"watermark": {"a": 1}}, 501, NAMED),
    native(
        "meta_info.finish_reason meta_info.usage_counts meta_info.cached_tokens meta_info.timing",
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
        "meta_info.input_logprobs meta_info.output_logprobs meta_info.top_logprobs",
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
    native("meta_info.hidden_states", REFUSED, NAMED, return_hidden_states=True),
    native("generate", REFUSED, {"error.param": "lora_path"}, lora_path="x"),
    native(
        "generate",
        **dict.fromkeys(  # a router sends all fields of SGLang
            "image_data video_data audio_data modalities session_params lora_path bootstrap_host "
            "bootstrap_port bootstrap_room data_parallel_rank conversation_id label priority "
            "session_id mm_hashes video_config routing_key extra_key no_logs custom_labels "
            "max_thinking_tokens kv_hints watermark".split()
        ),
    ),
]
# a server with --is-embedding
EMBEDDING_ROWS = [
    *(
        Row("encode", f"{m} /encode", {"text": "a"}, has={"embedding": ..., "meta_info.id": ...})
        for m in ("POST", "PUT")
    ),
    Row("encode", "POST /encode", {"input_ids": [[1], [2]]}, has={"1.embedding": ...}),
    Row(
        "embeddings",
        "POST /v1/embeddings",
        {"input": ["a", "b"], "encoding_format": "base64", "user": "u"},
        has={"data.1.embedding": ..., "usage.prompt_tokens": ...},
    ),
]
# every subject of the contract; /metrics, profiles, /rerank and templates have tests of their own
SUBJECTS = """
health health_generate ready model_info server_info weight_version load internal_state generate
generate_from_file encode classify flush_cache freeze_gc update_weight_version weights_by_name
slow_down open_session close_session configure_logging abort_request parse_function_call
separate_reasoning pause_and_continue sagemaker vertex tokenize ollama anthropic completions
chat_completions embeddings models score responses openai_classify files_and_batches max_tokens
response_format tools reasoning sampling_extensions request_extensions usage content_parts
logprobs max_new_tokens stop stop_token_ids temperature top_p top_k min_p frequency_penalty
presence_penalty repetition_penalty min_new_tokens n grammars structural_tag ignore_eos
skip_special_tokens spaces_between_special_tokens no_stop_trim stream_interval logit_bias
custom_params seed_and_stop_regex meta_info.id meta_info.finish_reason meta_info.usage_counts
meta_info.cached_tokens meta_info.input_logprobs meta_info.output_logprobs
meta_info.top_logprobs meta_info.hidden_states meta_info.timing
""".split()


def at(value: Any, path: str) -> Any:
    """The value at a dotted path."""
    for part in path.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.subjects} {row.call}")
async def test_a_row_holds(server: ScriptedServer, row: Row) -> None:
    await check(server, row)


@pytest.mark.parametrize("row", EMBEDDING_ROWS, ids=lambda row: f"{row.subjects} {row.call}")
async def test_an_embedding_row_holds(toy_folder: Any, row: Row) -> None:
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


@pytest.mark.parametrize(("path", "methods", "why"), NOT_IMPLEMENTED)
async def test_what_is_not_built_is_a_501_that_says_why(
    server: ScriptedServer, path: str, methods: tuple[str, ...], why: str
) -> None:
    for method in methods:
        got = await server.client.request(method, re.sub(r"{.*}", "x", path))
        assert got.status_code == 501 and why in got.json()["error"]["message"]
        assert got.headers["x-should-retry"] == "false"


def test_every_subject_of_the_contract_has_a_row() -> None:
    assert set(SUBJECTS) == {
        name for row in (*ROWS, *EMBEDDING_ROWS) for name in row.subjects.split()
    }


async def test_streams_of_chat_say_role_parts_one_end_and_usage(server: ScriptedServer) -> None:
    """With n samples and tools."""
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
        heads = [t for c in mine for t in c["delta"]["tool_calls"] or () if "id" in t]
        assert [t["index"] for t in heads] == [0, 1]
        assert len({t["id"] for t in heads}) == 2
        assert all(t["type"] == "function" and t["function"]["name"] == "add" for t in heads)
        for number in (0, 1):
            parts = [
                t["function"]["arguments"]
                for c in mine
                for t in c["delta"]["tool_calls"] or ()
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
        assert await error(401, {}, {}) == (invalid, None, "invalid_api_key")
        model = {"messages": USER, "model": "gpt"}
        made.state.config = made.config.with_values({"strict_model_name": True})
        assert await error(404, model) == (invalid, "model", "model_not_found")
        assert await error(413, {"messages": USER, "user": "x" * 999}) == (
            invalid,
            None,
            "payload_too_large",
        )
        long = {"messages": USER, "max_tokens": 10**7}
        assert (await error(400, long))[0] == invalid
        made.engine.intake.leaving.set()
        assert await error(503, {"messages": USER}) == ("server_error", None, "overloaded")
