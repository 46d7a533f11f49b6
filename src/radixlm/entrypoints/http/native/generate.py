"""The routes /generate, /generate_from_file and /abort_request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints import beam_search
from radixlm.entrypoints.disaggregation import apply_role
from radixlm.entrypoints.http.errors import FinishError, json_answer, json_response
from radixlm.entrypoints.http.middleware import fair_share_key, request_id
from radixlm.entrypoints.http.off_loop import BYTES_A_LOGPROB, body_size, off_loop, off_loop_of
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.resume import take_resume
from radixlm.entrypoints.http.state import ServerState, state_of
from radixlm.entrypoints.http.tgi import answer_inputs
from radixlm.entrypoints.http.tokenization import encode, is_slow
from radixlm.entrypoints.http.transport import (
    DONE,
    cancel_on_disconnect,
    event,
    read_body,
    read_json,
    stream_response,
)
from radixlm.entrypoints.native.request import Batch, GenerateBody, read_generate
from radixlm.entrypoints.native.response import ResponseBuilder
from radixlm.entrypoints.reasoning import apply_reasoning, make_strict
from radixlm.entrypoints.request_model import Body, Strings
from radixlm.entrypoints.sequences import check_sequences, likeliest, num_logprobs, paced
from radixlm.intake.identity import identity
from radixlm.intake.records import Output
from radixlm.intake.validation import score_after
from radixlm.wire.requests import ABORTED, AbortRequest
from radixlm.wire.sampling_params import MAX_PARALLEL_SAMPLES
from radixlm.wire.unknown import note_warning

router = APIRouter(tags=["native"])

BYTES_A_PROMPT = 512  # what a prompt costs, as bytes of text that is read


@router.post("/generate", openapi_extra=documented(GenerateBody), operation_id="post_generate")
@router.put("/generate", openapi_extra=documented(GenerateBody), operation_id="put_generate")
async def generate(request: Request) -> Response:
    """Continue a prompt, or a list of prompts; `inputs` in the form of TGI, as of POST /."""
    body = await read_json(request)
    if "inputs" in body:
        return await answer_inputs(request)
    return await answer_generate(request, body)


async def answer_generate(request: Request, body: dict[str, Any]) -> Response:
    """The response of /generate to a body."""
    state = state_of(request)
    batch = await off_loop(max(_size(body), body_size()), _read, state, body)
    await take_resume(batch.resume)
    width = max(one.sampling.beam_width or 1 for one in batch.requests)
    n = max(batch.requests[0].sampling.n, min(width, MAX_PARALLEL_SAMPLES))
    most, param = state.intake.facts.max_sequences, "text" if body.get("text") else "input_ids"
    check_sequences(len(batch.requests), n, most, param)
    batch.stream_disjoint = state.config.serve.stream_output
    if any(batch.media):
        await batch.read_media_in_threads(state.media)
    dim = state.intake.facts.embed_dim
    has_times = state.config.observe.enable_metrics
    builder = ResponseBuilder(state.tokenizer, batch, state.weight_version, dim, has_times)
    await _prepare(state, batch)
    if batch.stream:
        return await stream_response(request, _events(state, batch, builder))
    answers = await cancel_on_disconnect(request, _collect(state, batch, builder))
    return await json_answer(answers if batch.is_list else answers[0])


def _read(state: ServerState, body: dict[str, Any]) -> Batch:
    batch = read_generate(body, state.defaults)
    for one in batch.requests:
        apply_reasoning(one, state.reasoning_format)
        if state.config.serve.enable_strict_thinking:
            make_strict(one, state.reasoning_format)
        apply_role(state.config, one, is_native=True)
    return batch


def _size(body: dict[str, Any]) -> int:
    """About how many bytes a body has to look at."""
    prompts = (body.get(name) for name in ("text", "input_ids", "input_embeds"))
    return sum(BYTES_A_PROMPT * len(p) if isinstance(p, list) else 0 for p in prompts)


async def _prepare(state: ServerState, batch: Batch) -> None:
    """Name the requests, and tokenize long texts in a thread."""
    name = request_id()
    for index, request in enumerate(batch.requests):
        if name is not None and request.session is None:
            request.default_rid = name if len(batch.requests) == 1 else f"{name}_{index}"
        if request.text is not None and is_slow(state.tokenizer, request.text):
            adds = request.add_special_tokens
            request.input_ids = await encode(state, request.text, "text", adds)
            if request.scored_after is not None:
                start = await encode(state, request.scored_after, "text", adds)
                score_after(request, len(start), len(request.input_ids))
            request.text = None
        request.fair_key = fair_share_key()


async def _collect(
    state: ServerState, batch: Batch, builder: ResponseBuilder
) -> list[dict[str, Any]]:
    async def one(index: int) -> list[dict[str, Any]]:
        outputs = await beam_search.collect(state.intake, batch.requests[index])
        for output in outputs:
            raise_failed(output)
        answers = [
            await off_loop_of(num_logprobs(output), builder.response, index, output)
            for output in likeliest(outputs, batch.num_shown)
        ]
        return builder.joined(index, answers)

    with state.sessions.joined(batch.requests):
        async with asyncio.TaskGroup() as group:
            made = (group.create_task(one(i)) for i in range(len(batch.requests)))
            tasks = [task async for task in paced(made)]
    return [answer for task in tasks for answer in task.result()]


def raise_failed(output: Output) -> None:
    """Raise FinishError for an Output that ended in an error."""
    finish = output.finish
    if finish is not None and finish.kind == "error":
        raise FinishError(finish)


async def _events(
    state: ServerState, batch: Batch, builder: ResponseBuilder
) -> AsyncGenerator[bytes, None]:
    is_first = True
    with state.sessions.joined(batch.requests):
        async for answer in builder.stream(state.intake, off_loop_of):
            reason = answer["meta_info"]["finish_reason"]
            if reason and reason["type"] == "abort" and reason["err_type"] and is_first:
                raise FinishError(builder.last_finish)
            is_first = False
            size = BYTES_A_LOGPROB * builder.num_logprobs
            yield await off_loop(size, event, answer)
    yield DONE


_UPLOAD: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {"file": {"type": "string", "format": "binary"}},
                }
            }
        },
    }
}


@router.post("/generate_from_file", openapi_extra=_UPLOAD)
async def generate_from_file(request: Request) -> Response:
    """Input embeddings, uploaded as a JSON file."""
    async with request.form(max_files=1, max_fields=8) as form:
        upload = form.get("file")
        if upload is None or isinstance(upload, str):
            raise InvalidRequest("send the embeddings as a file in the form field 'file'", "file")
        data = await upload.read()
    try:
        rows = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"file: not valid JSON: {error}", "file") from error
    sampling = {"temperature": 0.0, "max_new_tokens": 512}
    return await answer_generate(request, {"input_embeds": rows, "sampling_params": sampling})


class ConcatenateBody(Body):
    """POST /concate_and_append_request."""

    src_rids: Strings
    dst_rid: str


@router.post("/concate_and_append_request", openapi_extra=documented(ConcatenateBody))
async def concatenate_and_append(request: Request) -> Response:
    """SGLang's frontend announces joined branches. Its next request has the whole text, so nothing
    is copied: keys and values of a branch belong to its own positions. The answer says so."""
    await read_body(request, ConcatenateBody, any_type=True)
    reason = "no KV cache is copied: the next request computes what the prefix cache does not hold"
    note_warning(f"/concate_and_append_request: {reason}")
    return json_response({"success": True, "copied_tokens": 0, "message": reason})


class AbortBody(Body):
    """POST /abort_request."""

    rid: str | None = None
    rids: Strings | None = None
    abort_all: bool = False
    abort_message: str | None = None
    finished_reason: Any = None
    abort_reason: Any = None


@router.post("/abort_request", openapi_extra=documented(AbortBody))
async def abort_request(request: Request) -> Response:
    """Abort one request of the client, or all of them; returns how many."""
    body = await read_body(request, AbortBody, any_type=True)
    intake = state_of(request).intake
    message = body.abort_message or ABORTED
    if body.abort_all:
        return json_response({"success": True, "num_aborted": intake.abort_all(message)})
    rids = body.rids or ([body.rid] if body.rid else [])
    if not rids:
        raise InvalidRequest("rid: name the request to abort, or send abort_all", "rid")
    count = sum(intake.abort(rid, message) for rid in rids)
    if not count and state_of(request).config.serve.tokenizer_worker_num > 1:
        # it may belong to another HTTP process: tell the engine
        owner = None if identity().is_admin else identity().owner
        intake.replicas.send(AbortRequest(rids=tuple(rids), message=message, owner=owner))
    return json_response({"success": count > 0, "num_aborted": count})
