"""Lines of received and of finished requests in the words of SGLang: text, or JSON objects."""

import json
import logging
import os
import socket
import sys
from collections.abc import Sequence
from datetime import datetime
from logging.handlers import TimedRotatingFileHandler
from pathlib import Path
from typing import Any, TypeAlias

from radixlm.base.errors import ConfigError
from radixlm.base.log import LineFormatter

log = logging.getLogger("radixlm.requests")

SHORT_CHARS = 2048
Values: TypeAlias = dict[str, Any]
LEVELS = (0, 1, 2, 3)
FORMATS = ("text", "json")


class RequestLines:
    """Writes lines to ``targets``: "stdout", and folders with a file an hour; without any to the
    server's log. ``format``: one of FORMATS. ConfigError for a folder that cannot be written."""

    def __init__(self, targets: Sequence[str], format: str) -> None:
        self.format = format
        self._handlers = [_handler(target) for target in targets]

    def received(self, kind: str, obj: Values, headers: Values, is_whole: bool) -> None:
        """A request of SGLang's class ``kind`` has come; ``obj``: its fields. Long strings are cut
        unless ``is_whole``."""
        if self.format == "json":
            parts = {"rid": obj["rid"], "obj": obj, **_headers(headers)}
            self._write_object("request.received", parts, is_whole)
        else:
            self._write(f"Receive: obj={_call(kind, obj, is_whole)}{_shown(headers)}")

    def received_body(self, body: Values, headers: Values, is_whole: bool) -> None:
        """The body of an OpenAI route, before it became requests."""
        if self.format == "json":
            parts = {"obj": body, **_headers(headers)}
            self._write_object("request.received.openai", parts, is_whole)
        else:
            self._write(f"Receive OpenAI: obj={_text(body, is_whole)}{_shown(headers)}")

    def finished(
        self, kind: str, obj: Values, headers: Values, out: Values, is_whole: bool
    ) -> None:
        """The same request has ended with ``out``."""
        if self.format == "json":
            parts = {"rid": obj["rid"], "obj": obj, **_headers(headers), "out": out}
            self._write_object("request.finished", parts, is_whole)
        else:
            shown = _call(kind, obj, is_whole) + _shown(headers)
            self._write(f"Finish: obj={shown}, out={_text(out, is_whole)}")

    def close(self) -> None:
        """Close the files. A later line opens its file again."""
        for handler in self._handlers:
            handler.close()

    def _write_object(self, event: str, parts: Values, is_whole: bool) -> None:
        head = {"timestamp": datetime.now().isoformat(), "event": event}
        shown = parts if is_whole else _cut(parts)
        self._write(json.dumps(head | shown, ensure_ascii=False, default=str))

    def _write(self, line: str) -> None:
        if not self._handlers:
            log.info("%s", line)
            return
        record = log.makeRecord(log.name, logging.INFO, "", 0, line, (), None)
        for handler in self._handlers:
            handler.setFormatter(_PLAIN if self.format == "json" else _STAMPED)
            handler.handle(record)


_PLAIN = logging.Formatter()  # control characters are escaped in JSON
_STAMPED = LineFormatter("requests")


class _HourFiles(TimedRotatingFileHandler):
    """A file an hour. A disk that is full or fails is told once in the server's log."""

    fails = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, or lose it."""
        self._has_failed = False
        super().emit(record)
        self.fails = self._has_failed

    def handleError(self, record: logging.LogRecord) -> None:
        """Instead of a traceback for each line."""
        self._has_failed = True
        if not self.fails:
            folder, error = Path(self.baseFilename).parent, sys.exc_info()[1]
            told = "--log-requests-target %s: lines of requests are lost: %s"
            log.warning(told, folder, getattr(error, "strerror", None) or error)


def _handler(target: str) -> logging.Handler:
    if target == "stdout":
        return logging.StreamHandler(sys.stdout)
    path = Path(target) / f"{socket.gethostname()}_{os.getpid()}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _HourFiles(path, when="H", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--log-requests-target {target}: {error.strerror or error}; stdout or a folder that "
            "can be written works"
        ) from error


def time_stats(
    rid: str, role: str, lengths: tuple[int, int], spans_s: dict[str, float], start_time: float
) -> None:
    """One line with SGLang's words. ``role``: unified, prefill or decode; ``lengths``: of input
    and output; ``spans_s``: name -> seconds; ``start_time``: seconds since the epoch."""
    head = f"rid={rid}, input len={lengths[0]}, output len={lengths[1]}, type={role}"
    spans = "".join(f"{name}={1e3 * seconds:.2f}ms, " for name, seconds in spans_s.items())
    log.info("Req Time Stats(%s): %sstart_time=%s", head, spans, start_time)


def _headers(headers: Values) -> Values:
    return {"headers": headers} if headers else {}


def _shown(headers: Values) -> str:
    return f", headers={headers}" if headers else ""


def _call(kind: str, obj: Values, is_whole: bool) -> str:
    """``obj`` as Python writes an object of class ``kind``."""
    return f"{kind}({', '.join(f'{name}={_text(one, is_whole)}' for name, one in obj.items())})"


def _text(value: Any, is_whole: bool) -> str:
    """``value`` as Python writes it, of long strings both ends."""
    if isinstance(value, str) and len(value) > SHORT_CHARS and not is_whole:
        half = SHORT_CHARS // 2
        return f"{value[:half]!r} ... {value[-half:]!r}"
    if isinstance(value, dict):
        parts = (f"{name!r}: {_text(one, is_whole)}" for name, one in value.items())
        return "{" + ", ".join(parts) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_text(one, is_whole) for one in value) + "]"
    return repr(value)


def _cut(value: Any) -> Any:
    """``value`` with both ends of its long strings."""
    if isinstance(value, str) and len(value) > SHORT_CHARS:
        half = SHORT_CHARS // 2
        return f"{value[:half]}...{value[-half:]}"
    if isinstance(value, dict):
        return {name: _cut(one) for name, one in value.items()}
    return [_cut(one) for one in value] if isinstance(value, list) else value
