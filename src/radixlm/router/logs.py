"""The gateway's log: JSON lines, a file, and one line a request."""

from __future__ import annotations

import logging
import sys
import time
from datetime import UTC, datetime
from logging.handlers import TimedRotatingFileHandler
from pathlib import Path
from typing import Any

import orjson

from radixlm.base.errors import ConfigError
from radixlm.base.log import JsonFormatter, LineFormatter
from radixlm.router.call import Call
from radixlm.router.flags import Observe as Options

FLUSH_S = 0.25
MAX_LINES = 200
KEEP_DAYS = 14


def set_up(options: Options) -> None:
    """Apply --log-json and --log-dir to a log that ``base.log`` has set up. ConfigError: the
    directory cannot be written."""
    root = logging.getLogger()
    if options.log_dir is not None:
        try:
            folder = Path(options.log_dir)
            folder.mkdir(parents=True, exist_ok=True)
            file = TimedRotatingFileHandler(
                folder / "radixlm-router.log", when="midnight", backupCount=KEEP_DAYS, utc=True
            )
        except OSError as error:
            raise ConfigError(f"--log-dir {options.log_dir}: {error.strerror}") from error
        file.setFormatter(LineFormatter("router"))
        root.addHandler(file)
    if options.log_json:
        for handler in root.handlers:
            handler.setFormatter(JsonFormatter("router"))


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


class AccessLog:
    """One line a request, written together every quarter of a second: a record of ``logging``
    costs 10 us, this 2."""

    def __init__(self, is_json: bool, handlers: list[logging.Handler] | None = None) -> None:
        """``handlers``: to whose streams lines go; those of the log itself if not given."""
        self._is_json, self._handlers = is_json, handlers
        self._lines: list[str] = []
        self._second, self._stamp = -1, ""

    def ended(self, call: Call, client: Any) -> None:
        """An answer is complete, or its client has left."""
        now_s, worker = time.time(), call.worker
        status = client.status if not client.is_gone else 499
        seconds = time.monotonic() - call.arrival_s
        first_s = client.begun_s - call.arrival_s if client.begun_s else seconds
        name = worker.name if worker is not None else "-"
        if int(now_s) != self._second:
            self._second = int(now_s)
            self._stamp = _timestamp(self._second)[:19]
        if self._is_json:
            shown = {
                "timestamp": self._stamp, "level": "INFO", "target": "access",
                "client": call.client, "method": call.method, "path": call.path, "status": status,
                "bytes": client.num_bytes, "seconds": round(seconds, 4),
                "head_seconds": round(first_s, 4), "worker": name, "tries": call.num_tries,
                "tenant": call.tenant or call.principal, "request_id": call.request_id,
            }  # fmt: skip
            line = orjson.dumps(shown).decode()
        else:
            line = (
                f"[{self._stamp}] ACCESS {call.client} {call.method} {call.path} {status} "
                f"{client.num_bytes} B {seconds:.3f} s (head {first_s:.3f}) worker {name} "
                f"tries {call.num_tries} id {call.request_id}"
            )
        self._lines.append(line)
        if len(self._lines) >= MAX_LINES:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if not self._lines:
            return
        text = "\n".join(self._lines) + "\n"
        self._lines.clear()
        for handler in self._handlers or logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler):
                stream = handler.stream or sys.stderr
                stream.write(text)
                stream.flush()


def attach(gateway: Any) -> None:
    """Write the access log if --access-log is set."""
    if gateway.options.access_log:
        log = AccessLog(gateway.options.log_json)
        gateway.observers.append(log.ended)
        gateway.every(FLUSH_S, log.flush)
        gateway.on_stop.append(log.flush)
