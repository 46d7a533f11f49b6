"""Life (/health), readiness (/ready) and a token through the model (/health_generate)."""

import asyncio
import contextlib
import secrets
import time
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from radixlm.base.env import HEALTH_CHECK_TIMEOUT_S, HEALTH_GENERATES
from radixlm.base.errors import RequestError
from radixlm.engine.intake import ServerIntake
from radixlm.entrypoints.http.errors import error_body, json_response
from radixlm.entrypoints.http.state import state_of
from radixlm.intake.records import GenerateRequest
from radixlm.wire.requests import PoolingParams
from radixlm.wire.sampling_params import SamplingParams

router = APIRouter(tags=["health"])

RETRY_AFTER_S = 1
PROBE_PREFIX = "HEALTH_CHECK_"
MAX_WAIT_S = 60.0
_POLL_S = 0.02
WARMS_UP = "the server runs its warm-ups: the model has not answered yet"


@router.get("/health")
async def health(request: Request) -> Response:
    """200 from the first answer of the model on, also while an engine restarts; 503 before that,
    and when the server shuts down or has failed."""
    state = state_of(request)
    intake = state.intake
    if intake.failure is not None or not intake.is_accepting:
        return _unavailable("the server is shutting down")
    if not intake.engine_facts:
        return _unavailable("the engine is starting")
    if not state.is_warm:
        return _unavailable(WARMS_UP)
    if HEALTH_GENERATES.get():
        return await health_generate(request)
    return _alive(intake)


def _alive(intake: ServerIntake) -> Response:
    """200, which says what memory is released: no token comes then, and nothing is wrong."""
    released = intake.occupation.released
    return json_response({"status": "released", "released": released}) if released else Response()


# load balancers send HEAD
router.add_api_route("/health", health, methods=["HEAD"], include_in_schema=False)


@router.get("/v1/health", include_in_schema=False)
@router.get("/ping")
async def ping(request: Request) -> Response:
    """As /health."""
    return await health(request)


@router.get("/ready")
async def ready(
    request: Request, wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0
) -> Response:
    """200 when a request sent now is served now; else 503 and the reason. ``wait_s``: a 200 comes
    so much later, or a 503 when the server begins to shut down."""
    state = state_of(request)
    if wait_s and why_not_ready(state.intake) is None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(state.intake.leaving.wait(), wait_s)
    reason = why_not_ready(state.intake)
    if reason is None and not state.is_warm:
        reason = WARMS_UP
    is_leaving = state.intake.failure is None and not state.intake.is_accepting
    code = "draining" if is_leaving else "overloaded"
    return _unavailable(reason, code) if reason else Response()


router.add_api_route("/ready", ready, methods=["HEAD"], include_in_schema=False)


@router.get("/health_generate")
async def health_generate(request: Request) -> Response:
    """200 when a token comes, of this probe or of any request, within the time limit; at once while
    memory is released."""
    intake = state_of(request).intake
    if intake.ready.is_set() and intake.occupation.released:
        return _alive(intake)
    reason = why_not_ready(intake)
    if reason:
        return _unavailable(reason)
    limit_s = HEALTH_CHECK_TIMEOUT_S.get()
    if await probe(intake, limit_s):
        return Response()
    return _unavailable(f"no token came within {limit_s:g} s")


def why_not_ready(intake: ServerIntake) -> str | None:
    """Why a request cannot be served now; None if it can."""
    if intake.failure is not None:
        return "the engine has failed"
    if not intake.is_accepting:
        return "the server is shutting down"
    if not intake.ready.is_set():
        return "the engine is starting"
    if intake.is_paused:
        return "generation is paused"
    if released := intake.occupation.released:
        how = "an update of the weights brings them back"
        if not intake.occupation.awaits_update:
            how = "/resume_memory_occupation takes it back"
        return f"memory is released: {', '.join(released)}; {how}"
    return None


async def probe(intake: ServerIntake, limit_s: float) -> bool:
    """Send one token through the model; True as soon as any token has come."""
    began_s = time.monotonic()
    generates = intake.facts.is_generation
    request = GenerateRequest(
        sampling=SamplingParams(max_new_tokens=int(generates), temperature=0.0, ignore_eos=True),
        input_ids=[0],
        pooling=None if generates else PoolingParams(),
        rid=PROBE_PREFIX + secrets.token_hex(8),
    )
    task = asyncio.ensure_future(intake.collect(request))
    try:
        while time.monotonic() - began_s < limit_s:
            await asyncio.wait({task}, timeout=_POLL_S)
            if task.done():
                finish = task.result()[0].finish
                return finish is not None and finish.kind in ("stop", "length")
            if intake.token_s > began_s:
                return True
        return False
    except RequestError:
        return False
    finally:
        task.cancel()


def _unavailable(reason: str, code: str = "overloaded") -> Response:
    body = error_body(reason, 503, code=code)
    return json_response(body, 503, {"Retry-After": str(RETRY_AFTER_S)})
