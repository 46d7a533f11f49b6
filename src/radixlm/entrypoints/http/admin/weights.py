"""Routes that change the weights of a running server."""

from __future__ import annotations

import asyncio
import math
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from radixlm.base.errors import InvalidRequest, Overloaded, RadixError
from radixlm.base.record import replace
from radixlm.engine.model_info import find_model
from radixlm.entrypoints.http.errors import json_response
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.state import ServerState, state_of
from radixlm.entrypoints.http.transport import read_body
from radixlm.entrypoints.request_model import Body
from radixlm.hub.locate import Wanted
from radixlm.weight_updates.registry import WeightsOutcome, WeightsUpdate

router = APIRouter(tags=["admin"])

Label = Annotated[str, Field(min_length=1, max_length=1024)]
Mode = Literal["wait", "abort", "retract", "in_place"]


class UpdateOptions(Body):
    """What all updates take. ``mode`` says what happens to running requests: they end before the
    weights change (wait), are aborted (abort), are computed again under the new weights (retract),
    or go on with their KV cache (in_place, also ``is_async``). ``torch_empty_cache`` and
    ``recapture_cuda_graph`` change nothing: freed memory always goes back, and graphs are always
    recorded again. ``token_step`` is told by /get_server_info."""

    weight_version: Label | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True
    is_async: bool = False
    keep_pause: bool = False
    torch_empty_cache: bool = False
    token_step: Annotated[int, Field(ge=0)] | None = None
    mode: Mode | None = None

    @property
    def chosen_mode(self) -> str:
        """``mode``, else what the reference's fields mean."""
        if self.mode is not None:
            return self.mode
        return "abort" if self.abort_all_requests else "in_place" if self.is_async else "wait"

    def update(
        self, folder: str, load_format: str | None = None, is_partial: bool = False
    ) -> WeightsUpdate:
        """The update to the files of ``folder``."""
        return WeightsUpdate(
            folder,
            load_format,
            is_partial,
            self.weight_version,
            self.chosen_mode,
            self.flush_cache,
            self.keep_pause,
            token_step=self.token_step,
        )


class UpdateFromDisk(UpdateOptions):
    """``model_path``: a folder with a checkpoint of the model that is served."""

    model_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_format: Annotated[str, Field(max_length=64)] | None = None
    recapture_cuda_graph: bool = False


@router.post("/update_weights_from_disk", openapi_extra=documented(UpdateFromDisk))
async def update_weights_from_disk(request: Request) -> Response:
    """Serve the weights of another checkpoint of the same model from now on."""
    args = await read_body(request, UpdateFromDisk, any_type=True)
    model = state_of(request).config.model
    wanted = Wanted(flag="model_path", folder=model.download_dir, is_newest=True)
    try:
        folder = await asyncio.to_thread(find_model, args.model_path, wanted)
    except (RadixError, OSError) as error:  # of the file system: a name that is too long
        message = str(error).replace("--model-path", "model_path")
        return answer_update(WeightsOutcome(False, message))
    state = state_of(request)
    update = args.update(str(folder.resolve()), args.load_format)
    outcome = await run_update(state, replace(update, model_path=args.model_path))
    return answer_update(outcome)


async def run_update(state: ServerState, update: WeightsUpdate) -> WeightsOutcome:
    """Make the update; what cannot be asked becomes an outcome, too."""
    try:
        return await state.intake.weights.update(update)
    except InvalidRequest as error:
        return WeightsOutcome(False, str(error))


def answer_update(outcome: WeightsOutcome) -> Response:
    """The reference's answer to an update: 400 if it failed, 503 if another try may succeed."""
    body = {
        "success": outcome.is_ok,
        "message": outcome.message,
        "num_paused_requests": outcome.num_paused,
    }
    if outcome.retry_after_s is not None:
        again = {"Retry-After": str(math.ceil(outcome.retry_after_s))}
        return json_response(body, Overloaded.status, again)
    return json_response(body, 200 if outcome.is_ok else 400)
