"""Logs on stderr, one record a line: ``[time] LEVEL role: message``, or JSON."""

import json
import logging
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from radixlm.base.env import LOGGING_CONFIG_PATH
from radixlm.base.errors import ConfigError
from radixlm.base.lazy import load

_QUIET = (
    "asyncio",
    "filelock",
    "fsspec",
    "httpcore",
    "httpx",
    "huggingface_hub",
    "multipart",
    "tokenizers",
    "torch",
    "transformers",
    "urllib3",
)
"""Libraries whose records below WARNING are dropped."""
_HTTP = ("uvicorn", "uvicorn.error", "uvicorn.access", "fastapi")
_ROOT = "radixlm"
ACCESS = "radixlm.access"
"""The logger of the access lines: it has the level of the HTTP server's records."""
_COLORS = ((logging.ERROR, "31"), (logging.WARNING, "33"), (logging.INFO, "32"), (0, "2"))


class LineFormatter(logging.Formatter):
    """Line breaks and control characters in a message are escaped, so that a request cannot forge
    a record or reach the terminal. A traceback follows its record on lines of its own.
    """

    def __init__(self, role: str, has_color: bool = False) -> None:
        super().__init__(datefmt="%Y-%m-%d %H:%M:%S")
        self._role, self._has_color = role, has_color

    def format(self, record: logging.LogRecord) -> str:
        """``record`` as text, without the final line break."""
        message = record.getMessage()
        if not message.isprintable():
            message = "".join(
                c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode()
                for c in message
            )
        time = self.formatTime(record, self.datefmt)
        line = f"[{time}] {record.levelname} {self._role}: {message}"
        if self._has_color:
            color = next(color for least, color in _COLORS if record.levelno >= least)
            line = (
                f"\x1b[2m{time}\x1b[0m \x1b[{color}m{record.levelname}\x1b[0m "
                f"\x1b[36m{self._role}\x1b[0m {message}"
            )
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        if record.stack_info:
            line += "\n" + record.stack_info
        return line


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON: timestamp (UTC), level, target (the logger), role, message,
    the fields of an access line, and the traceback as ``error``."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        """``record`` without the final line break."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        shown = {"timestamp": time, "level": record.levelname, "target": record.name}
        shown |= {"role": self._role, "message": record.getMessage()}
        shown |= record.__dict__.get("fields", {})
        if record.exc_info:
            shown["error"] = self.formatException(record.exc_info)
        if record.stack_info:
            shown["stack"] = record.stack_info
        return json.dumps(shown, default=str)


class _Handler(logging.StreamHandler[TextIO]):
    """A class of its own, so that a second set-up finds and replaces it.

    Without a ``stream`` it writes to the stderr of the moment: the calling program may have
    replaced and closed the one of the set-up."""

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__(stream)
        self._is_following = stream is None

    def emit(self, record: logging.LogRecord) -> None:
        if self._is_following:
            self.stream = sys.stderr
        super().emit(record)


def level_number(name: str) -> int:
    """ "info" -> 20; ValueError for a level that does not exist."""
    number = logging.getLevelNamesMapping().get(name.upper())
    if number is None:
        raise ValueError(f"no log level is called {name!r}")
    return number


def _has_color(stream: TextIO) -> bool:
    """Whether lines may be coloured: on a terminal, unless the user says no."""
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def set_up_logging(
    role: str,
    level: str = "info",
    http_level: str | None = None,
    stream: TextIO | None = None,
    log_format: str = "text",
) -> None:
    """Log this process's records as ``role`` ("http", "scheduler", ...) to ``stream`` (stderr).
    ``log_format``: "text" or "json".

    May be called again: role and levels change, handlers do not pile up. The file that
    ``LOGGING_CONFIG_PATH`` names changes what it speaks of; ConfigError if it cannot be used.
    """
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, _Handler):
            root.removeHandler(handler)
    handler = _Handler(stream)
    is_json, has_color = log_format == "json", _has_color(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(role) if is_json else LineFormatter(role, has_color))
    root.addHandler(handler)
    number = level_number(level)
    logging.getLogger(_ROOT).setLevel(number)
    logging.getLogger(ACCESS).setLevel(level_number(http_level or level))
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(number, logging.WARNING))
    for name in _HTTP:
        http = logging.getLogger(name)
        http.handlers.clear()
        http.propagate = True
        http.setLevel(level_number(http_level or level))
    logging.captureWarnings(True)
    if path := LOGGING_CONFIG_PATH.get():
        _configure(Path(path))


def _configure(path: Path) -> None:
    """Apply a file for dictConfig. Loggers that it does not name stay as they are."""
    try:
        config = json.loads(path.read_bytes())
        load("logging.config:dictConfig")({"disable_existing_loggers": False, **config})
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
        message = (
            f"environment variable {LOGGING_CONFIG_PATH.name}={str(path)!r} (or "
            f"{LOGGING_CONFIG_PATH.aliases[0]}): {error}; a JSON object for Python's "
            'logging.config.dictConfig works, such as {"version": 1}'
        )
        raise ConfigError(message) from error


def set_level(level: str) -> None:
    """Change the level of RadixLM's records (/configure_logging)."""
    for name in (_ROOT, ACCESS):
        logging.getLogger(name).setLevel(level_number(level))
