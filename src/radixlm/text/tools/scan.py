"""A cursor over text that has not all arrived: the incremental core of tools and reasoning.

Formats are written as generators that read from a ``Scanner`` as if the whole message were
there. A step that cannot be decided yet yields, and goes on when more text has come, so every
decision depends on the text alone and never on how it was cut into chunks.

    buffer   |  given out  |  read, not given out  |  not read  |
             0            mark                  position      end

What lies between ``mark`` and ``position`` can still be taken back and shown as text.
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


class Cut(Malformed):
    """The message ended inside the markup."""


class Scanner:
    """The text of one message, as far as it has come, and a place in it."""

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
        """All text read so far was given out; it can no longer be taken back."""
        self.mark = self.position
        self.num_commits += 1
        if self.mark > _TRIM_CHARS:
            self.buffer = self.buffer[self.mark :]
            self.position = self.mark = 0

    def rewind(self) -> None:
        self.position = self.mark

    @property
    def is_dry(self) -> bool:
        """Is all text that has come read?"""
        return self.position >= len(self.buffer)

    def take(self, num_chars: int) -> str:
        start = self.position
        self.position = min(start + num_chars, len(self.buffer))
        return self.buffer[start : self.position]

    def take_run(self, pattern: re.Pattern[str]) -> str:
        """Read what matches ``pattern`` here in the text that has come; does not wait."""
        found = pattern.match(self.buffer, self.position)
        return self.take(found.end() - self.position) if found else ""

    def more(self) -> Step[None]:
        """Wait for text; Cut when there will be none."""
        if self.is_ended:
            raise Cut
        yield

    def peek(self) -> Step[str]:
        """The next character, "" at the end of the message."""
        while self.is_dry and not self.is_ended:
            yield
        return self.buffer[self.position : self.position + 1]

    def next_char(self) -> Step[str]:
        while self.is_dry:
            yield from self.more()
        return self.take(1)

    def take_while(self, pattern: re.Pattern[str], limit: int) -> Step[str]:
        """Read all characters that match ``pattern`` (one char or more at a time)."""
        start = self.position
        while True:
            self.take_run(pattern)
            if self.position - start > limit:
                raise Malformed
            if not self.is_dry or self.is_ended:
                return self.buffer[start : self.position]
            yield

    def spaces(self) -> Step[str]:
        return (yield from self.take_while(_SPACE_RUN, 1 << 20))

    def looking_at(self, *literals: str) -> Step[str]:
        """The longest of ``literals`` that stands here, not read; "" if none does."""
        longest = max(map(len, literals))
        while True:
            rest = self.buffer[self.position : self.position + longest]
            found = max((s for s in literals if rest.startswith(s)), key=len, default="")
            if self.is_ended or not any(
                len(s) > len(rest) and s.startswith(rest) for s in literals
            ):
                return found
            yield

    def accept(self, *literals: str) -> Step[str]:
        """Read the longest of ``literals`` that stands here; "" if none does."""
        found = yield from self.looking_at(*literals)
        self.position += len(found)
        return found

    def expect(self, *literals: str) -> Step[str]:
        found = yield from self.accept(*literals)
        if not found:
            rest = self.buffer[self.position :]
            raise Cut if self.is_ended and any(s.startswith(rest) for s in literals) else Malformed
        return found

    def until(self, literal: str, limit: int = 1 << 24) -> Step[str]:
        """Read up to ``literal`` and past it; the text before it. Nothing is given out."""
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
        """Where the next marker starts and which it is; "" where one may be starting.

        (end of the buffer, "") when none is there nor may be. With several the earliest wins,
        at one place the longest: a shorter one is not reported while a longer may still come.
        """
        found = markers.complete.search(self.buffer, self.position)
        if not self.is_ended:
            at = self.partial(markers, found.start() if found else len(self.buffer))
            if at >= 0:
                return at, ""
        return (found.start(), found.group()) if found else (len(self.buffer), "")

    def partial(self, markers: MarkerSet, up_to: int) -> int:
        """First place, not behind ``up_to``, where the buffer's end may begin a marker; or -1."""
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
    """A set made once for all messages of a format."""
    return MarkerSet(*literals)


_SPACE_RUN = re.compile(f"[{SPACES}]+")
