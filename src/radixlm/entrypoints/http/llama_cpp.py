"""Routes of llama.cpp's server that its clients call (its tools/server/README.md): /completion,
/infill, /apply-template, /props, /slots and /lora-adapters."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixlm import __version__
from radixlm.base.errors import InvalidRequest, Overloaded
from radixlm.entrypoints.http.errors import json_answer, json_response
from radixlm.entrypoints.http.openai import generate
from radixlm.entrypoints.http.openai.completions import Call, make_call
from radixlm.entrypoints.http.openai.protocol import CompletionRequest, Generation
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.state import state_of
from radixlm.entrypoints.http.tokenization import render
from radixlm.entrypoints.http.transport import (
    cancel_on_disconnect,
    event,
    read_body,
    stream_response,
)
from radixlm.entrypoints.request_model import Body, Ints, Objects, Strings, make, with_fields
from radixlm.intake.records import Output
from radixlm.wire.sampling_params import SAMPLING_FIELDS

router = APIRouter(tags=["llama.cpp"])


@with_fields("completions")
class LlamaCompletion(Generation):
    """POST /completion. ``n_predict``: tokens at most; below 0 as many as the context takes."""

    prompt: str | Ints | Strings | list[Ints] = ""
    n_predict: int = -1
    return_tokens: bool = False


class Infill(LlamaCompletion):
    """POST /infill: what belongs between two texts; ``prompt`` follows the first."""

    prompt: str = ""
    input_prefix: str
    input_suffix: str


class ApplyTemplate(Body):
    """POST /apply-template."""

    messages: Objects
    tools: Objects | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True


@router.post("/completion", openapi_extra=documented(LlamaCompletion))
async def completion(request: Request) -> Response:
    """Continue a prompt, in llama.cpp's form."""
    body = await read_body(request, LlamaCompletion)
    return await _answer(request, body, {"prompt": body.prompt})


@router.post("/infill", openapi_extra=documented(Infill))
async def infill(request: Request) -> Response:
    """Fill in between two texts, if the tokenizer has the tokens for it (--completion-template)."""
    body = await read_body(request, Infill)
    texts = {"prompt": body.input_prefix + body.prompt, "suffix": body.input_suffix}
    return await _answer(request, body, texts)


@router.post("/apply-template", openapi_extra=documented(ApplyTemplate))
async def apply_template(request: Request) -> Response:
    """The prompt that the chat template makes of messages."""
    body = await read_body(request, ApplyTemplate)
    prompt = await render(
        state_of(request),
        body.messages,
        tools=body.tools or None,
        add_generation_prompt=body.add_generation_prompt,
        template_kwargs=body.chat_template_kwargs,
    )
    return await json_answer({"prompt": prompt})


@router.get("/props")
async def props(request: Request) -> Response:
    """The model, its context, its chat template and the defaults of sampling."""
    state = state_of(request)
    kinds = state.media.kinds if state.media is not None else ()
    params = {one.name: getattr(state.defaults, one.name) for one in SAMPLING_FIELDS}
    return json_response(
        {
            "default_generation_settings": {
                "n_ctx": state.intake.facts.context_len,
                "params": {name: value for name, value in params.items() if value is not None},
            },
            "total_slots": state.config.schedule.max_running_requests or 0,
            "model_alias": state.model_name,
            "model_path": str(state.info.folder),
            "modalities": {"vision": "image" in kinds, "audio": "audio" in kinds},
            "chat_template": state.template.source if state.template is not None else "",
            "build_info": f"radixlm {__version__}",
        }
    )


@router.get("/slots")
async def slots(request: Request, fail_on_no_slot: bool = False) -> Response:
    """The places for running requests, and how many of them are in use: numbers, no prompts.

    ``fail_on_no_slot``: 503 if none is free.
    """
    state = state_of(request)
    total = state.config.schedule.max_running_requests or 0
    num_running = state.intake.load.num_running
    if fail_on_no_slot and num_running >= total:
        raise Overloaded("no slot is free")
    return json_response(
        [
            {
                "id": place,
                "n_ctx": state.intake.facts.context_len,
                "speculative": state.config.speculate.speculative_algorithm is not None,
                "is_processing": place < num_running,
            }
            for place in range(total)
        ]
    )


@router.get("/lora-adapters")
async def lora_adapters(request: Request) -> Response:
    """The adapters that are loaded. Scale 0: a request uses one by its name, as ``lora_path``."""
    loaded = enumerate(state_of(request).intake.adapters.loaded.items())
    return json_response(
        [{"id": place, "name": name, "path": path, "scale": 0.0} for place, (name, path) in loaded]
    )


async def _answer(request: Request, body: LlamaCompletion, texts: dict[str, Any]) -> Response:
    state = state_of(request)
    values = {n: getattr(body, n) for n in body.model_fields_set if n in Generation.model_fields}
    values |= {n: getattr(body, n) for n in body.model_fields_set & set(_SHARED)}
    if body.n_predict >= 0 or body.max_tokens is None:
        is_endless = body.n_predict < 0
        values["max_tokens"] = state.intake.facts.context_len if is_endless else body.n_predict
    call = await make_call(state, make(CompletionRequest, values | texts))
    for one in call.requests:
        one.clamp_max_tokens = True
    if body.stream:
        if len(call.requests) * call.num_samples > 1:
            raise InvalidRequest("stream: one prompt and one sample can be streamed", "stream")
        return await stream_response(request, _events(call))
    began_s = time.monotonic()
    found = await cancel_on_disconnect(request, generate.collect(state, call.requests))
    answers = [
        _piece(output, body.return_tokens) | _totals(call, output, began_s)
        for outputs in found
        for output in outputs
    ]
    return await json_answer(answers if len(answers) > 1 else answers[0])


_SHARED = set(CompletionRequest.model_fields) - set(Generation.model_fields)


async def _events(call: Call) -> AsyncGenerator[bytes, None]:
    """Pieces of the text with their tokens, the totals with the last one."""
    began_s = time.monotonic()
    async with aclosing(generate.stream(call.state, call.requests)) as deltas:
        async for _, output in deltas:
            piece = _piece(output, True)
            if output.finish is not None:
                piece |= _totals(call, output, began_s)
            yield event(piece)


def _piece(output: Output, has_tokens: bool) -> dict[str, Any]:
    return {
        "index": output.index,
        "content": output.text,
        "tokens": output.token_ids if has_tokens else [],
        "stop": output.finish is not None,
        "tokens_predicted": output.completion_tokens,
        "tokens_evaluated": output.prompt_tokens,
    }


def _totals(call: Call, output: Output, began_s: float) -> dict[str, Any]:
    """The further fields of an answer that is whole. Times in milliseconds."""
    finish = output.finish
    word = finish.matched if finish is not None and isinstance(finish.matched, str) else ""
    is_cut = finish is not None and finish.kind != "stop"
    total_s = time.monotonic() - began_s
    predicted_s = max(total_s - output.prefill_s, 1e-6)
    return {
        "model": call.model,
        "stop_type": "limit" if is_cut else "word" if word else "eos",
        "stopping_word": word,
        "truncated": False,
        "tokens_cached": output.cached_tokens,
        "timings": {
            "cache_n": output.cached_tokens,
            "prompt_n": output.prompt_tokens - output.cached_tokens,
            "prompt_ms": output.prefill_s * 1000,
            "predicted_n": output.completion_tokens,
            "predicted_ms": predicted_s * 1000,
            "predicted_per_second": output.completion_tokens / predicted_s,
        },
    }
