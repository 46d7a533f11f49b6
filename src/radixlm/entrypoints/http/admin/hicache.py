"""Operator routes of the hierarchical cache (--enable-hierarchical-cache)."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import Field

from radixlm.base.errors import InvalidRequest
from radixlm.config.option import options
from radixlm.entrypoints.http.admin.control import get_and_post_on
from radixlm.entrypoints.http.errors import json_response
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.state import state_of
from radixlm.entrypoints.http.transport import read_body
from radixlm.entrypoints.request_model import Body

router = APIRouter(tags=["admin"])

Text = Annotated[str, Field(min_length=1, max_length=1 << 16)]
_POLICIES = ("hicache_storage_prefetch_policy", "hicache_write_policy")


class AttachStorage(Body):
    """``hicache_storage_backend_extra_config_json``: a JSON object as text. The two policies are
    those of the flags: others need a restart."""

    hicache_storage_backend: Text
    hicache_storage_backend_extra_config_json: Text | None = None
    hicache_storage_prefetch_policy: Text | None = None
    hicache_write_policy: Text | None = None


async def _ask(request: Request, verb: str, **args: Any) -> Any:
    """What the tiers of the engine answer; InvalidRequest without tiers, or where they refuse."""
    state = state_of(request)
    if not state.config.memory.enable_hierarchical_cache:
        raise InvalidRequest("start the server with --enable-hierarchical-cache")
    return (await state.intake.control("tiers", action=verb, **args)).result()


def _check_idle(request: Request) -> None:
    if state_of(request).intake.requests:
        raise InvalidRequest("requests are running: try again when none is")


@get_and_post_on(router, "/clear_hicache_storage_backend")
async def clear_hicache_storage_backend(request: Request) -> Response:
    """Forget all pages of the storage below the host tier."""
    await _ask(request, "clear", tier="storage")
    return PlainTextResponse("Hierarchical cache storage backend cleared.\n")


@router.post("/hicache/storage-backend/clear")
async def clear_storage(request: Request) -> Response:
    """The same."""
    return await clear_hicache_storage_backend(request)


@router.get("/hicache/storage-backend")
async def storage_backend(request: Request) -> Response:
    """The storage's kind, null if there is none, and figures of each tier."""
    data = await _ask(request, "stats")
    storages = [tier for tier in data["tiers"] if tier["name"] == "storage"]
    memory = state_of(request).config.memory
    policies = {name: getattr(memory, name) for name in _POLICIES}
    kind = storages[0].get("backend") if storages else None
    told = {"is_attached": bool(storages), "hicache_storage_backend": kind}
    return json_response({**told, **policies, **data})


@router.put("/hicache/storage-backend", openapi_extra=documented(AttachStorage))
async def attach_storage(request: Request) -> Response:
    """Put a storage below the host tier, while no request runs."""
    args = await read_body(request, AttachStorage)
    memory = state_of(request).config.memory
    known = options()["hicache_storage_backend"].flag.allowed
    if args.hicache_storage_backend not in known:
        name = args.hicache_storage_backend
        raise InvalidRequest(
            f"hicache_storage_backend: {name!r} is none of {', '.join(map(str, known))}",
            "hicache_storage_backend",
        )
    for name in _POLICIES:
        if getattr(args, name) not in (None, getattr(memory, name)):
            works = f"{name}: {getattr(memory, name)!r} until the server is started again"
            raise InvalidRequest(works, name)
    _check_idle(request)
    data = await _ask(
        request,
        "attach",
        backend=args.hicache_storage_backend,
        extra=args.hicache_storage_backend_extra_config_json,
    )
    return json_response({"status": "ok", **data})


@router.delete("/hicache/storage-backend")
async def detach_storage(request: Request) -> Response:
    """Take the storage away, while no request runs. Its pages stay where they are."""
    _check_idle(request)
    return json_response({"status": "ok", **await _ask(request, "detach")})


@router.get("/get_hicache_l3_cache_layout")
async def cache_layout(request: Request) -> Response:
    """How the bytes of a stored page lie, and under which name."""
    return json_response(await _ask(request, "layout"))
