"""A cursor over text that arrives in chunks, for tool-call and reasoning parsers.

Parsers are generators that read from a ``Scanner`` as if the whole message were there. A step that
cannot be decided yet yields and continues when more text has arrived, so every decision depends on
the text alone and never on how it was split into chunks.

    buffer   |   emitted   |   read, not emitted   |  not read  |
             0            mark                  position      end

Text between ``mark`` and ``position`` can still be rewound and emitted as plain text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Step: TypeAlias = Generator[None, None, T]

SPACES = " \t\r\n"
_TRIM_CHARS = 8192


class Malformed(Exception):
    """The text does not follow the format. Never leaves this package."""


class Truncated(Malformed):
    """The message ended inside the markup."""


class Scanner:
    """The text of one message so far, and a position in it."""

    __slots__ = ("buffer", "is_ended", "mark", "num_commits", "position")

    def __init__(self) -> None:
        self.buffer = ""
        self.position = 0
        self.mark = 0
        self.num_commits = 0
        self.is_ended = False

    def push(self, chunk: str) -> None:
        self.buffer += chunk

    def commit(self) -> None:
        """All text read so far was emitted; it can no longer be rewound."""
        self.mark = self.position
        self.num_commits += 1
        if self.mark > max(_TRIM_CHARS, len(self.buffer) // 2):  # copies each character once
            self.buffer = self.buffer[self.mark :]
            self.position = self.mark = 0

    def rewind(self) -> None:
        self.position = self.mark

    @property
    def is_exhausted(self) -> bool:
        """Whether all text so far is read."""
        return self.position >= len(self.buffer)

    def is_cut(self, literal: str) -> bool:
        """Whether all text that is not read is the beginning of ``literal``."""
        num_left = len(self.buffer) - self.position
        return num_left <= len(literal) and literal.startswith(self.buffer[self.position :])

    def take(self, num_chars: int) -> str:
        start = self.position
        self.position = min(start + num_chars, len(self.buffer))
        return self.buffer[start : self.position]

    def take_run(self, pattern: re.Pattern[str]) -> str:
        """Read what matches ``pattern`` here in the text so far; does not wait."""
        match = pattern.match(self.buffer, self.position)
        return self.take(match.end() - self.position) if match else ""

    def more(self) -> Step[None]:
        """Wait for text; Truncated at the end of the message."""
        if self.is_ended:
            raise Truncated
        yield

    def peek(self) -> Step[str]:
        """The next character, "" at the end of the message."""
        while self.is_exhausted and not self.is_ended:
            yield
        return self.buffer[self.position : self.position + 1]

    def next_char(self) -> Step[str]:
        while self.is_exhausted:
            yield from self.more()
        return self.take(1)

    def take_while(self, pattern: re.Pattern[str], limit: int) -> Step[str]:
        """Read all characters that match ``pattern`` (one char or more at a time)."""
        start = self.position
        while True:
            self.take_run(pattern)
            if self.position - start > limit:
                raise Malformed
            if not self.is_exhausted or self.is_ended:
                return self.buffer[start : self.position]
            yield

    def spaces(self) -> Step[str]:
        return (yield from self.take_while(_SPACE_RUN, 1 << 20))

    def looking_at(self, *literals: str) -> Step[str]:
        """The longest of ``literals`` at the position, without reading it; "" if there is none."""
        longest = max(map(len, literals))
        while True:
            rest = self.buffer[self.position : self.position + longest]
            match = max((s for s in literals if rest.startswith(s)), key=len, default="")
            if self.is_ended or not any(
                len(s) > len(rest) and s.startswith(rest) for s in literals
            ):
                return match
            yield

    def accept(self, *literals: str) -> Step[str]:
        """Read the longest of ``literals`` at the position; "" if there is none."""
        match = yield from self.looking_at(*literals)
        self.position += len(match)
        return match

    def expect(self, *literals: str) -> Step[str]:
        match = yield from self.accept(*literals)
        if not match:
            is_cut = self.is_ended and any(map(self.is_cut, literals))
            raise Truncated if is_cut else Malformed
        return match

    def until(self, literal: str, limit: int = 1 << 24) -> Step[str]:
        """Read up to and including ``literal``; returns the text before it. Emits nothing."""
        num_seen = 0
        while True:
            at = self.buffer.find(literal, self.position + num_seen)
            if at >= 0:
                text = self.take(at - self.position)
                self.position += len(literal)
                if len(text) > limit:
                    raise Malformed
                return text
            num_seen = max(len(self.buffer) - self.position - len(literal) + 1, 0)
            if num_seen > limit:
                raise Malformed
            yield from self.more()

    def search(self, markers: MarkerSet) -> tuple[int, str]:
        """(position, marker) of the next marker; "" for the marker where one may be starting.

        (end of the buffer, "") if there is none. The earliest marker wins, at one position the
        longest: a shorter one is not reported while a longer one may still follow.
        """
        match = markers.complete.search(self.buffer, self.position)
        if not self.is_ended:
            at = self.partial(markers, match.start() if match else len(self.buffer))
            if at >= 0:
                return at, ""
        return (match.start(), match.group()) if match else (len(self.buffer), "")

    def partial(self, markers: MarkerSet, up_to: int) -> int:
        """First position up to ``up_to`` where the end of the buffer may begin a marker; or -1."""
        first = max(self.position, len(self.buffer) - markers.longest + 1)
        for start in markers.firsts.finditer(self.buffer, first, up_to + 1):
            at = start.start()
            rest = self.buffer[at:]
            if any(len(s) > len(rest) and s.startswith(rest) for s in markers.literals):
                return at
        return -1


class MarkerSet:
    """Literals to search for at once."""

    __slots__ = ("complete", "firsts", "literals", "longest")

    def __init__(self, *literals: str) -> None:
        self.literals = tuple(sorted(set(literals), key=lambda s: (-len(s), s)))
        self.firsts = re.compile("|".join({re.escape(s[0]) for s in self.literals}) or r"(?!)")
        self.longest = len(self.literals[0]) if self.literals else 0
        pattern = "|".join(map(re.escape, self.literals)) or r"(?!)"
        self.complete = re.compile(pattern)


@functools.lru_cache(maxsize=512)
def marker_set(*literals: str) -> MarkerSet:
    """A cached MarkerSet."""
    return MarkerSet(*literals)


_SPACE_RUN = re.compile(f"[{SPACES}]+")
