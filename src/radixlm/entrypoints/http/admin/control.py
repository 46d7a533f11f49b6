"""Operator routes of a running server: cache, pause, profile, weights and sessions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import Field, ValidationError

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.errors import json_response
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.state import state_of
from radixlm.entrypoints.http.transport import body_bytes, read_body
from radixlm.entrypoints.request_model import Body, M, Rid, read
from radixlm.observe.tracing import Tracer

router = APIRouter(tags=["admin"])

Handler = Callable[[Request], Awaitable[Response]]
PAUSE_MODES = ("abort", "retract", "in_place")
MAX_SLEEP_S = 60.0
IDLE_POLL_S = 0.02


class FlushCache(Body):
    timeout: Annotated[float, Field(ge=0, le=3600)] = 0.0


class PauseGeneration(Body):
    mode: str = "abort"
    torch_empty_cache: bool = False


class SlowDown(Body):
    forward_sleep_time: Annotated[float, Field(ge=0, le=MAX_SLEEP_S)] | None = None


class StartProfile(Body):
    """``activities``: CPU, GPU, MEM, CUDA_PROFILER. Without ``num_steps`` until it is stopped."""

    output_dir: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    start_step: Annotated[int, Field(ge=0)] | None = None
    num_steps: Annotated[int, Field(ge=1)] | None = None
    activities: list[str] | None = None
    with_stack: bool | None = None
    record_shapes: bool | None = None
    profile_by_stage: bool = False
    profile_stages: list[str] | None = None
    profile_id: Annotated[str, Field(max_length=200)] | None = None
    profile_prefix: Annotated[str, Field(max_length=200)] | None = None
    merge_profiles: bool = False


class WeightsByName(Body):
    name: str
    truncate_size: Annotated[int, Field(ge=0, le=1 << 20)] = 100


class WeightVersion(Body):
    new_version: Annotated[str, Field(min_length=1, max_length=1024)]
    abort_all_requests: bool = True


class TraceLevel(Body):
    """``level``: 0 for none."""

    level: Annotated[int, Field(ge=0)]


class OpenSession(Body):
    """``capacity_of_str_len``: the maximum number of tokens of the session; 0 is no limit.
    ``streaming``: each request goes on from the last that ended well. All sessions together may
    hold 16,777,216 tokens; then the oldest idle ones are forgotten."""

    capacity_of_str_len: Annotated[int, Field(ge=0)] = 0
    session_id: Rid | None = None
    timeout: Annotated[float, Field(ge=0, le=1e9)] | None = None
    streaming: bool | None = None


class CloseSession(Body):
    session_id: str


async def read_args(request: Request, model: type[M]) -> M:
    """Arguments from a JSON body, or from the query string without a body."""
    data = await body_bytes(request)
    if data:
        return read(model, data)
    try:
        return model.model_validate_strings(dict(request.query_params), strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else "query"
        raise InvalidRequest(f"{name}: {first['msg']}", param=name) from None


def get_and_post(path: str, model: type[Body] | None = None) -> Callable[[Handler], Handler]:
    """As ``get_and_post_on``, of this file's routes."""
    return get_and_post_on(router, path, model)


def get_and_post_on(
    routes: APIRouter, path: str, model: type[Body] | None = None
) -> Callable[[Handler], Handler]:
    """Decorator: a route with GET and POST, of which POST is in the OpenAPI document."""

    def add(handler: Handler) -> Handler:
        extra = documented(model, required=False) if model else None
        routes.add_api_route(path, handler, methods=["GET"], response_class=Response)
        routes.add_api_route(
            path,
            handler,
            methods=["POST"],
            openapi_extra=extra,
            response_class=Response,
            operation_id=f"post{path.replace('/', '_')}",
        )
        return handler

    return add


@router.post("/reset_prefix_cache")  # as vLLM calls it
@get_and_post("/flush_cache", FlushCache)
async def flush_cache(request: Request) -> Response:
    """Empty the prefix cache; 400 while requests run (after ``timeout`` seconds of waiting)."""
    args = await read_args(request, FlushCache)
    intake = state_of(request).intake
    until_s = time.monotonic() + args.timeout
    while intake.requests and time.monotonic() < until_s:
        await asyncio.sleep(IDLE_POLL_S)
    reply = await intake.control("flush_cache")
    text = f"{reply.message}\nPlease check backend logs for more details.\n"
    return PlainTextResponse(text, 200 if reply.ok else 400)


@router.post("/kv_snapshot")
async def kv_snapshot(request: Request) -> Response:
    """Publish the whole prefix cache as KV events, for a subscriber that has missed some."""
    replies = await state_of(request).intake.control_each("kv_snapshot")
    return json_response({"success": all(reply.ok for reply in replies)})


@router.post("/pause_generation", openapi_extra=documented(PauseGeneration, required=False))
async def pause_generation(request: Request) -> Response:
    """Pause: running requests are aborted, retracted or kept in place."""
    args = await read_args(request, PauseGeneration)
    if args.mode not in PAUSE_MODES:
        raise InvalidRequest(f"mode must be one of {', '.join(PAUSE_MODES)}", "mode")
    reply = await state_of(request).intake.occupation.pause(args.mode)
    return _status(reply.message, reply.ok)


@router.post("/continue_generation")
async def continue_generation(request: Request) -> Response:
    """Continue after a pause."""
    reply = await state_of(request).intake.occupation.go_on()
    return _status(reply.message, reply.ok)


def _status(message: str, is_ok: bool) -> Response:
    body = {"message": message, "status": "ok" if is_ok else "error"}
    return json_response(body, 200 if is_ok else 400)


@get_and_post("/slow_down", SlowDown)
async def slow_down(request: Request) -> Response:
    """Sleep after each step, for tests."""
    args = await read_args(request, SlowDown)
    seconds = args.forward_sleep_time or 0.0
    await state_of(request).intake.control("slow_down", forward_sleep_time=seconds)
    return json_response(None)


@get_and_post("/freeze_gc")
async def freeze_gc(request: Request) -> Response:
    """Exclude all current objects from garbage collection (gc.freeze)."""
    await state_of(request).intake.control("freeze_gc")
    return PlainTextResponse("Garbage collection frozen.\n")


@get_and_post("/set_trace_level", TraceLevel)
async def set_trace_level(request: Request) -> Response:
    """Begin no more traces (--enable-trace) at ``level`` 0, and again at any other."""
    args = await read_args(request, TraceLevel)
    tracer = state_of(request).extras.get(Tracer)
    if tracer is None:
        raise InvalidRequest("level: nothing is traced; start with --enable-trace", "level")
    tracer.level = args.level
    return PlainTextResponse("success")


@get_and_post("/start_profile", StartProfile)
async def start_profile(request: Request) -> Response:
    """Trace steps of the engine into ``output_dir``, a folder in RADIXLM_PROFILER_DIR."""
    args = await read_args(request, StartProfile)
    (await state_of(request).intake.control("start_profile", **args.model_dump())).result()
    return PlainTextResponse("Start profiling.\n")


@get_and_post("/stop_profile")
async def stop_profile(request: Request) -> Response:
    """End the trace and write it."""
    (await state_of(request).intake.control("stop_profile")).result()
    return PlainTextResponse("Stop profiling. This will take some time.\n")


@get_and_post("/get_weights_by_name", WeightsByName)
async def get_weights_by_name(request: Request) -> Response:
    """The first values of a weight."""
    args = await read_args(request, WeightsByName)
    reply = await state_of(request).intake.control(
        "weights_by_name", name=args.name, truncate_size=args.truncate_size
    )
    return json_response(reply.result("name"))


@router.post("/update_weight_version", openapi_extra=documented(WeightVersion))
async def update_weight_version(request: Request) -> Response:
    """Change the label that every answer carries."""
    args = await read_body(request, WeightVersion, any_type=True)
    state = state_of(request)
    if state.config.serve.tokenizer_worker_num > 1:
        raise InvalidRequest("update_weight_version: leave --tokenizer-worker-num at 1")
    if args.abort_all_requests:
        state.intake.abort_all("the weight version changed")
    state.intake.weights.relabel(args.new_version)
    message = f"Weight version updated to {args.new_version}"
    return json_response({"success": True, "message": message, "new_version": args.new_version})


@get_and_post("/open_session", OpenSession)
async def open_session(request: Request) -> Response:
    """Open a session; returns its id."""
    args = await read_args(request, OpenSession)
    if state_of(request).config.serve.tokenizer_worker_num > 1:
        raise InvalidRequest("sessions live in one process: leave --tokenizer-worker-num at 1")
    sessions = state_of(request).sessions
    timeout_s, streaming = args.timeout or 0.0, bool(args.streaming)
    name = sessions.open(args.capacity_of_str_len, args.session_id, timeout_s, streaming)
    return json_response(name)


@get_and_post("/close_session", CloseSession)
async def close_session(request: Request) -> Response:
    """Close a session; one that is not open is no error."""
    args = await read_args(request, CloseSession)
    state_of(request).sessions.close(args.session_id)
    return Response()
