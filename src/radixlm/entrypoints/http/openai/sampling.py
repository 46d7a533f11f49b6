"""From the fields of an OpenAI request to sampling parameters and a request for intake."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.disaggregation import apply_role
from radixlm.entrypoints.http.middleware import fair_share_key, request_id
from radixlm.entrypoints.http.openai.protocol import Generation
from radixlm.entrypoints.http.state import ServerState
from radixlm.entrypoints.reasoning import apply_reasoning
from radixlm.entrypoints.request_options import request_options, unheld_of
from radixlm.intake.records import GenerateRequest, grammar_of, in_client_words
from radixlm.text.answer_check import UnheldSchema
from radixlm.wire.sampling_params import ANY_JSON_OBJECT, SamplingParams, parameter_names


def sampling_of(
    body: Generation, defaults: SamplingParams, max_tokens: int | None
) -> SamplingParams:
    """The sampling parameters; errors name the field as the client wrote it."""
    names = parameter_names("sampling_params", body.api)
    sent = body.model_fields_set
    values = {name: getattr(body, alias) for name, alias in names.items() if alias in sent}
    values["max_new_tokens"] = max_tokens
    if values.get("allowed_token_ids") == []:
        message = "allowed_token_ids must name at least one token, or be left out"
        raise InvalidRequest(message, "allowed_token_ids")
    if values.get("top_k") == 0:
        values["top_k"] = -1  # "off" in other servers
    if body.use_beam_search:
        values["beam_width"] = max(body.n or 1, getattr(body, "best_of", None) or 1)
        values.pop("best_of", None)
    values |= _grammar(body.response_format)
    try:
        sampling = SamplingParams.from_dict(values, defaults)
    except InvalidRequest as error:
        raise in_client_words(error, client_names(body)) from None
    if max_tokens is None:
        sampling = msgspec.structs.replace(sampling, max_new_tokens=None)
    return sampling


def checked_truncation(count: int | None, context_len: int) -> int | None:
    """``truncate_prompt_tokens`` as it is; InvalidRequest above the context, as in vLLM, and for
    0."""
    if count == 0:
        message = "truncate_prompt_tokens: 0 leaves nothing; it must be 1 or more, or -1"
        raise InvalidRequest(message, "truncate_prompt_tokens")
    if count is not None and count > context_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens: {count} is more than the context of {context_len} tokens",
            "truncate_prompt_tokens",
        )
    return count


def truncated(body: Generation, ids: list[int], context_len: int) -> list[int]:
    """The last ``truncate_prompt_tokens`` ids (vLLM), or the first with ``truncation_side`` right;
    -1: as many as the context takes. InvalidRequest for more than the context has."""
    count = checked_truncation(body.truncate_prompt_tokens, context_len)
    if count is None or not ids:
        return ids
    most = context_len - 1
    kept = most if count == -1 else min(count, most)
    return ids[:kept] if body.truncation_side == "right" else ids[-kept:]


def check_sampling(state: ServerState, sampling: SamplingParams, names: Mapping[str, str]) -> None:
    """InvalidRequest for a value out of bounds. ``names``: of the parameters, for the client."""
    try:
        sampling.validate(state.intake.facts.vocab)
    except InvalidRequest as error:
        raise in_client_words(error, names) from None


def client_names(body: Generation) -> dict[str, str]:
    """Names of sampling parameters and of intake -> the names that the client has used."""
    names = dict(parameter_names("sampling_params", body.api))
    if getattr(body, "max_completion_tokens", None) is None:
        names["max_new_tokens"] = "max_tokens"
    names |= {"max_thinking_tokens": "thinking_token_budget", "return_logprob": "logprobs"}
    names |= {"beam_width": "n", "token_ids_logprob": "logprob_token_ids"}
    names |= {"text": "prompt", "max_tokens": names["max_new_tokens"]}
    if getattr(body, "input_ids", None) is not None:
        names |= {"prompt": "input_ids", "text": "input_ids"}
    if getattr(body, "prompt_logprobs", None) is not None:
        names["top_logprobs"] = "prompt_logprobs"
    elif body.api == "completions":
        names["top_logprobs"] = "logprobs"
    return names


def _grammar(response_format: Mapping[str, Any] | None) -> dict[str, Any]:
    """``response_format`` as one of the grammars of SamplingParams."""
    if response_format is None:
        return {}
    kind = response_format.get("type")
    if kind == "text":
        return {}
    if kind in ("json_object", "json"):
        # Hugging Face's clients send TGI's form, whose schema is "value"
        name = "value" if "value" in response_format else "schema"
        return {"json_schema": _schema(response_format, "response_format", name)}
    if kind == "json_schema":
        where = "response_format.json_schema"
        wrapper = _wrapper(response_format)
        if wrapper is None:
            raise InvalidRequest(f"{where} must be an object with name and schema", where)
        return {"json_schema": _schema(wrapper, where)}
    if kind == "structural_tag":
        return {"structural_tag": json.dumps(response_format)}
    if kind == "regex" and isinstance(response_format.get("pattern"), str):
        return {"regex": response_format["pattern"]}
    if kind in ("grammar", "ebnf") and isinstance(response_format.get("grammar"), str):
        return {"ebnf": response_format["grammar"]}
    raise InvalidRequest(
        f"response_format.type must be text, json_object, json_schema or structural_tag, "
        f"not {kind!r:.80}",
        param="response_format.type",
    )


def _schema(wrapper: Mapping[str, Any], where: str, name: str = "schema") -> Any:
    schema = wrapper.get(name)
    if schema is None:
        return ANY_JSON_OBJECT
    if not isinstance(schema, Mapping | bool):
        raise InvalidRequest(f"{where}.{name} must be an object", f"{where}.{name}")
    return dict(schema) if isinstance(schema, Mapping) else schema


def refuse_unheld(unheld: UnheldSchema | None) -> None:
    """InvalidRequest for a strict schema that cannot be enforced in full."""
    if unheld is not None:
        raise InvalidRequest(
            f"{unheld.where}: with strict true, these keywords cannot be enforced: {unheld.names}. "
            f"Remove them, or send strict false and check the answer",
            unheld.where,
        )


def _wrapper(response_format: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What holds "schema" and "strict": "json_schema", or the response format itself, as SGLang and
    llama.cpp read it too."""
    wrapper = response_format.get("json_schema")
    if wrapper is None and "schema" in response_format:
        return response_format
    return wrapper if isinstance(wrapper, Mapping) else None


def _is_strict(response_format: Mapping[str, Any] | None) -> bool:
    wrapper = _wrapper(response_format or {})
    return wrapper is not None and wrapper.get("strict") is True


def unheld_of_body(body: Generation, sampling: SamplingParams) -> UnheldSchema | None:
    """What of the schema is not enforced; InvalidRequest if it is to be strict."""
    is_given = (body.response_format or {}).get("type") == "json_schema"
    where = "response_format.json_schema.schema" if is_given else "json_schema"
    unheld = unheld_of(sampling.json_schema, where)
    if _is_strict(body.response_format):
        refuse_unheld(unheld)
    return unheld


def request_of(
    state: ServerState,
    body: Generation,
    sampling: SamplingParams,
    unheld: UnheldSchema | None,
    rid: str | None,
    index: int = 0,
    count: int = 1,
) -> GenerateRequest:
    """A request for intake, of prompt ``index`` of ``count``, without prompt and
    log-probabilities. ``unheld``: ``unheld_of_body``."""
    options = request_options(lambda name: getattr(body, name), index, count)
    options["names"] |= client_names(body)
    options["adapter"] = state.adapter_of(body.model, options["adapter"])
    grammar = grammar_of(sampling)
    if grammar is not None and _is_strict(body.response_format):
        grammar = msgspec.structs.replace(grammar, is_strict=True)
    request = GenerateRequest(
        sampling=sampling,
        grammar=grammar,
        unheld=unheld,
        rid=rid,
        default_rid=None if options["session"] else request_id(),
        stream=bool(body.stream),
        fair_key=fair_share_key(),
        **options,
    )
    budget = body.thinking_token_budget
    request.max_thinking_tokens = None if budget == -1 else budget
    apply_reasoning(request, state.reasoning_format)
    apply_role(state.config, request)
    return request
