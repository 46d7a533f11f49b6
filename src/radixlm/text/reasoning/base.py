"""What a reasoning parser is."""

from __future__ import annotations

from typing import Protocol


class ReasoningParser(Protocol):
    """Reads one message. Any split of it into chunks gives the same reasoning and text."""

    def feed(self, chunk: str) -> tuple[str, str]:
        """Take the next piece of the message: (reasoning, text) it brought."""
        ...

    def finish(self) -> tuple[str, str]:
        """The message is over: (reasoning, text) that was held back."""
        ...


def split_all(parser: ReasoningParser, message: str) -> tuple[str, str]:
    """Split a whole message with a fresh ``parser``: (reasoning, text)."""
    parts = (parser.feed(message), parser.finish())
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)
