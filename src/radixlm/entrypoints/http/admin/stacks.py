"""/debug/stacks: where the threads of the server's processes stand."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from radixlm.entrypoints.http.state import state_of
from radixlm.observe.stacks import collect_stacks

router = APIRouter(tags=["admin"])


@router.get("/debug/stacks")
async def debug_stacks(request: Request) -> Response:
    """Python stacks of all threads of the HTTP and engine processes of this machine."""
    folders = state_of(request).intake.run_folders
    return PlainTextResponse(await asyncio.to_thread(collect_stacks, folders))
