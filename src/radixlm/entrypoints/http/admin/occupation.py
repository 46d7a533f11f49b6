"""Operator routes that give memory back for a while: SGLang's names and vLLM's."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixlm.entrypoints.http.admin.control import get_and_post_on, read_args
from radixlm.entrypoints.http.errors import json_response
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.state import state_of
from radixlm.entrypoints.http.transport import body_bytes
from radixlm.entrypoints.request_model import Body, read

router = APIRouter(tags=["admin"])


class MemoryTags(Body):
    """``tags``: weights, kv_cache, cuda_graph; all unless given."""

    tags: list[str] | None = None


async def _tags(request: Request) -> list[str] | None:
    """Of a JSON body, or of the query string, where a tag may be given several times."""
    data = await body_bytes(request)
    return read(MemoryTags, data).tags if data else request.query_params.getlist("tags") or None


@get_and_post_on(router, "/release_memory_occupation", MemoryTags)
async def release_memory_occupation(request: Request) -> Response:
    """Give memory back to the system; 400 while requests run, or without --enable-memory-saver."""
    await state_of(request).intake.occupation.release(await _tags(request))
    return json_response(None)


@get_and_post_on(router, "/resume_memory_occupation", MemoryTags)
async def resume_memory_occupation(request: Request) -> Response:
    """Take released memory again; requests that came meanwhile run from now on."""
    await state_of(request).intake.occupation.resume(await _tags(request))
    return json_response(None)


class Sleep(Body):
    """``level`` 0 pauses; 1 gives back weights and KV cache; 2 also leaves the weights to an
    update. ``mode``, of requests under way: abort, wait (for their end), keep (and go on)."""

    level: int = 1
    mode: str = "abort"


@router.post("/sleep", openapi_extra=documented(Sleep, required=False))
async def sleep(request: Request) -> Response:
    """vLLM's name of a release; parameters in the query or in a JSON body."""
    args = await read_args(request, Sleep)
    await state_of(request).intake.occupation.sleep(args.level, args.mode)
    return Response()


@router.post("/wake_up", openapi_extra=documented(MemoryTags, required=False))
async def wake_up(request: Request) -> Response:
    """The end of a sleep, or of parts of it (``tags``)."""
    await state_of(request).intake.occupation.wake_up(await _tags(request))
    return Response()


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> Response:
    """Whether requests wait for /wake_up."""
    return json_response({"is_sleeping": state_of(request).intake.occupation.is_sleeping})
