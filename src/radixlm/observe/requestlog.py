"""Lines of received and of finished requests: text, or JSON objects with SGLang's names."""

import json
import logging
import os
import socket
import sys
from collections.abc import Sequence
from datetime import datetime
from logging.handlers import TimedRotatingFileHandler
from pathlib import Path
from typing import Any

import msgspec

from radixlm.base.errors import ConfigError
from radixlm.base.log import LineFormatter

log = logging.getLogger("radixlm.requests")

SHORT_CHARS = 2048
LEVELS = (0, 1, 2, 3)
FORMATS = ("text", "json")


class RequestLines:
    """Writes lines to ``targets``: "stdout", and folders with a file an hour; without any to the
    server's log. ``format``: one of FORMATS. ConfigError for a folder that cannot be written."""

    def __init__(self, targets: Sequence[str], format: str) -> None:
        self.format = format
        self._handlers = [_handler(target) for target in targets]

    def received(
        self, rid: str, level: int, num_tokens: int, sampling: Any, prompt: str | None
    ) -> None:
        """``level`` 0: metadata, 1: sampling parameters too, 2: the start of the prompt, 3: all."""
        if self.format == "json":
            facts: dict[str, Any] = {"prompt_tokens": num_tokens}
            if level >= 1:
                facts["sampling_params"] = msgspec.to_builtins(sampling)
            self._write_object("request.received", rid, obj=facts | _texts(prompt, level))
            return
        parts = [f"received {rid}: {num_tokens} prompt tokens"]
        if level >= 1:
            parts.append(f"sampling {msgspec.json.encode(sampling).decode()}")
        if level >= 2 and prompt is not None:
            parts.append(f"prompt {_shown(prompt, level)}")
        self._write("; ".join(parts))

    def finished(self, rid: str, level: int, facts: dict[str, Any], output: str | None) -> None:
        """``facts``: finish_reason, tokens, seconds ... in the order in which they are shown."""
        if self.format == "json":
            out = {"meta_info": facts} | _texts(output, level)
            self._write_object("request.finished", rid, out=out)
            return
        shown = ", ".join(f"{_WORDS.get(name, name)} {_value(v)}" for name, v in facts.items())
        parts = [f"finished {rid}: {shown}"]
        if level >= 2 and output is not None:
            parts.append(f"output {_shown(output, level)}")
        self._write("; ".join(parts))

    def close(self) -> None:
        """Close the files. A later line opens its file again."""
        for handler in self._handlers:
            handler.close()

    def _write_object(self, event: str, rid: str, **parts: Any) -> None:
        head = {"timestamp": datetime.now().isoformat(), "event": event, "rid": rid}
        self._write(json.dumps(head | parts, ensure_ascii=False))

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
_WORDS = {  # field -> how a line of text calls it
    "finish_reason": "reason", "prompt_tokens": "prompt", "cached_tokens": "cached",
    "completion_tokens": "output", "time_to_first_token": "first token", "e2e_latency": "total",
}  # fmt: skip


def _value(value: Any) -> str:
    return f"{value:.3f} s" if isinstance(value, float) else str(value)


def _handler(target: str) -> logging.Handler:
    if target == "stdout":
        return logging.StreamHandler(sys.stdout)
    path = Path(target) / f"{socket.gethostname()}_{os.getpid()}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return TimedRotatingFileHandler(path, when="H", encoding="utf-8")
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


def _texts(text: str | None, level: int) -> dict[str, str]:
    if text is None or level < 2:
        return {}
    return {"text": text if level >= 3 or len(text) <= SHORT_CHARS else text[:SHORT_CHARS]}


def _shown(text: str, level: int) -> str:
    if level >= 3 or len(text) <= SHORT_CHARS:
        return _quoted(text)
    half = SHORT_CHARS // 2
    return f"{_quoted(text[:half])} ... {_quoted(text[-half:])} ({len(text)} characters)"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
