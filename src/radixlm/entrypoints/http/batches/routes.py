"""The routes of /v1/batches."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.client import run_in
from radixlm.entrypoints.http.batches.files import page, public
from radixlm.entrypoints.http.batches.lines import ENDPOINTS
from radixlm.entrypoints.http.batches.runner import Batches
from radixlm.entrypoints.http.errors import json_response
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.state import state_of
from radixlm.entrypoints.http.transport import read_body
from radixlm.entrypoints.request_model import Body, Metadata

router = APIRouter(tags=["batches"])

MAX_LISTED = 100


class BatchRequest(Body):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: dict[str, Any] | None = None


@router.post("/v1/batches", openapi_extra=documented(BatchRequest))
async def create(request: Request) -> Response:
    """Answer the requests of a file in the background."""
    body = await read_body(request, BatchRequest)
    state = state_of(request)
    if body.endpoint not in ENDPOINTS:
        known = ", ".join(ENDPOINTS)
        raise InvalidRequest(f"endpoint must be one of {known}", "endpoint")
    if body.output_expires_after is not None:
        raise InvalidRequest(
            "output_expires_after: output files are stored until they are deleted",
            "output_expires_after",
        )
    batches = state.extra(Batches)
    record = batches.create(state, body.input_file_id, body.endpoint, body.metadata)
    return json_response(public(record))


@router.get("/v1/batches")
async def list_batches(request: Request, after: str | None = None, limit: int = 20) -> Response:
    """All batches, newest first."""
    batches = state_of(request).extra(Batches)
    records = await run_in(batches.threads, batches.all)
    return json_response(page(records, after, limit, MAX_LISTED))


@router.get("/v1/batches/{batch_id}")
async def retrieve(request: Request, batch_id: str) -> Response:
    """The record of a batch, with its progress."""
    return json_response(public(state_of(request).extra(Batches).record(batch_id)))


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel(request: Request, batch_id: str) -> Response:
    """Cancel a batch; its answers so far are stored."""
    return json_response(public(await state_of(request).extra(Batches).cancel(batch_id)))
