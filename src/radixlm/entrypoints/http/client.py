"""Who sends the request at hand: the key by which --fair-share divides the server."""

from __future__ import annotations

from contextvars import ContextVar

MAX_KEY_CHARS = 256
_key: ContextVar[str | None] = ContextVar("fair_key", default=None)


def set_client(value: bytes | None) -> None:
    """For the task that answers this request, and those it starts."""
    _key.set(value.decode("latin-1")[:MAX_KEY_CHARS] if value else None)


def client_key() -> str | None:
    """The user that the header of --fair-share names; None without the flag or the header."""
    return _key.get()
