"""POST /v1/fim/completions, Mistral's route for what belongs between two texts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.errors import json_answer
from radixlm.entrypoints.http.openai import generate
from radixlm.entrypoints.http.openai.completions import Call, complete, make_call
from radixlm.entrypoints.http.openai.protocol import CompletionRequest, Generation
from radixlm.entrypoints.http.openai.usage import usage
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.state import state_of
from radixlm.entrypoints.http.transport import (
    DONE,
    cancel_on_disconnect,
    event,
    read_body,
    stream_response,
)
from radixlm.entrypoints.request_model import make, with_fields
from radixlm.intake.records import in_client_words

router = APIRouter(tags=["openai"])


@with_fields("completions")
class FimRequest(Generation):
    """POST /v1/fim/completions: the text between ``prompt`` and ``suffix``, as long as it is unless
    ``max_tokens`` is given."""

    prompt: str
    suffix: str | None = None
    random_seed: int | None = None


@router.post("/v1/fim/completions", openapi_extra=documented(FimRequest))
async def fim_completions(request: Request) -> Response:
    """Fill in between two texts, in Mistral's form: the answer is a message, its chunks deltas."""
    body, state = await read_body(request, FimRequest), state_of(request)
    sent = body.model_fields_set & CompletionRequest.model_fields.keys()
    values = {name: getattr(body, name) for name in sent}
    if body.random_seed is not None:
        values["seed"] = body.random_seed
    if body.max_tokens is None:
        values["max_tokens"] = state.intake.facts.context_len
    try:
        call = await make_call(state, make(CompletionRequest, values))
    except InvalidRequest as error:
        is_other = body.random_seed is not None
        raise in_client_words(error, {"seed": "random_seed"} if is_other else {}) from None
    for one in call.requests:
        one.clamp_max_tokens = True
    if body.stream:
        return await stream_response(request, _events(call))
    answer = await cancel_on_disconnect(request, complete(call))
    choices = [
        {
            "index": one["index"],
            "message": {"role": "assistant", "content": one["text"], "tool_calls": None},
            "finish_reason": one["finish_reason"],
        }
        for one in answer["choices"]
    ]
    return await json_answer(answer | {"object": "chat.completion", "choices": choices})


async def _events(call: Call) -> AsyncGenerator[bytes, None]:
    """Deltas, the last of each sample with the usage of all so far; then [DONE]."""
    ended, seen = [], set[int]()
    envelope = call.envelope | {"object": "chat.completion.chunk"}
    async with aclosing(generate.stream(call.state, call.requests)) as deltas:
        async for _, output in deltas:
            delta: dict[str, Any] = {"content": output.text}
            if output.index not in seen:
                seen.add(output.index)
                delta["role"] = "assistant"
            reason = generate.finish_reason(output)
            choice = {"index": output.index, "delta": delta, "finish_reason": reason}
            chunk = envelope | {"choices": [choice]}
            if reason is not None:
                ended.append(output)
                shows_cached = call.state.config.serve.enable_cache_report
                chunk["usage"] = usage(ended, shows_cached=shows_cached)
            yield event(chunk)
    yield DONE
