"""The protocol of reasoning parsers."""

from typing import Protocol


class ReasoningParser(Protocol):
    """Parses one message. Any split into chunks gives the same reasoning and text."""

    def feed(self, chunk: str) -> tuple[str, str]:
        """Parse the next chunk: its (reasoning, text)."""

    def finish(self) -> tuple[str, str]:
        """The message is over: the (reasoning, text) that was held back."""


def split_all(parser: ReasoningParser, message: str) -> tuple[str, str]:
    """Split a whole message with a new ``parser``: (reasoning, text)."""
    parts = (parser.feed(message), parser.finish())
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)
