"""Routes by which a program that trains a model sends its weights to a running server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, ValidationError
from starlette.datastructures import FormData, UploadFile

from radixlm.base.errors import InvalidRequest
from radixlm.engine.tensor_updates import Fill, TensorUpdates, read_infos
from radixlm.engine.weight_groups import read_place
from radixlm.entrypoints.http.admin.control import get_and_post_on, read_args
from radixlm.entrypoints.http.admin.weights import UpdateOptions, answer_update
from radixlm.entrypoints.http.errors import json_response
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.state import state_of
from radixlm.entrypoints.http.transport import read_body
from radixlm.entrypoints.request_model import Body, Objects, Strings
from radixlm.weight_updates.registry import WeightsOutcome
from radixlm.weight_updates.tensor_spool import FIELD, HANDLES, TensorSpool, read_handles

router = APIRouter(tags=["admin"])
GROUP = "weight_update_group"
_READ_BYTES = 1 << 20
_MAX_FILES = 1024

GroupName = Annotated[str, Field(max_length=256)]
Selector = Literal["all", "target"]  # the same here: drafters keep their own weights


class UpdateFromTensor(UpdateOptions):
    """``serialized_named_tensors``: a safetensors file in base64; in a list, the same for each
    rank. ``tensor_handles``: tensors in shared memory of the server's user, each {name, dtype,
    shape, shm, offset, digest}. Without either the body is the file itself (application/
    octet-stream, the options in the query) or files of a form. ``load_format``: null, "direct"
    or "flattened_bucket"."""

    serialized_named_tensors: str | Strings | None = None
    tensor_handles: Objects | None = None
    load_format: str | None = None
    selector: Selector | None = None


class UpdateFromDistributed(UpdateOptions):
    """The tensors that rank 0 of the group broadcasts, in this order. ``load_format``
    "flattened_bucket": as one tensor of their bytes."""

    names: Strings
    dtypes: Strings
    shapes: list[list[int]]
    group_name: GroupName = GROUP
    load_format: str | None = None
    selector: Selector | None = None


class InitWeightsUpdateGroup(Body):
    """``rank_offset``: of this server's first rank; ``world_size``: the trainer and all ranks of
    all servers. ``backend``: gloo or nccl; unset, what the device has."""

    master_address: Annotated[str, Field(min_length=1, max_length=256)]
    master_port: int | str
    rank_offset: int
    world_size: int
    group_name: GroupName = GROUP
    backend: str | None = None


class DestroyWeightsUpdateGroup(Body):
    group_name: GroupName = GROUP


class BeginWeightUpdate(Body):
    """``selector``: all or target."""

    selector: str = "all"


class EndWeightUpdate(UpdateOptions):
    """``discard``: forget the tensors that were sent."""

    discard: bool = False


class WeightsChecker(Body):
    """``action``: checksum (SHA-256 of each tensor), snapshot, compare."""

    action: str = "checksum"
    skip_tensor_list: Strings | None = None
    allow_quant_error: bool = False


_FROM_TENSOR = documented(UpdateFromTensor)
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_FORM = {"schema": {"type": "object", "properties": {"file": _BINARY["schema"]}}}
_FROM_TENSOR["requestBody"]["content"] |= {
    "application/octet-stream": _BINARY,
    "multipart/form-data": _FORM,
}


async def answer(work: Coroutine[Any, Any, Any]) -> Response:
    """The reference's answer to what ``work`` does: 400 with the reason if it refuses."""
    try:
        outcome = await work
    except InvalidRequest as error:
        outcome = WeightsOutcome(False, str(error))
    if isinstance(outcome, WeightsOutcome):
        return answer_update(outcome)
    return json_response({"success": True, "message": outcome})


def updates_of(request: Request) -> TensorUpdates:
    """The updates of the server; InvalidRequest where several processes share the engines."""
    state = state_of(request)
    if state.config.serve.tokenizer_worker_num > 1:
        raise InvalidRequest(
            "weights are updated by one process: leave --tokenizer-worker-num at 1"
        )
    return state.extra(TensorUpdates)


@router.post("/update_weights_from_tensor", openapi_extra=_FROM_TENSOR)
async def update_weights_from_tensor(request: Request) -> Response:
    """Replace tensors by those of the body; pickles are not read."""
    return await answer(_from_tensor(request))


async def _from_tensor(request: Request) -> WeightsOutcome:
    updates = updates_of(request)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/octet-stream":
        args = _read_options(dict(request.query_params))
        chunks = request.stream()

        async def fill(spool: TensorSpool) -> None:
            await spool.add_stream(chunks, args.load_format)

        return await updates.update(fill, args.update(""), args.load_format)
    if kind == "multipart/form-data":
        async with request.form(max_files=_MAX_FILES, max_fields=32) as form:
            texts = {name: value for name, value in form.items() if isinstance(value, str)}
            args = _read_options(texts)
            return await updates.update(
                _files(form, args.load_format), args.update(""), args.load_format
            )
    args = await read_body(request, UpdateFromTensor, any_type=True)
    return await updates.update(_body(args), args.update(""), args.load_format)


def _read_options(texts: dict[str, str]) -> UpdateFromTensor:
    """The options of an update whose tensors are in the body, as texts."""
    try:
        args = UpdateFromTensor.model_validate_strings(texts, strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else "query"
        raise InvalidRequest(f"{name}: {first['msg']}", name) from None
    return args


def _body(args: UpdateFromTensor) -> Fill:
    """What writes the tensors of a JSON body."""
    texts, handles = args.serialized_named_tensors, args.tensor_handles
    if (texts is None) == (handles is None):
        raise InvalidRequest(f"send {FIELD} or {HANDLES}", FIELD)

    async def fill(spool: TensorSpool) -> None:
        if texts is not None:
            await asyncio.to_thread(spool.add_base64, texts, args.load_format)
        else:
            found = read_handles(handles or ())
            await asyncio.to_thread(spool.add_shared, found, args.load_format)

    return fill


def _files(form: FormData, load_format: str | None) -> Fill:
    """What writes the files of a form."""
    files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
    if not files:
        raise InvalidRequest("file: send safetensors files in the form field 'file'", "file")

    async def fill(spool: TensorSpool) -> None:
        for file in files:
            await spool.add_stream(_chunks(file), load_format)

    return fill


async def _chunks(file: UploadFile) -> AsyncIterator[bytes]:
    while chunk := await file.read(_READ_BYTES):
        yield chunk


@router.post("/init_weights_update_group", openapi_extra=documented(InitWeightsUpdateGroup))
async def init_weights_update_group(request: Request) -> Response:
    """Meet a trainer, which is rank 0, in a process group of torch.distributed."""
    args = await read_body(request, InitWeightsUpdateGroup, any_type=True)

    async def work() -> str:
        place = read_place(
            args.master_address, args.master_port, args.rank_offset, args.world_size, args.backend
        )
        await updates_of(request).groups.join(args.group_name, place)
        return "Succeeded to initialize custom process group."

    return await answer(work())


@router.post("/destroy_weights_update_group", openapi_extra=documented(DestroyWeightsUpdateGroup))
async def destroy_weights_update_group(request: Request) -> Response:
    """Leave the group."""
    args = await read_body(request, DestroyWeightsUpdateGroup, any_type=True)

    async def work() -> str:
        await updates_of(request).groups.leave(args.group_name)
        return "Succeeded to destroy custom process group."

    return await answer(work())


@router.post("/update_weights_from_distributed", openapi_extra=documented(UpdateFromDistributed))
async def update_weights_from_distributed(request: Request) -> Response:
    """Replace tensors by those that the trainer of a group broadcasts."""
    args = await read_body(request, UpdateFromDistributed, any_type=True)

    async def work() -> WeightsOutcome:
        tensors = read_infos(args.names, args.dtypes, args.shapes)
        updates = updates_of(request)
        return await updates.receive(args.group_name, tensors, args.update(""), args.load_format)

    return await answer(work())


@router.post("/begin_weight_update", openapi_extra=documented(BeginWeightUpdate, required=False))
async def begin_weight_update(request: Request) -> Response:
    """Keep the tensors of the calls that follow, until /end_weight_update."""
    args = await read_args(request, BeginWeightUpdate)

    async def work() -> str:
        await updates_of(request).begin(args.selector)
        return "Succeeded to begin a weight update."

    return await answer(work())


@router.post("/end_weight_update", openapi_extra=documented(EndWeightUpdate, required=False))
async def end_weight_update(request: Request) -> Response:
    """Make one update of all tensors since /begin_weight_update."""
    args = await read_args(request, EndWeightUpdate)
    return await answer(updates_of(request).end(args.update(""), args.discard))


@get_and_post_on(router, "/weights_checker", WeightsChecker)
async def weights_checker(request: Request) -> Response:
    """Digests of the weights that are served, or whether they are those of the last snapshot."""
    args = await read_args(request, WeightsChecker)
    try:
        ranks = await updates_of(request).check(args.action, args.skip_tensor_list or ())
    except InvalidRequest as error:
        return json_response({"success": False, "message": str(error), "ranks": []}, 400)
    return json_response({"success": True, "message": f"{args.action} done", "ranks": ranks})
