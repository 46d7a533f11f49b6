"""Logs for people: ``[time] LEVEL role: message``, one record a line, on stderr."""

import logging
import sys
from typing import TextIO

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


class LineFormatter(logging.Formatter):
    """Line breaks in a message are escaped, so that a request cannot forge a record.

    A traceback follows its record on lines of its own.
    """

    def __init__(self, role: str) -> None:
        super().__init__(datefmt="%Y-%m-%d %H:%M:%S")
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        """``record`` as text, without the final line break."""
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        time = self.formatTime(record, self.datefmt)
        line = f"[{time}] {record.levelname} {self._role}: {message}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        if record.stack_info:
            line += "\n" + record.stack_info
        return line


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


def set_up_logging(
    role: str, level: str = "info", http_level: str | None = None, stream: TextIO | None = None
) -> None:
    """Log this process's records as ``role`` ("http", "scheduler", ...) to ``stream`` (stderr).

    May be called again: role and levels change, handlers do not pile up.
    """
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, _Handler):
            root.removeHandler(handler)
    handler = _Handler(stream)
    handler.setFormatter(LineFormatter(role))
    root.addHandler(handler)
    number = level_number(level)
    logging.getLogger(_ROOT).setLevel(number)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(number, logging.WARNING))
    for name in _HTTP:
        http = logging.getLogger(name)
        http.handlers.clear()
        http.propagate = True
        http.setLevel(level_number(http_level or level))
    logging.captureWarnings(True)


def set_level(level: str) -> None:
    """Change the level of RadixLM's records (/configure_logging)."""
    logging.getLogger(_ROOT).setLevel(level_number(level))


def get_logger(name: str) -> logging.Logger:
    """The logger of a module: ``logger = get_logger(__name__)``."""
    return logging.getLogger(name)
