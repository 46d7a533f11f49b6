"""POST /dump_requests, and the recorder behind it and behind --crash-dump-folder."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixlm.base.errors import InvalidRequest
from radixlm.engine.crash_dump import Recorder
from radixlm.entrypoints.http.diskfull import DiskFull
from radixlm.entrypoints.http.errors import json_response
from radixlm.entrypoints.http.state import ServerState, state_of

router = APIRouter(tags=["admin"])


def install(state: ServerState) -> None:
    """Record from now on, if the server was started with a folder to write to."""
    folder = state.config.observe.crash_dump_folder
    if folder is None:
        return
    intake = state.intake
    recorder = Recorder(Path(folder), state.config, lambda: intake.requests.values())
    state.extras[Recorder] = recorder
    intake.observers = (*intake.observers, recorder)


@router.post("/dump_requests")
async def dump_requests(request: Request) -> Response:
    """Write the requests of the last five minutes to the folder of --crash-dump-folder."""
    recorder = state_of(request).extras.get(Recorder)
    if recorder is None:
        raise InvalidRequest("requests are not recorded: start with --crash-dump-folder FOLDER")
    try:
        entries = recorder.entries()
        path = await asyncio.to_thread(recorder.write, "asked for", entries)
    except OSError as error:
        message = f"the requests cannot be written: {error.strerror or error}"
        raise DiskFull(message) from error
    return json_response({"path": str(path), "num_requests": len(entries)})
