"""What an operator may ask of a running server (NH-06, 08, 13, 16, 23..26, 29..31, 35, 39)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import Field, ValidationError

from radixlm.base.errors import InvalidRequest
from radixlm.base.log import set_level
from radixlm.config.observe import LOG_LEVELS
from radixlm.entrypoints.http.body import read_body
from radixlm.entrypoints.http.errors import json_response
from radixlm.entrypoints.http.requestlog import RequestLog
from radixlm.entrypoints.http.schema import Body, Int, Ints, M, Objects, Rid, documented, read
from radixlm.entrypoints.http.state import ServerState, state_of
from radixlm.observe.requestlog import LEVELS

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
    start_step: Annotated[Int, Field(ge=0)] | None = None
    num_steps: Annotated[Int, Field(ge=1)] | None = None
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
    truncate_size: Annotated[Int, Field(ge=0, le=1 << 20)] = 100


class WeightVersion(Body):
    new_version: Annotated[str, Field(min_length=1, max_length=1024)]
    abort_all_requests: bool = True


class InternalState(Body):
    server_args: dict[str, Any]


class ConfigureLogging(Body):
    log_requests: bool | None = None
    log_requests_level: Int | None = None
    log_level: str | None = None
    dump_requests_folder: str | None = None
    dump_requests_threshold: Int | None = None
    crash_dump_folder: str | None = None
    log_requests_format: str | None = None


class OpenSession(Body):
    """``capacity_of_str_len``: most tokens that the session may hold; 0 is no limit."""

    capacity_of_str_len: Annotated[Int, Field(ge=0)] = 0
    session_id: Rid | None = None
    timeout: Annotated[float, Field(ge=0, le=1e9)] | None = None
    streaming: bool | None = None


class CloseSession(Body):
    session_id: str


class Tokenize(Body):
    """``prompt``, a list of prompts, or ``messages`` of a chat."""

    prompt: str | list[str] | None = None
    messages: Objects | None = None
    tools: Objects | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    model: str | None = None


class Detokenize(Body):
    tokens: Ints | list[Ints]
    skip_special_tokens: bool = True
    model: str | None = None


async def read_args(request: Request, model: type[M]) -> M:
    """Arguments in a JSON body, or in the query where there is none."""
    data = await request.body()
    if data:
        return read(model, data)
    try:
        return model.model_validate_strings(dict(request.query_params), strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else "query"
        raise InvalidRequest(f"{name}: {first['msg']}", param=name) from None


def _both(path: str, model: type[Body] | None = None) -> Callable[[Handler], Handler]:
    """GET and POST on one path; the POST is described in the document."""

    def add(handler: Handler) -> Handler:
        extra = documented(model, required=False) if model else None
        router.add_api_route(path, handler, methods=["GET"], response_class=Response)
        router.add_api_route(
            path,
            handler,
            methods=["POST"],
            openapi_extra=extra,
            response_class=Response,
            operation_id=f"post{path.replace('/', '_')}",
        )
        return handler

    return add


@_both("/flush_cache", FlushCache)
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


@router.post("/pause_generation", openapi_extra=documented(PauseGeneration, required=False))
async def pause_generation(request: Request) -> Response:
    """Stop computing: what runs is aborted, retracted or kept in place."""
    args = await read_args(request, PauseGeneration)
    if args.mode not in PAUSE_MODES:
        raise InvalidRequest(f"mode must be one of {', '.join(PAUSE_MODES)}", "mode")
    intake = state_of(request).intake
    reply = await intake.control("pause", mode=args.mode)
    intake.is_paused = reply.ok or intake.is_paused
    return _status(reply.message, reply.ok)


@router.post("/continue_generation")
async def continue_generation(request: Request) -> Response:
    """Go on after a pause."""
    intake = state_of(request).intake
    reply = await intake.control("continue")
    intake.is_paused = intake.is_paused and not reply.ok
    return _status(reply.message, reply.ok)


def _status(message: str, is_ok: bool) -> Response:
    body = {"message": message, "status": "ok" if is_ok else "error"}
    return json_response(body, 200 if is_ok else 400)


@_both("/slow_down", SlowDown)
async def slow_down(request: Request) -> Response:
    """Sleep after each step: a test aid."""
    args = await read_args(request, SlowDown)
    seconds = args.forward_sleep_time or 0.0
    await state_of(request).intake.control("slow_down", forward_sleep_time=seconds)
    return json_response(None)


@_both("/freeze_gc")
async def freeze_gc(request: Request) -> Response:
    """Take what is alive out of the garbage collector's sight."""
    await state_of(request).intake.control("freeze_gc")
    return PlainTextResponse("Garbage collection frozen.\n")


@_both("/start_profile", StartProfile)
async def start_profile(request: Request) -> Response:
    """Trace steps of the engine into ``output_dir`` (else RADIXLM_PROFILER_DIR)."""
    args = await read_args(request, StartProfile)
    reply = await state_of(request).intake.control("start_profile", **args.model_dump())
    if not reply.ok:
        raise InvalidRequest(reply.message)
    return PlainTextResponse("Start profiling.\n")


@_both("/stop_profile")
async def stop_profile(request: Request) -> Response:
    """End the trace and write it, which may take a while."""
    reply = await state_of(request).intake.control("stop_profile")
    if not reply.ok:
        raise InvalidRequest(reply.message)
    return PlainTextResponse("Stop profiling. This will take some time.\n")


@_both("/get_weights_by_name", WeightsByName)
async def get_weights_by_name(request: Request) -> Response:
    """The first values of a weight."""
    args = await read_args(request, WeightsByName)
    reply = await state_of(request).intake.control(
        "weights_by_name", name=args.name, truncate_size=args.truncate_size
    )
    if not reply.ok:
        raise InvalidRequest(reply.message, "name")
    return json_response(reply.data)


@router.post("/update_weight_version", openapi_extra=documented(WeightVersion))
async def update_weight_version(request: Request) -> Response:
    """Change the label that every answer carries."""
    args = await read_body(request, WeightVersion, any_type=True)
    state = state_of(request)
    if args.abort_all_requests:
        state.intake.abort_all("the weight version changed")
    state.weight_version = args.new_version
    message = f"Weight version updated to {args.new_version}"
    return json_response({"success": True, "message": message, "new_version": args.new_version})


async def _set_state(request: Request) -> Response:
    """Change options that may change while the server runs."""
    args = await read_body(request, InternalState, any_type=True)
    state = state_of(request)
    unknown = set(args.server_args) - {"log_requests", "log_requests_level"}
    if unknown:
        name = sorted(unknown)[0]
        raise InvalidRequest(
            f"server_args.{name:.80} cannot change while the server runs; what can: "
            "log_requests, log_requests_level",
            param=f"server_args.{name:.80}",
        )
    _set_request_log(state, args.server_args)
    return json_response({"updated": True, "server_args": _log_state(state)})


for _method in ("POST", "PUT"):
    router.add_api_route(
        "/set_internal_state",
        _set_state,
        methods=[_method],
        openapi_extra=documented(InternalState),
        operation_id=f"{_method.lower()}_set_internal_state",
        response_class=Response,
    )


@_both("/configure_logging", ConfigureLogging)
async def configure_logging(request: Request) -> Response:
    """What is logged of requests, and from which level on."""
    args = await read_args(request, ConfigureLogging)
    for name in ("dump_requests_folder", "crash_dump_folder", "log_requests_format"):
        if getattr(args, name):
            raise InvalidRequest(
                f"{name} cannot change while the server runs: start with --crash-dump-folder", name
            )
    if args.log_level is not None:
        if args.log_level not in LOG_LEVELS:
            raise InvalidRequest(f"log_level must be one of {', '.join(LOG_LEVELS)}", "log_level")
        set_level(args.log_level)
    state = state_of(request)
    _set_request_log(state, args.model_dump(exclude_none=True))
    return json_response(_log_state(state))


def _set_request_log(state: ServerState, values: dict[str, Any]) -> None:
    found = state.extra(RequestLog)
    is_on, level = values.get("log_requests"), values.get("log_requests_level")
    if is_on is not None and not isinstance(is_on, bool):
        raise InvalidRequest("log_requests must be true or false", "log_requests")
    if level is not None and (isinstance(level, bool) or level not in LEVELS):
        raise InvalidRequest("log_requests_level must be 0, 1, 2 or 3", "log_requests_level")
    found.is_on = found.is_on if is_on is None else is_on
    found.level = found.level if level is None else level


def _log_state(state: ServerState) -> dict[str, Any]:
    found = state.extra(RequestLog)
    return {"log_requests": found.is_on, "log_requests_level": found.level}


def install_request_log(state: ServerState) -> None:
    """Listen to requests; what is logged may be changed while the server runs."""
    observe = state.config.observe
    made = RequestLog(state.tokenizer, observe.log_requests, observe.log_requests_level)
    state.extras[RequestLog] = made
    state.intake.observers = (*state.intake.observers, made)


@_both("/open_session", OpenSession)
async def open_session(request: Request) -> Response:
    """A new session's id."""
    args = await read_args(request, OpenSession)
    if args.streaming:
        raise InvalidRequest("streaming: streaming sessions are not built", "streaming")
    if state_of(request).config.serve.tokenizer_worker_num > 1:
        raise InvalidRequest("sessions live in one process: leave --tokenizer-worker-num at 1")
    sessions = state_of(request).sessions
    name = sessions.open(args.capacity_of_str_len, args.session_id, args.timeout or 0.0)
    return json_response(name)


@_both("/close_session", CloseSession)
async def close_session(request: Request) -> Response:
    """Forget a session."""
    args = await read_args(request, CloseSession)
    state_of(request).sessions.close(args.session_id)
    return Response()


@router.post("/v1/tokenize", openapi_extra=documented(Tokenize))
@router.post("/tokenize", openapi_extra=documented(Tokenize))
async def tokenize(request: Request) -> Response:
    """Token ids of a text, of several, or of the prompt that messages make."""
    args = await read_body(request, Tokenize, any_type=True)
    state = state_of(request)
    state.check_model(args.model)
    tokenizer = state.require_tokenizer()
    if (args.prompt is None) == (args.messages is None):
        raise InvalidRequest("exactly one of prompt and messages must be given", "prompt")
    if args.messages is not None:
        template = state.require_template()
        prompt: str | list[str] = template.render(
            args.messages,
            tools=args.tools,
            add_generation_prompt=args.add_generation_prompt,
            template_kwargs=args.chat_template_kwargs,
        )
        adds = template.adds_special_tokens
    else:
        assert args.prompt is not None
        prompt, adds = args.prompt, True
    adds = adds if args.add_special_tokens is None else args.add_special_tokens
    length = state.intake.facts.context_len
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, adds)
        body: dict[str, Any] = {"tokens": ids, "count": len(ids)}
    else:
        rows = tokenizer.encode_batch(prompt, adds)
        body = {"tokens": rows, "count": [len(row) for row in rows]}
    return json_response(body | {"max_model_len": length})


@router.post("/v1/detokenize", openapi_extra=documented(Detokenize))
@router.post("/detokenize", openapi_extra=documented(Detokenize))
async def detokenize(request: Request) -> Response:
    """The text of token ids, or of several lists of them."""
    args = await read_body(request, Detokenize, any_type=True)
    state = state_of(request)
    state.check_model(args.model)
    tokenizer = state.require_tokenizer()
    is_nested = bool(args.tokens) and isinstance(args.tokens[0], list)
    rows: Any = args.tokens if is_nested else [args.tokens]
    for row in rows:
        bad = next((i for i in row if not 0 <= i < state.intake.facts.vocab), None)
        if bad is not None:
            raise InvalidRequest(f"tokens: {bad} is not a token id", "tokens")
    texts = [tokenizer.decode(row, args.skip_special_tokens) for row in rows]
    return json_response({"text": texts if is_nested else texts[0]})
