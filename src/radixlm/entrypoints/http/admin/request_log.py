"""Recording requests: --log-requests, --crash-dump-folder, and their routes."""

import asyncio
import errno
import fcntl
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixlm.base import env
from radixlm.base.errors import ConfigError, InvalidRequest, reason
from radixlm.base.log import set_level
from radixlm.config.observe import LOG_LEVELS
from radixlm.engine.crash_dump import Recorder
from radixlm.entrypoints.http.admin.control import get_and_post, read_args
from radixlm.entrypoints.http.admin.health import PROBE_PREFIX
from radixlm.entrypoints.http.errors import DiskFull, disk_fault, json_response
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.state import ServerState, state_of
from radixlm.entrypoints.http.transport import read_body
from radixlm.entrypoints.native.response import finish_reason
from radixlm.entrypoints.request_model import Body
from radixlm.intake.call import current_call
from radixlm.intake.observer import Observer
from radixlm.intake.request_state import RequestState
from radixlm.observe.requestlog import FORMATS, LEVELS, RequestLines, time_stats
from radixlm.text.tokenizer import Tokenizer
from radixlm.wire.replies import Finish

log = logging.getLogger(__name__)
router = APIRouter(tags=["admin"])

SAMPLING_LEVEL, TEXT_LEVEL = 1, 2


class InternalState(Body):
    server_args: dict[str, Any]


class ConfigureLogging(Body):
    log_requests: bool | None = None
    log_requests_level: int | None = None
    log_level: str | None = None
    dump_requests_folder: str | None = None
    dump_requests_threshold: int | None = None
    crash_dump_folder: str | None = None
    log_requests_format: str | None = None


class RequestLog(Observer):
    """Logs requests as they come and end while ``is_on``; ``level`` says how much of them."""

    def __init__(
        self, tokenizer: Tokenizer | None, is_on: bool, level: int, lines: RequestLines
    ) -> None:
        self._tokenizer, self.is_on, self.level, self.lines = tokenizer, is_on, level, lines
        self._names = ("x-smg-routing-key", *map(str.lower, env.LOG_REQUEST_HEADERS.get()))
        self._least_ms = env.LOG_REQUEST_EXCEEDED_MS.get()
        self._headers_of: dict[str, dict[str, str]] = {}  # by request

    @property
    def _is_whole(self) -> bool:
        return self.level > TEXT_LEVEL

    def body(self, body: Body) -> None:
        """A body of an OpenAI route has come."""
        if self.is_on and self.level >= TEXT_LEVEL:
            values = body.model_dump(exclude_none=True, exclude_unset=True)
            self.lines.received_body(values, self._headers(), self._is_whole)

    def submitted(self, state: RequestState) -> None:
        if not self.is_on:
            return
        if headers := self._headers():
            self._headers_of[state.rid] = headers
        self.lines.received(_kind(state), self._fields(state), headers, self._is_whole)

    def ended(self, state: RequestState, finish: Finish) -> None:
        headers = self._headers_of.pop(state.rid, {})
        seconds = state.finished_s - state.arrival_s
        if not self.is_on or 1e3 * seconds < self._least_ms:
            return
        out = self._shown("text", state.output_ids)
        if out and state.output_ids:
            out["output_ids"] = list(state.output_ids)
        out["meta_info"] = meta_info(state, finish)
        self.lines.finished(_kind(state), self._fields(state), headers, out, self._is_whole)

    def _fields(self, state: RequestState) -> dict[str, Any]:
        """Of the request, as much of it as the level shows."""
        wire = state.wire
        fields = {"rid": state.rid, **self._shown("text", wire.ids()[: wire.prompt_len].tolist())}
        if self.level >= SAMPLING_LEVEL:
            fields["sampling_params"] = msgspec.to_builtins(wire.sampling)
        if wire.adapter is not None and self.level >= TEXT_LEVEL:
            fields["lora_path"] = wire.adapter.name
        return fields | {"return_logprob": wire.logprobs is not None, "stream": wire.stream}

    def _shown(self, name: str, ids: list[int]) -> dict[str, Any]:
        """The text if the level shows it; decoding a long prompt takes time."""
        if self._tokenizer is None or self.level < TEXT_LEVEL:
            return {}
        return {name: self._tokenizer.decode(ids, skip_special_tokens=False)}

    def _headers(self) -> dict[str, str]:
        """Those of the running call that are logged."""
        call = current_call()
        found = call.headers if call is not None else {}
        return {n: found[n.encode()].decode("latin-1") for n in self._names if n.encode() in found}


def meta_info(state: RequestState, finish: Finish) -> dict[str, Any]:
    """What is told of a request that has ended: counts of tokens, and times in seconds."""
    end, adapter = state.pending, state.wire.adapter
    return {
        "id": state.rid,
        "finish_reason": finish_reason(finish, len(state.output_ids)),
        **({"lora_name": adapter.name, "lora_digest": adapter.digest[:8]} if adapter else {}),
        "prompt_tokens": state.prompt_tokens,
        "cached_tokens": end.cached_tokens if end else 0,
        "completion_tokens": len(state.output_ids),
        "time_to_first_token": round(max(state.first_token_s - state.arrival_s, 0.0), 6),
        "e2e_latency": round(state.finished_s - state.arrival_s, 6),
    }


def _kind(state: RequestState) -> str:
    """The class of the request in SGLang."""
    return "GenerateReqInput" if state.wire.pooling is None else "EmbeddingReqInput"


class TimeStatsLog(Observer):
    """Logs how long requests waited and were computed (--enable-request-time-stats-logging)."""

    def __init__(self, role: str) -> None:
        self._role = role

    def ended(self, state: RequestState, finish: Finish) -> None:
        total_s = max(0.0, state.finished_s - state.arrival_s)
        queue_s = min(state.last_delta.queue_time_s, total_s)
        spans_s = {"queue_duration": queue_s, "forward_duration": total_s - queue_s}
        if state.first_token_s:
            spans_s["first_token"] = state.first_token_s - state.arrival_s
        lengths = (state.prompt_tokens, len(state.output_ids))
        start_time = time.time() - (time.monotonic() - state.arrival_s)
        time_stats(state.rid, self._role, lengths, spans_s, start_time)


class RequestMetricsFiles(Observer):
    """Appends a line for each request that ends to a file an hour (--export-metrics-to-file): its
    parameters without texts, counts and times, as SGLang. ConfigError without a folder that can be
    written. A disk that is full or fails is told once."""

    def __init__(self, folder: str | None) -> None:
        if folder is None:
            raise ConfigError("--export-metrics-to-file needs --export-metrics-to-file-dir")
        self._folder = Path(folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--export-metrics-to-file-dir {folder}: {error}") from None
        self._fails = False  # until a line is written again

    def ended(self, state: RequestState, finish: Finish) -> None:
        if state.rid.startswith(PROBE_PREFIX):
            return
        wire = state.wire
        parameters = {
            "rid": state.rid,
            "sampling_params": msgspec.to_builtins(wire.sampling),
            "return_logprob": wire.logprobs is not None,
            "stream": wire.stream,
        }
        record = {"request_parameters": json.dumps(parameters), **meta_info(state, finish)}
        name = time.strftime("sglang-request-metrics-%Y%m%d_%H.log")
        try:
            _append(self._folder / name, json.dumps(record).encode() + b"\n")
            self._fails = False
        except OSError as error:
            if not self._fails:
                told = "--export-metrics-to-file-dir %s: metrics of requests are lost: %s"
                log.warning(told, self._folder, reason(error))
            self._fails = True


def _append(path: Path, line: bytes) -> None:
    """Append a line whole or not at all, beside other processes. OSError."""
    with path.open("ab", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        end = file.seek(0, os.SEEK_END)
        if file.write(line) < len(line):
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def install_request_log(state: ServerState) -> None:
    """Observe requests; routes may change what is logged."""
    observe = state.config.observe
    lines = RequestLines(observe.log_requests_target or (), observe.log_requests_format)
    is_on, level = observe.log_requests, observe.log_requests_level
    request_log = RequestLog(state.tokenizer, is_on, level, lines)
    state.extras[RequestLog] = request_log
    state.on_body = request_log.body
    state.intake.observers = (*state.intake.observers, request_log)
    if observe.enable_request_time_stats_logging:
        mode = state.config.disagg.disaggregation_mode
        role = "unified" if mode == "null" else mode
        state.intake.observers = (*state.intake.observers, TimeStatsLog(role))
    if observe.export_metrics_to_file:
        files = RequestMetricsFiles(observe.export_metrics_to_file_dir)
        state.intake.observers = (*state.intake.observers, files)


def install_crash_dump(state: ServerState) -> None:
    """Record requests from now on, if --crash-dump-folder is set."""
    folder = state.config.observe.crash_dump_folder
    if folder is None:
        return
    try:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--crash-dump-folder {folder}: {reason(error)}") from error
    intake = state.intake
    recorder = Recorder(Path(folder), state.config, lambda: intake.requests.values())
    state.extras[Recorder] = recorder
    intake.observers = (*intake.observers, recorder)


@get_and_post("/configure_logging", ConfigureLogging)
async def configure_logging(request: Request) -> Response:
    """Set how requests are logged, and the log level."""
    args = await read_args(request, ConfigureLogging)
    for name in ("dump_requests_folder", "crash_dump_folder"):
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
    request_log = state.extra(RequestLog)
    is_on, level = values.get("log_requests"), values.get("log_requests_level")
    if is_on is not None and not isinstance(is_on, bool):
        raise InvalidRequest("log_requests must be true or false", "log_requests")
    if level is not None and (isinstance(level, bool) or level not in LEVELS):
        raise InvalidRequest("log_requests_level must be 0, 1, 2 or 3", "log_requests_level")
    style = values.get("log_requests_format", request_log.lines.format)
    if style not in FORMATS:
        raise InvalidRequest("log_requests_format must be text or json", "log_requests_format")
    request_log.lines.format = style
    request_log.is_on = request_log.is_on if is_on is None else is_on
    request_log.level = request_log.level if level is None else level


def _log_state(state: ServerState) -> dict[str, Any]:
    request_log = state.extra(RequestLog)
    return {"log_requests": request_log.is_on, "log_requests_level": request_log.level}


async def _set_state(request: Request) -> Response:
    """Change options of the running server."""
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


@router.post("/dump_requests")
async def dump_requests(request: Request) -> Response:
    """Write the requests of the last five minutes to the folder of --crash-dump-folder."""
    recorder = state_of(request).extras.get(Recorder)
    if recorder is None:
        raise InvalidRequest("requests are not recorded: start with --crash-dump-folder FOLDER")
    entries = recorder.entries()
    try:
        path = await asyncio.to_thread(recorder.write, "asked for", entries)
    except OSError as error:
        fault = disk_fault(error, "/dump_requests")
        raise fault or DiskFull(f"--crash-dump-folder: {error.strerror or error}") from error
    return json_response({"path": str(path), "num_requests": len(entries)})
