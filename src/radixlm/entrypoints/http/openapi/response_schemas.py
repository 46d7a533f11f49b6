"""Schemas of the answers and examples of the requests, for the OpenAPI document.

Routes write their answers as plain dicts; these schemas list the fields that are always there. A
test sends generated requests and checks the answers against them.
"""

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]
JSON, TEXT, SSE = "application/json", "text/plain", "text/event-stream"
NDJSON, BYTES = "application/x-ndjson", "application/octet-stream"
EVENTS: Schema = {"description": "Events; the data of most is JSON."}
BINARY: Schema = {"type": "string", "format": "binary"}


def _object(**fields: Schema) -> Schema:
    """An object that has all ``fields``."""
    return {"type": "object", "required": list(fields), "properties": fields}


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def _kind(name: str) -> Schema:
    return {"type": "string", "enum": [name]}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _one_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


ANY: Schema = {}
STR: Schema = {"type": "string"}
INT: Schema = {"type": "integer"}
NUM: Schema = {"type": "number"}
BOOL: Schema = {"type": "boolean"}
DICT: Schema = {"type": "object"}
NULL: Schema = {"type": "null"}
MAYBE_STR = _or_null(STR)
MAYBE_INT = _or_null(INT)
MAYBE_NUM = _or_null(NUM)
VECTOR = _list(NUM)
USAGE = _object(prompt_tokens=INT, total_tokens=INT)
SPENT = _object(prompt_tokens=INT, completion_tokens=INT, total_tokens=INT)
PAGE: Schema = _object(object=_kind("list"), data=_list(DICT), has_more=BOOL)
DELETED = _object(id=STR, object=STR, deleted=BOOL)
FINISH = {"type": "string", "enum": ["stop", "length", "tool_calls", "content_filter", "abort"]}

FUNCTION_CALL = _object(
    id=STR, type=_kind("function"), function=_object(name=STR, arguments=STR)
)  # fmt: skip
MESSAGE = _object(
    role=_kind("assistant"),
    content=MAYBE_STR,
    reasoning_content=MAYBE_STR,
    tool_calls=_or_null(_list(FUNCTION_CALL)),
)
CHAT = _object(
    id=STR,
    object=_kind("chat.completion"),
    created=INT,
    model=STR,
    system_fingerprint=STR,
    choices=_list(
        _object(index=INT, message=MESSAGE, finish_reason=FINISH, logprobs=_or_null(DICT))
    ),
    usage=SPENT,
)
COMPLETION = _object(
    id=STR,
    object=_kind("text_completion"),
    created=INT,
    model=STR,
    choices=_list(_object(index=INT, text=STR, finish_reason=FINISH, logprobs=_or_null(DICT))),
    usage=SPENT,
)
META = _object(
    id=STR,
    finish_reason=_or_null(_object(type=STR)),
    prompt_tokens=INT,
    completion_tokens=INT,
    cached_tokens=INT,
    weight_version=STR,
)
GENERATED = _object(meta_info=META)
CLASSES = _object(data=_list(DICT), usage=USAGE)
VECTORS = _object(
    object=_kind("list"),
    model=STR,
    data=_list(
        _object(object=_kind("embedding"), index=INT, embedding=_one_of(VECTOR, STR))
    ),
    usage=USAGE,
)  # fmt: skip
POOLED = _object(embedding=ANY, meta_info=DICT)
CARD = _object(id=STR, object=_kind("model"), created=INT, owned_by=STR, max_model_len=MAYBE_INT)
STATUSES = ("queued", "in_progress", "completed", "failed", "cancelled", "incomplete")
RESPONSE = _object(
    id=STR,
    object=_kind("response"),
    created_at=INT,
    status={"type": "string", "enum": list(STATUSES)},
    model=STR,
    output=_list(_object(id=STR, type=STR)),
    error=_or_null(_object(code=STR, message=STR)),
    usage=_or_null(_object(input_tokens=INT, output_tokens=INT, total_tokens=INT)),
)
ANTHROPIC = _object(
    id=STR,
    type=_kind("message"),
    role=_kind("assistant"),
    model=STR,
    content=_list(_object(type=STR)),
    stop_reason={
        "type": "string",
        "enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"],
    },
    stop_sequence=MAYBE_STR,
    usage=_object(input_tokens=INT, output_tokens=INT),
)
OLLAMA = _object(model=STR, created_at=STR, done=BOOL)
OLLAMA_MODELS = _object(
    models=_list(_object(name=STR, model=STR, modified_at=STR, size=INT, details=DICT))
)
FILE = _object(
    id=STR, object=_kind("file"), bytes=INT, created_at=INT, filename=STR, purpose=STR
)  # fmt: skip
BATCH = _object(
    id=STR,
    object=_kind("batch"),
    endpoint=STR,
    input_file_id=STR,
    status=STR,
    created_at=INT,
    request_counts=_object(total=INT, completed=INT, failed=INT),
)
MESSAGE_BATCH = _object(
    id=STR, type=_kind("message_batch"), processing_status=STR, request_counts=DICT
)  # fmt: skip
CONVERSATION = _object(id=STR, object=_kind("conversation"), created_at=INT, metadata=DICT)
SCORES = _one_of(
    _object(object=_kind("scoring"), scores=_list(_list(MAYBE_NUM)), usage=USAGE),
    _object(object=_kind("list"), data=_list(DICT), usage=USAGE),
)
COUNTED = _object(object=STR, input_tokens=INT)
MODEL_INFO = _object(
    model_path=STR, tokenizer_path=MAYBE_STR, is_generation=BOOL, weight_version=STR
)  # fmt: skip
SERVER_INFO = _object(status=STR, version=STR, internal_states=_list(DICT))
TOKENS = _object(
    tokens=_list(_one_of(INT, DICT, _list(_one_of(INT, DICT)))),
    count=_one_of(INT, _list(INT)),
    max_model_len=INT,
)
LLAMA = _object(
    content=STR, tokens=_list(INT), stop=BOOL, tokens_predicted=INT, tokens_evaluated=INT
)
RENDERED = _object(request_id=STR, token_ids=_list(INT), sampling_params=DICT)
PARSED = _object(normal_text=STR, calls=_list(_object(tool_index=INT, name=STR, parameters=STR)))
PREDICTIONS = _object(predictions=_one_of(_list(DICT), DICT))
RANKED = _one_of(
    _list(_object(score=NUM, index=INT)),
    _object(results=_list(_object(index=INT, relevance_score=NUM))),
)

TEXTS = _object(**dict.fromkeys(("text", "prompt", "content"), _one_of(STR, _list(STR))))
SPOKEN = _object(text=STR, usage=DICT)
SUCCEEDED = {JSON: _object(success=BOOL, message=STR)}
UPDATED = {JSON: _object(success=BOOL, message=STR, num_paused_requests=INT)}
# path -> content type -> schema
_FAILED = _object(success=BOOL, message=STR)
_ADAPTERS = _object(success=BOOL, error_message=STR, loaded_adapters=DICT)
# what routes of the reference answer with status 400 beside the usual error
REFUSALS: Mapping[str, Schema] = {
    **{f"/update_weights_from_{one}": _FAILED for one in ("disk", "tensor", "distributed")},
    **{f"/{one}_weight_update": _FAILED for one in ("begin", "end")},
    **{f"/{one}_weights_update_group": _FAILED for one in ("init", "destroy")},
    "/weights_checker": _FAILED,
    **{f"/{one}_external_corpus": _FAILED for one in ("add", "remove")},
    "/list_external_corpora": _FAILED,
    **{f"{at}/{one}load_lora_adapter": _ADAPTERS for at in ("", "/v1") for one in ("", "un")},
    "/load_lora_adapter_from_tensors": _ADAPTERS,
}
ANSWERS: Mapping[str, Mapping[str, Schema]] = {
    "/health": {},
    "/ready": {},
    "/ping": {},
    "/health_generate": {},
    "/close_session": {},
    "/sleep": {},
    "/wake_up": {},
    "/debug/stacks": {TEXT: STR},
    "/": {TEXT: STR, JSON: _list(_one_of(_object(generated_text=STR), VECTOR, NUM)), SSE: EVENTS},
    "/metrics": {TEXT: STR},
    "/flush_cache": {TEXT: STR},
    "/reset_prefix_cache": {TEXT: STR},
    "/start_expert_distribution_record": {TEXT: STR},
    "/stop_expert_distribution_record": {TEXT: STR},
    "/dump_expert_distribution_record": {TEXT: STR},
    "/freeze_gc": {TEXT: STR},
    "/set_trace_level": {TEXT: STR},
    "/slow_down": {JSON: NULL},
    "/open_session": {JSON: STR},
    "/model_info": {JSON: MODEL_INFO},
    "/get_model_info": {JSON: MODEL_INFO},
    "/server_info": {JSON: SERVER_INFO},
    "/get_server_info": {JSON: SERVER_INFO},
    "/server_details": {
        JSON: _object(version=STR, options=_list(DICT), model=DICT, machine=DICT, packages=DICT)
    },
    "/get_weight_version": {JSON: _object(weight_version=STR)},
    "/get_load": {JSON: _list(_object(dp_rank=INT, num_reqs=INT))},
    "/v1/loads": {JSON: _object(loads=_list(DICT), aggregate=DICT), TEXT: STR},
    "/v1/models": {JSON: _object(object=_kind("list"), data=_list(CARD))},
    "/v1/models/{model}": {JSON: CARD},
    "/generate": {
        JSON: _one_of(GENERATED, _list(GENERATED), _object(generated_text=STR)),
        SSE: EVENTS,
    },
    "/generate_from_file": {JSON: GENERATED},
    "/abort_request": {JSON: _object(success=BOOL, num_aborted=INT)},
    "/pause_generation": {JSON: _object(message=STR, status=STR)},
    "/continue_generation": {JSON: _object(message=STR, status=STR)},
    "/get_weights_by_name": {JSON: {}},
    "/add_external_corpus": {
        JSON: _object(success=BOOL, corpus_id=STR, message=STR, loaded_token_count=INT)
    },
    "/remove_external_corpus": {JSON: _object(success=BOOL, message=STR)},
    "/list_external_corpora": {JSON: _object(success=BOOL, corpus_token_counts=DICT)},
    **{f"/update_weights_from_{one}": UPDATED for one in ("disk", "tensor", "distributed")},
    "/end_weight_update": UPDATED,
    "/begin_weight_update": SUCCEEDED,
    "/init_weights_update_group": SUCCEEDED,
    "/destroy_weights_update_group": SUCCEEDED,
    "/weights_checker": {JSON: _object(success=BOOL, message=STR, ranks=_list(DICT))},
    "/update_weight_version": {JSON: _object(success=BOOL, message=STR, new_version=STR)},
    "/set_internal_state": {JSON: _object(updated=BOOL, server_args=DICT)},
    "/configure_logging": {JSON: DICT},
    "/dump_requests": {JSON: _object(path=STR, num_requests=INT)},
    "/tokenize": {JSON: TOKENS},
    "/v1/tokenize": {JSON: TOKENS},
    "/detokenize": {JSON: TEXTS},
    "/v1/detokenize": {JSON: TEXTS},
    "/tokenizer_info": {JSON: DICT},
    "/completion": {JSON: _one_of(LLAMA, _list(LLAMA)), SSE: EVENTS},
    "/infill": {JSON: _one_of(LLAMA, _list(LLAMA)), SSE: EVENTS},
    "/apply-template": {JSON: _object(prompt=STR)},
    "/generate_stream": {SSE: EVENTS},
    "/info": {JSON: _object(model_id=STR, max_total_tokens=INT)},
    "/props": {JSON: _object(total_slots=INT, chat_template=STR)},
    "/slots": {JSON: _list(_object(id=INT, n_ctx=INT, speculative=BOOL, is_processing=BOOL))},
    "/lora-adapters": {JSON: _list(_object(id=INT, name=STR, path=STR, scale=NUM))},
    "/version": {JSON: _object(version=STR)},
    "/concate_and_append_request": {JSON: _object(success=BOOL, copied_tokens=INT, message=STR)},
    "/parse_function_call": {JSON: PARSED},
    "/separate_reasoning": {JSON: _object(reasoning_text=STR, text=STR)},
    "/grammar/check": {
        JSON: _object(ok=BOOL, message=MAYBE_STR, position=_or_null(DICT), warnings=_list(STR))
    },
    "/grammar/trace": {
        JSON: _object(
            token_ids=_list(INT),
            vocab_size=INT,
            num_accepted=INT,
            allowed=_list(INT),
            forced=_list(BOOL),
            is_complete=BOOL,
        )
    },
    "/v1/completions": {JSON: COMPLETION, SSE: EVENTS},
    "/v1/fim/completions": {
        JSON: _object(id=STR, object=_kind("chat.completion"), choices=_list(DICT), usage=SPENT),
        SSE: EVENTS,
    },
    "/v1/chat/completions": {JSON: CHAT, SSE: EVENTS},
    "/v1/chat/completions/batch": {JSON: CHAT},
    "/v1/chat/completions/render": {JSON: RENDERED},
    "/load": {JSON: _object(server_load=INT)},
    "/inference/v1/generate": {JSON: _object(request_id=STR, choices=_list(DICT)), SSE: EVENTS},
    "/v1/completions/render": {JSON: _list(RENDERED)},
    "/invocations": {JSON: _one_of(CHAT, DICT), SSE: EVENTS, BYTES: BINARY},
    "/v1/audio/transcriptions": {JSON: SPOKEN, TEXT: STR, SSE: EVENTS},
    "/v1/audio/translations": {JSON: SPOKEN, TEXT: STR, SSE: EVENTS},
    "/v1/embeddings": {JSON: VECTORS, BYTES: BINARY},
    "/v1/classify": {JSON: CLASSES},
    "/encode": {JSON: _one_of(POOLED, _list(POOLED))},
    "/classify": {JSON: _one_of(POOLED, _list(POOLED), CLASSES)},
    "/v1/rerank": {JSON: RANKED},
    "/v2/rerank": {JSON: RANKED},
    "/reranking": {JSON: RANKED},
    "/v1/reranking": {JSON: RANKED},
    "/rerank": {JSON: RANKED},
    "/pooling": {JSON: _object(data=_list(DICT), usage=USAGE), BYTES: BINARY},
    "/v2/embed": {JSON: _object(id=STR, embeddings=DICT, texts=_or_null(_list(STR)), meta=DICT)},
    "/embed": {JSON: _list(VECTOR)},
    "/similarity": {JSON: VECTOR},
    "/v1/score": {JSON: SCORES},
    "/score": {JSON: SCORES},
    "/v1/messages": {JSON: ANTHROPIC, SSE: EVENTS},
    "/v1/messages/count_tokens": {JSON: _object(input_tokens=INT)},
    "/v1/messages/batches": {JSON: _one_of(MESSAGE_BATCH, _object(data=_list(MESSAGE_BATCH)))},
    "/v1/messages/batches/{batch_id}": {JSON: _one_of(MESSAGE_BATCH, _object(id=STR, type=STR))},
    "/v1/messages/batches/{batch_id}/cancel": {JSON: MESSAGE_BATCH},
    "/v1/messages/batches/{batch_id}/results": {"application/x-jsonl": STR},
    "/api/chat": {JSON: OLLAMA, NDJSON: STR},
    "/api/generate": {JSON: OLLAMA, NDJSON: STR},
    "/api/tags": {JSON: OLLAMA_MODELS},
    "/api/ps": {JSON: OLLAMA_MODELS},
    "/api/show": {JSON: _object(template=STR, details=DICT, model_info=DICT)},
    "/api/pull": {JSON: _object(status=STR), NDJSON: STR},
    "/api/version": {JSON: _object(version=STR)},
    "/api/embed": {JSON: _object(model=STR, embeddings=_list(VECTOR))},
    "/api/embeddings": {JSON: _object(embedding=VECTOR)},
    "/v1/responses": {JSON: RESPONSE, SSE: EVENTS},
    "/v1/responses/input_tokens": {JSON: COUNTED},
    "/chat/completions/input_tokens": {JSON: COUNTED},
    "/v1/chat/completions/input_tokens": {JSON: COUNTED},
    "/v1/responses/{response_id}": {JSON: _one_of(RESPONSE, DELETED), SSE: EVENTS},
    "/v1/responses/{response_id}/input_items": {JSON: PAGE},
    "/v1/responses/{response_id}/cancel": {JSON: RESPONSE},
    "/v1/responses/compact": {JSON: _object(id=STR, output=_list(DICT), usage=DICT)},
    "/v1/conversations": {JSON: CONVERSATION},
    "/v1/conversations/{conversation_id}": {JSON: _one_of(CONVERSATION, DELETED)},
    "/v1/conversations/{conversation_id}/items": {JSON: PAGE},
    "/v1/conversations/{conversation_id}/items/{item_id}": {
        JSON: _one_of(CONVERSATION, _object(id=STR, type=STR))
    },
    "/v1/files": {JSON: _one_of(FILE, PAGE)},
    "/v1/files/{file_id}": {JSON: _one_of(FILE, DELETED)},
    "/v1/files/{file_id}/content": {BYTES: BINARY},
    "/v1/batches": {JSON: _one_of(BATCH, PAGE)},
    "/v1/batches/{batch_id}": {JSON: BATCH},
    "/v1/batches/{batch_id}/cancel": {JSON: BATCH},
    "/live/events": {SSE: EVENTS},
}

_USER = [{"role": "user", "content": "What is 17 + 25?"}]
# name of a request model -> an example
EXAMPLES: Mapping[str, Any] = {
    "GenerateBody": {"text": "The", "sampling_params": {"max_new_tokens": 4}},
    "ChatRequest": {"messages": _USER, "max_completion_tokens": 8},
    "CompletionRequest": {"prompt": "The", "max_tokens": 4},
    "MessagesRequest": {"messages": _USER, "max_tokens": 8},
    "CountRequest": {"messages": _USER},
    "ResponsesRequest": {"input": "What is 17 + 25?", "max_output_tokens": 8},
    "OllamaChat": {"model": "default", "messages": _USER, "options": {"num_predict": 8}},
    "OllamaGenerate": {"model": "default", "prompt": "hi", "options": {"num_predict": 8}},
    "OllamaEmbed": {"model": "default", "input": "hi", "prompt": "hi"},
    "OllamaShow": {"model": "default"},
    "EmbeddingRequest": {"input": ["a", "b"]},
    "EncodeRequest": {"text": "hi"},
    "GrammarCheck": {"type": "regex", "value": "[0-9]+"},
    "GrammarTrace": {"type": "regex", "value": "[0-9]+", "text": "42"},
    "ScoreRequest": {"query": "It is", "items": [" warm"], "label_token_ids": [1, 2]},
    "RerankRequest": {"query": "warm", "documents": ["The sun", "The snow"]},
    "SharedRerankRequest": {"query": "warm", "documents": ["The sun", "The snow"]},
    "Tokenize": {"prompt": "hello"},
    "Detokenize": {"tokens": [1, 2]},
    "LlamaCompletion": {"prompt": "hello", "n_predict": 4},
    "Infill": {"input_prefix": "def f(", "input_suffix": "return 1", "n_predict": 4},
    "ApplyTemplate": {"messages": [{"role": "user", "content": "hi"}]},
    "ParseFunctionCall": {
        "text": '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        "tool_call_parser": "hermes",
    },
    "SeparateReasoning": {"text": "Hm.</think>Yes.", "reasoning_parser": "deepseek-r1"},
    "BatchRequest": {
        "input_file_id": "file-0",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    },
    "AbortBody": {"rid": "my-request"},
    "OpenSession": {"capacity_of_str_len": 1000},
    "CloseSession": {"session_id": "my-session"},
    "FlushCache": {"timeout": 1.0},
    "PauseGeneration": {"mode": "in_place"},
    "SlowDown": {"forward_sleep_time": 0.0},
    "WeightsByName": {"name": "model.norm.weight"},
    "WeightVersion": {"new_version": "2"},
    "InternalState": {"server_args": {}},
    "ConfigureLogging": {"log_requests": False},
    "ClassifyRequest": {"input": "hi"},
}


def error_schemas() -> dict[str, Schema]:
    """The three forms of errors: OpenAI's, Anthropic's, Ollama's."""
    inner = _object(message=STR, type=STR, param=MAYBE_STR, code=MAYBE_STR)
    return {
        "Error": _object(
            error=inner,
            object=_kind("error"),
            message=STR,
            type=STR,
            param=MAYBE_STR,
            code=INT,
        ),
        "AnthropicError": _object(type=_kind("error"), error=inner),
        "OllamaError": _object(error=STR),
    }


def error_name(path: str) -> str:
    """The form of the errors of a route."""
    if path.startswith("/v1/messages"):
        return "AnthropicError"
    return "OllamaError" if path.startswith("/api/") else "Error"
