"""Routes of Text Generation Inference, for Hugging Face's clients: POST /, /generate_stream, /info,
and /generate where the body has ``inputs``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from radixlm import __version__
from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.disaggregation import pair_fields
from radixlm.entrypoints.http.errors import json_answer, json_response
from radixlm.entrypoints.http.openai import generate
from radixlm.entrypoints.http.openai.completions import Call, make_call
from radixlm.entrypoints.http.openai.logprobs import LOWEST
from radixlm.entrypoints.http.openai.protocol import CompletionRequest
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.pooling import tei
from radixlm.entrypoints.http.state import ServerState, state_of
from radixlm.entrypoints.http.transport import (
    cancel_on_disconnect,
    event,
    read_body,
    stream_response,
)
from radixlm.entrypoints.request_model import Body, Stops, make, with_fields
from radixlm.entrypoints.sequences import likeliest
from radixlm.intake.records import Output
from radixlm.wire.replies import Logprobs

router = APIRouter(tags=["tgi"])

MAX_NEW_TOKENS = 100  # where a body names no number


class TgiParameters(Body):
    """Without ``do_sample``, ``temperature``, ``top_k`` or ``top_p`` the likeliest token is taken.
    ``truncate``: tokens of the prompt that are left, its last ones. ``grammar``: {"type": "json" or
    "regex", "value"}."""

    max_new_tokens: int | None = None
    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: Stops | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    truncate: Annotated[int, Field(ge=1)] | None = None
    grammar: dict[str, Any] | None = None
    adapter_id: str | None = None
    return_full_text: bool | None = None
    details: bool = False
    decoder_input_details: bool = False
    top_n_tokens: Annotated[int, Field(ge=0)] | None = None
    watermark: bool | None = None


@with_fields("tgi")
class TgiRequest(Body):
    """POST /, /generate and /generate_stream."""

    inputs: str
    parameters: TgiParameters | None = None
    stream: bool | None = None


@router.post("/", openapi_extra=documented(TgiRequest))
async def compat_generate(request: Request) -> Response:
    """Continue a prompt, in the form of Text Generation Inference: a list of one answer, or with
    `stream` its events. Of a model that gives vectors what /embed or /similarity answers."""
    if not state_of(request).info.is_generation:
        return await tei.answer_inputs(request)
    body = await read_body(request, TgiRequest)
    return await (_stream(request, body) if body.stream else _whole(request, body, as_list=True))


@router.post("/generate_stream", openapi_extra=documented(TgiRequest))
async def generate_stream(request: Request) -> Response:
    """Continue a prompt, with an event for each token."""
    return await _stream(request, await read_body(request, TgiRequest))


async def answer_inputs(request: Request) -> Response:
    """The response of /generate to a body with ``inputs``."""
    return await _whole(request, await read_body(request, TgiRequest, any_type=True))


@router.get("/info")
async def info(request: Request) -> Response:
    """The model and the limits of requests, as Text Generation Inference tells them."""
    state = state_of(request)
    context_len = state.intake.facts.context_len
    return json_response(
        {
            "model_id": state.model_name,
            "model_sha": None,
            "model_dtype": str(state.config.model.dtype),
            "model_device_type": state.config.execute.device,
            "model_pipeline_tag": "text-generation" if state.info.is_generation else None,
            "max_concurrent_requests": state.config.schedule.max_running_requests or 0,
            "max_best_of": state.intake.facts.max_sequences,
            "max_input_length": context_len - 1,
            "max_input_tokens": context_len - 1,
            "max_total_tokens": context_len,
            "router": "radixlm",
            "version": __version__,
        }
    )


async def _call(request: Request, body: TgiRequest, has_tokens: bool) -> Call:
    """The body as a call of /v1/completions. ``has_tokens``: log-probabilities are needed."""
    asked = body.parameters or TgiParameters()
    names = ("repetition_penalty", "frequency_penalty", "seed", "stop", "best_of", "typical_p")
    values = {name: getattr(asked, name) for name in names if getattr(asked, name) is not None}
    values |= {
        "prompt": body.inputs,
        "max_tokens": MAX_NEW_TOKENS if asked.max_new_tokens is None else asked.max_new_tokens,
        "truncate_prompt_tokens": asked.truncate,
        "lora_path": asked.adapter_id,
        **_sampling(asked),
        **_grammar(asked.grammar),
        **pair_fields(body),
    }
    if has_tokens:
        values["logprobs"] = asked.top_n_tokens or 0
    if asked.decoder_input_details:
        values["prompt_logprobs"] = 0
    if asked.watermark:
        raise InvalidRequest("watermark: watermarking is not supported", "watermark")
    return await make_call(state_of(request), make(CompletionRequest, values))


def _sampling(asked: TgiParameters) -> dict[str, Any]:
    is_drawn = asked.do_sample or any(
        value is not None and value != neutral
        for value, neutral in ((asked.temperature, 1.0), (asked.top_k, 0), (asked.top_p, 1.0))
    )
    if not is_drawn:
        return {"temperature": 0.0}
    temperature = 1.0 if asked.temperature is None else asked.temperature
    return {"temperature": temperature, "top_k": asked.top_k or -1, "top_p": asked.top_p or 1.0}


def _grammar(grammar: dict[str, Any] | None) -> dict[str, Any]:
    if grammar is None:
        return {}
    kind, value = grammar.get("type"), grammar.get("value")
    if kind in ("json", "json_object") and isinstance(value, dict | str):
        return {"json_schema": value}
    if kind == "json_schema" and isinstance(value, dict):
        return {"json_schema": value.get("schema", value)}
    if kind == "regex" and isinstance(value, str):
        return {"regex": value}
    raise InvalidRequest('grammar must be {"type": "json" or "regex", "value": ...}', "grammar")


async def _whole(request: Request, body: TgiRequest, as_list: bool = False) -> Response:
    asked = body.parameters or TgiParameters()
    has_details = asked.details or asked.decoder_input_details
    call = await _call(request, body, has_details)
    (outputs,) = await cancel_on_disconnect(request, generate.collect(call.state, call.requests))
    best, *others = likeliest(outputs, len(outputs))
    answer = _answer(call.state, body, best, has_details)
    if has_details and others:
        rest = [_answer(call.state, body, one, True) for one in others]
        answer["details"]["best_of_sequences"] = [
            {"generated_text": one["generated_text"], **one["details"]} for one in rest
        ]
    return await json_answer([answer] if as_list else answer)


def _answer(
    state: ServerState, body: TgiRequest, output: Output, has_details: bool
) -> dict[str, Any]:
    asked = body.parameters or TgiParameters()
    answer: dict[str, Any] = {"generated_text": _full(body, output.text)}
    if not has_details:
        return answer
    answer["details"] = _ending(asked, output) | {
        "prefill": [
            {key: row[key] for key in ("id", "text", "logprob")}
            for row in _tokens(state, output.prompt_logprobs)
        ],
        "tokens": list(_tokens(state, output.logprobs)),
    }
    if asked.top_n_tokens:
        answer["details"]["top_tokens"] = _top(state, output.logprobs, asked.top_n_tokens)
    return answer


def _full(body: TgiRequest, text: str) -> str:
    is_full = body.parameters is not None and body.parameters.return_full_text
    return body.inputs + text if is_full else text


def _ending(asked: TgiParameters, output: Output) -> dict[str, Any]:
    matched = output.finish.matched if output.finish is not None else None
    reason = "eos_token" if matched is None or isinstance(matched, int) else "stop_sequence"
    is_cut = output.finish is not None and output.finish.kind != "stop"
    return {
        "finish_reason": "length" if is_cut else reason,
        "generated_tokens": output.completion_tokens,
        "seed": asked.seed,
    }


def _tokens(state: ServerState, logprobs: Logprobs | None) -> Iterator[dict[str, Any]]:
    for logprob, token in logprobs.chosen if logprobs is not None else ():
        yield _token(state, token, logprob)


def _token(state: ServerState, token: int, logprob: float | None) -> dict[str, Any]:
    tokenizer = state.require_tokenizer()
    return {
        "id": token,
        "text": tokenizer.token_text(token),
        "logprob": None if logprob is None else max(logprob, LOWEST),
        "special": tokenizer.is_special(token),
    }


def _top(state: ServerState, logprobs: Logprobs | None, count: int) -> list[list[dict[str, Any]]]:
    rows = logprobs.top if logprobs is not None else []
    return [[_token(state, token, lp) for lp, token in (row or ())[:count]] for row in rows]


async def _stream(request: Request, body: TgiRequest) -> Response:
    asked = body.parameters or TgiParameters()
    if (asked.best_of or 1) > 1:
        raise InvalidRequest("best_of: the best of several cannot be streamed", "best_of")
    if asked.decoder_input_details:
        message = "decoder_input_details: tokens of the prompt are not streamed"
        raise InvalidRequest(message, "decoder_input_details")
    return await stream_response(request, _events(await _call(request, body, True), body))


async def _events(call: Call, body: TgiRequest) -> AsyncGenerator[bytes, None]:
    """An event a token. The last of all has the whole text."""
    asked, text, index = body.parameters or TgiParameters(), "", 0
    row: dict[str, Any] = {"id": 0, "text": "", "logprob": None, "special": False}
    async with aclosing(generate.stream(call.state, call.requests)) as deltas:
        async for _, output in deltas:
            text += output.text
            rows = list(_tokens(call.state, output.logprobs))
            if not rows and (output.text or output.finish is not None):
                rows = [row]  # text that was held back
            tops = _top(call.state, output.logprobs, asked.top_n_tokens or 0)
            for place, row in enumerate(_with_texts(rows, output.text)):
                is_last, index = place == len(rows) - 1, index + 1
                shown = {"index": index, "token": row, "generated_text": None, "details": None}
                if asked.top_n_tokens:
                    shown["top_tokens"] = tops[place] if place < len(tops) else []
                if is_last and output.finish is not None:
                    shown["generated_text"] = _full(body, text)
                    details = _ending(asked, output)
                    shown["details"] = details | {"input_length": output.prompt_tokens}
                yield event(shown)


def _with_texts(rows: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Tokens that came together, with their parts of ``text``. The last has all of it where parts
    of a token are no text of their own, or were held back."""
    if "".join(row["text"] for row in rows if not row["special"]) == text:
        return rows
    last = rows[-1] if text or not rows[-1]["special"] else None
    shown = [row if row["special"] else row | {"text": ""} for row in rows]
    return [*shown[:-1], last | {"text": text, "special": False}] if last is not None else shown
