"""From the fields of an OpenAI request to sampling parameters and a request for intake."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.middleware import fair_share_key
from radixlm.entrypoints.http.openai.protocol import Generation
from radixlm.entrypoints.http.state import ServerState
from radixlm.entrypoints.native import prefix_key, replica_of
from radixlm.intake.records import GenerateRequest, in_client_words
from radixlm.intake.validation import processor_name
from radixlm.wire.sampling_params import ANY_JSON_OBJECT, SamplingParams

# OpenAI's name -> ours; the others have one name
_RENAMED = {"seed": "sampling_seed", "min_tokens": "min_new_tokens"}
_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "logit_bias", "n", "stop", "stop_token_ids", "stop_regex"),
    *("no_stop_trim", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens"),
    *("stream_interval", "json_schema", "regex", "ebnf", "structural_tag", "custom_params"),
)
_OPENAI_NAMES = {ours: theirs for theirs, ours in _RENAMED.items()} | {
    "max_new_tokens": "max_tokens"
}


def sampling_of(
    request: Generation, defaults: SamplingParams, max_tokens: int | None
) -> SamplingParams:
    """The sampling parameters; errors name the field as the client wrote it."""
    values = {name: getattr(request, name) for name in _SAME}
    values |= {ours: getattr(request, theirs) for theirs, ours in _RENAMED.items()}
    if values["top_k"] == 0:
        values["top_k"] = -1  # "off" in other servers
    values |= _format(request.response_format)
    given = {name: value for name, value in values.items() if value is not None}
    if max_tokens is not None:
        given["max_new_tokens"] = max_tokens
    try:
        base = SamplingParams.from_dict(given, defaults)
        if max_tokens is None:
            base = msgspec.structs.replace(base, max_new_tokens=None)
        return base
    except InvalidRequest as error:
        raise renamed(error) from None


def renamed(error: InvalidRequest) -> InvalidRequest:
    """The error with OpenAI's name of the field."""
    return in_client_words(error, _OPENAI_NAMES)


def check(state: ServerState, sampling: SamplingParams) -> None:
    """InvalidRequest, with OpenAI's names, for a value out of bounds."""
    try:
        sampling.validate(state.intake.facts.vocab)
    except InvalidRequest as error:
        raise renamed(error) from None


def _format(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """``response_format`` as the grammar of sampling parameters."""
    if given is None:
        return {}
    kind = given.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        schema = given.get("schema")
        return {"json_schema": schema if isinstance(schema, dict) else ANY_JSON_OBJECT}
    if kind == "json_schema":
        return {"json_schema": _schema(given)}
    if kind == "structural_tag":
        return {"structural_tag": json.dumps(given)}
    if kind == "regex" and isinstance(given.get("pattern"), str):
        return {"regex": given["pattern"]}
    if kind in ("grammar", "ebnf") and isinstance(given.get("grammar"), str):
        return {"ebnf": given["grammar"]}
    raise InvalidRequest(
        f"response_format.type must be text, json_object, json_schema or structural_tag, "
        f"not {kind!r:.80}",
        param="response_format.type",
    )


def _schema(given: Mapping[str, Any]) -> Any:
    where = "response_format.json_schema"
    holder = given.get("json_schema")
    if not isinstance(holder, Mapping):
        raise InvalidRequest(f"{where} must be an object with name and schema", where)
    schema = holder.get("schema")
    if schema is None:
        return ANY_JSON_OBJECT
    if not isinstance(schema, Mapping | bool):
        raise InvalidRequest(f"{where}.schema must be an object", f"{where}.schema")
    return dict(schema) if isinstance(schema, Mapping) else schema


def request_of(
    state: ServerState, body: Generation, sampling: SamplingParams, rid: str | None
) -> GenerateRequest:
    """All of intake's request but the prompt and the log-probabilities."""
    if body.return_hidden_states and not state.intake.facts.hidden_states_enabled:
        raise InvalidRequest(
            "return_hidden_states needs --enable-return-hidden-states", "return_hidden_states"
        )
    return GenerateRequest(
        sampling=sampling,
        rid=rid,
        stream=bool(body.stream),
        return_hidden_states=bool(body.return_hidden_states),
        extra_key=prefix_key(body.extra_key, body.cache_salt),
        priority=body.priority or 0,
        replica=replica_of(body.data_parallel_rank, body.routed_dp_rank),
        timeout_s=body.timeout,
        session=body.session_params,
        processor=processor_name(body.custom_logit_processor, body.logit_processor),
        fair_key=fair_share_key(),
        names=_client_names(body),
    )


def _client_names(body: Generation) -> dict[str, str]:
    """Which of several names of one thing the client has used."""
    names = {"text": "prompt"}
    if getattr(body, "input_ids", None) is not None:
        names |= {"prompt": "input_ids", "text": "input_ids"}
    if getattr(body, "max_completion_tokens", None) is not None:
        names["max_tokens"] = "max_completion_tokens"
    if body.routed_dp_rank is not None:
        names["data_parallel_rank"] = "routed_dp_rank"
    return names
