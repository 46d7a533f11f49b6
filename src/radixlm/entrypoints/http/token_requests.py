"""POST /inference/v1/generate of vLLM: token ids in, token ids out. It takes what
/v1/completions/render and /v1/chat/completions/render return."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixlm.base.errors import InvalidRequest, NotSupported
from radixlm.entrypoints.http.errors import json_answer
from radixlm.entrypoints.http.openai import generate
from radixlm.entrypoints.http.openai.completions import Call, make_call
from radixlm.entrypoints.http.openai.logprobs import chat_logprobs, prompt_rows
from radixlm.entrypoints.http.openai.protocol import CompletionRequest, StreamOptions
from radixlm.entrypoints.http.openai.usage import usage, wanted_usage
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.state import ServerState, state_of
from radixlm.entrypoints.http.transport import (
    DONE,
    cancel_on_disconnect,
    event,
    read_body,
    stream_response,
)
from radixlm.entrypoints.request_model import Body, Ints, Priority, make
from radixlm.entrypoints.sequences import likeliest
from radixlm.intake.records import Output
from radixlm.wire.sampling_params import parameter_names

router = APIRouter(tags=["vllm"])


class TokensRequest(Body):
    """POST /inference/v1/generate. ``sampling_params``: by the names of /v1/completions or of
    /generate; without ``max_tokens`` the answer may fill the context."""

    token_ids: Ints
    sampling_params: dict[str, Any] | None = None
    features: dict[str, Any] | None = None
    request_id: str | None = None
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: Priority | None = None


@router.post("/inference/v1/generate", openapi_extra=documented(TokensRequest))
async def generate_tokens(request: Request) -> Response:
    """Continue token ids; the answer has token ids and no text."""
    body = await read_body(request, TokensRequest)
    state = state_of(request)
    call = await make_call(state, _completion(state, body))
    if body.stream:
        return await stream_response(request, _events(call))
    return await json_answer(await cancel_on_disconnect(request, _complete(call)))


def _completion(state: ServerState, body: TokensRequest) -> CompletionRequest:
    """The same request to /v1/completions."""
    if body.features is not None:
        text = "features: media is not read here: send the messages themselves"
        raise NotSupported(text, "features")
    if not body.token_ids:
        raise InvalidRequest("token_ids: at least one token is needed", "token_ids")
    names = parameter_names("sampling_params", "completions")
    sampling = {
        names.get(name, name): value
        for name, value in (body.sampling_params or {}).items()
        if value is not None and name != "detokenize"  # there is no text
    }
    rest = state.intake.facts.context_len - len(body.token_ids)
    values = {"max_tokens": max(rest, 1), **sampling, "prompt": body.token_ids}
    if isinstance(values.get("logprobs"), int):
        values["logprobs"] = values["logprobs"] or 1  # the token itself is among them
    shared = body.model_dump(
        include={"model", "stream", "stream_options", "cache_salt", "priority"}, exclude_none=True
    )
    named = {"rid": body.request_id} if body.request_id is not None else {}
    return make(CompletionRequest, values | shared | named)


async def _complete(call: Call) -> dict[str, Any]:
    """The whole answer."""
    (outputs,) = await generate.collect(call.state, call.requests)
    shown = likeliest(outputs, call.num_shown)
    top, rows = call.body.prompt_logprobs, None
    if top is not None:
        rows = prompt_rows(call.state.require_tokenizer(), outputs[0].prompt_logprobs, top)
    return {
        "request_id": call.id,
        "choices": [_choice(call, output) | {"index": i} for i, output in enumerate(shown)],
        "prompt_logprobs": rows,
        "kv_transfer_params": None,
        "usage": _usage(call, outputs),
    }


def _choice(call: Call, output: Output) -> dict[str, Any]:
    logprobs = None
    if call.body.logprobs is not None:
        tokenizer = call.state.require_tokenizer()
        logprobs = {"content": chat_logprobs(tokenizer, output.logprobs, call.body.logprobs)}
    return {
        "index": output.index,
        "logprobs": logprobs,
        "finish_reason": generate.finish_reason(output),
        "token_ids": output.token_ids,
    }


def _usage(call: Call, outputs: list[Output]) -> dict[str, Any]:
    return usage(outputs, shows_cached=call.state.config.serve.enable_cache_report)


async def _events(call: Call) -> AsyncGenerator[bytes, None]:
    """A chunk for each batch of tokens, then the usage if asked for, then [DONE]."""
    wants_usage, continuous = wanted_usage(call.body.stream_options, call.state.config.serve)
    last: dict[int, Output] = {}
    async with aclosing(generate.stream(call.state, call.requests)) as deltas:
        async for _, output in deltas:
            last[output.index] = output
            if not output.token_ids and output.finish is None:
                continue
            chunk: dict[str, Any] = {"request_id": call.id, "choices": [_choice(call, output)]}
            yield event(chunk | ({"usage": _usage(call, [output])} if continuous else {}))
    if wants_usage:
        counted = _usage(call, [last[index] for index in sorted(last)])
        yield event({"request_id": call.id, "choices": [], "usage": counted})
    yield DONE
