"""What becomes of a field of a request body that no table and no request model names.

The policy is of --unknown-fields: "ignore", "warn" (a line in the log, once a field and process,
and the response header ``X-RadixLM-Ignored``) or "refuse". Outside ``collect_unknown`` it is
"refuse".
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from radixlm.base.errors import InvalidRequest

log = logging.getLogger(__name__)

POLICIES = ("ignore", "warn", "refuse")
MAX_NAMES = 32  # in the header of one response
MAX_WARNING_CHARS = 2000  # of all warnings of a response, apart from the last one
MAX_WARNED = 1000  # names of clients are endless, the log is not
_warned: set[str] = set()


class IgnoredFields:
    """The unknown fields of one request, in the order in which they were met."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self._names: dict[str, None] = {}
        self.warning = ""  # the value of ``X-RadixLM-Warning``

    def add(self, name: str) -> None:
        """Note a field that is ignored."""
        shown = name.encode("ascii", "backslashreplace").decode()
        shown = "".join(c if c.isprintable() and c != "," else "?" for c in shown)
        if self.policy != "warn":
            return
        if len(self._names) < MAX_NAMES:
            self._names[shown] = None
        if shown not in _warned and len(_warned) < MAX_WARNED:
            _warned.add(shown)
            log.warning("a request has the unknown field %s, which is ignored", shown)

    @property
    def header(self) -> str:
        """The value of ``X-RadixLM-Ignored``; empty if nothing was ignored."""
        return ", ".join(self._names)


_current: ContextVar[IgnoredFields | None] = ContextVar("ignored_fields", default=None)


@contextmanager
def collect_unknown(policy: str) -> Iterator[IgnoredFields]:
    """Inside, unknown fields are treated by ``policy``."""
    ignored = IgnoredFields(policy)
    token = _current.set(ignored)
    try:
        yield ignored
    finally:
        _current.reset(token)


def note_unknown(name: Any, what: str = "field", where: str = "") -> None:
    """Ignore an unknown field, or raise InvalidRequest. ``where``: what the name stands in."""
    ignored = _current.get()
    if ignored is not None and ignored.policy != "refuse":
        ignored.add(f"{where}{name!s:.80}")
        return
    place = f"{where}{name!s:.80}"
    error = InvalidRequest(f"unknown {what} {place!r:.200}", place)
    error.code = "unknown_parameter"
    raise error


def note_warning(text: str) -> None:
    """Answer the current request with the header ``X-RadixLM-Warning``; several are joined."""
    ignored = _current.get()
    if ignored is not None and len(ignored.warning) < MAX_WARNING_CHARS:
        shown = text.encode("ascii", "backslashreplace").decode()
        shown = "".join(c if c.isprintable() else "?" for c in shown)
        ignored.warning += "; " * bool(ignored.warning) + shown
