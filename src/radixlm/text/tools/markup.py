"""The machine all call formats share: text until a marker, then a format's block of calls.

Rules that hold for every format:

- White space between text and markup belongs to the markup, and so does white space after the
  last call; white space in front of text that follows a call is text.
- A block that breaks before its first call was announced is text, character for character, and
  the search goes on right behind its opening marker.
- A call that was announced and then breaks is closed to valid JSON and reported as incomplete;
  what could not be used of it is text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from radixlm.text.tools.base import ParsedText, ToolCallDelta, ToolSpec
from radixlm.text.tools.json_copy import JsonCopier
from radixlm.text.tools.scan import SPACES, Cut, Malformed, Scanner, Step, marker_set

NAME_CHARS = re.compile(r"[^\s<>{}\[\]()\"'`,;=]+")
_MAX_NAME_CHARS = 256
_MIN_PART_CHARS = 4


class MarkupParser:
    """A ToolParser; a format gives ``starts``, ``silent`` and ``block``."""

    starts: ClassVar[tuple[str, ...]] = ()
    """Markers that may open a block of calls."""
    silent: ClassVar[tuple[str, ...]] = ()
    """Markers around text, left out of it."""
    bare: ClassVar[str] = ""
    """Characters that open a block as the first of the message; ``block`` still has to read it."""

    def __init__(self, tools: Sequence[ToolSpec] = (), *, drop_unknown: bool = False) -> None:
        self.scanner = Scanner()
        self.tools = {tool.name: tool for tool in tools}
        self._drop_unknown = drop_unknown
        self._markers = marker_set(*self.starts, *self.silent)
        self._text: list[str] = []
        self._deltas: list[tuple[int, str | None, list[str], str | None]] = []
        self._incomplete: list[int] = []
        self._num_calls = 0
        self._closers: str | None = None
        self._is_dropping = False
        self._is_after_call = False
        self._machine = self._run()
        next(self._machine)

    # The protocol

    def feed(self, chunk: str) -> ParsedText:
        if chunk and not self.scanner.is_ended:
            self.scanner.push(chunk)
            next(self._machine, None)
        return self._drain()

    def finish(self) -> ParsedText:
        if not self.scanner.is_ended:
            self.scanner.is_ended = True
            next(self._machine, None)
        return self._drain()

    # For the formats

    def block(self, marker: str) -> Step[None]:
        """Read a block of calls whose opening ``marker`` was just read."""
        raise NotImplementedError

    def begin(self, name: str, call_id: str | None = None) -> None:
        """Announce a call; from here on it cannot be taken back."""
        self._is_dropping = self._drop_unknown and name not in self.tools
        if not self._is_dropping:
            self._deltas.append((self._num_calls, name, [], call_id))
        self._closers = "{}"
        self.scanner.commit()

    def put(self, fragment: str, closers: str) -> None:
        """Give out arguments; ``closers`` would make all given so far a valid JSON object."""
        self._give(fragment)
        self._closers = closers
        self.scanner.commit()

    def done(self) -> None:
        """The arguments of the announced call are complete."""
        self._closers = None
        self._num_calls += not self._is_dropping
        self._is_after_call = True
        self.scanner.commit()

    def name(self) -> Step[str]:
        """Read a function's name."""
        name = yield from self.scanner.take_while(NAME_CHARS, _MAX_NAME_CHARS)
        if not name:
            raise Cut if self.scanner.is_ended and self.scanner.is_dry else Malformed
        return name

    def json_arguments(self, name: str, call_id: str | None = None) -> Step[None]:
        """Read a JSON object as the arguments of ``name``."""
        yield from self.scanner.spaces()
        if (yield from self.scanner.peek()) != "{":
            raise Cut if self.scanner.is_dry else Malformed
        self.begin(name, call_id)
        yield from JsonCopier(self.scanner, self.put).value()
        self.done()

    def end(self, *literals: str, min_part: int = 1) -> Step[str]:
        """Read a closing marker, white space before it too; nothing is read if none stands here.

        A part of one, of ``min_part`` characters, at the message's end counts as one.
        """
        scanner = self.scanner
        scanner.commit()
        yield from scanner.spaces()
        found = yield from scanner.accept(*literals)
        rest = scanner.buffer[scanner.position :]
        if not found and len(rest) >= min_part and scanner.is_ended:
            found = next((s for s in literals if s.startswith(rest)), "")
            scanner.take(len(rest) if found else 0)
        if found:
            scanner.commit()
        else:
            scanner.rewind()
        return found

    def all_ends(self, *literals: str) -> Step[None]:
        """Read closing markers as long as there are any."""
        found = yield from self.end(*literals)
        while found:
            found = yield from self.end(*literals, min_part=_MIN_PART_CHARS)

    # The machine

    def _run(self) -> Step[None]:
        if self.bare:
            spaces = yield from self.scanner.spaces()
            opening = yield from self.scanner.peek()
            if opening and opening in self.bare:
                yield from self._attempt(opening, len(spaces) + 1)
            else:
                self.scanner.rewind()
        while marker := (yield from self._plain_text()):
            num_chars = self.scanner.position - self.scanner.mark
            yield from self._attempt(marker, num_chars)

    def _plain_text(self) -> Step[str]:
        """Give out text up to the next opening marker, "" at the message's end."""
        scanner = self.scanner
        while True:
            at, marker = scanner.search(self._markers)
            end = len(scanner.buffer[scanner.position : at].rstrip(SPACES)) + scanner.position
            num_spaces = at - end
            self._say(scanner.take(end - scanner.position))
            if marker in self.silent and not self._is_after_call:
                self._say(scanner.take(num_spaces))
                num_spaces = 0
            if marker:
                scanner.take(num_spaces + len(marker))
            elif scanner.is_ended:
                rest = scanner.take(len(scanner.buffer))
                self._say("" if self._is_after_call else rest)
                return ""
            if marker in self.starts:
                return marker
            if marker:
                scanner.commit()
            else:
                yield

    def _attempt(self, marker: str, num_chars: int) -> Step[None]:
        """Read a block; where it breaks, turn into text what cannot be used of it."""
        scanner = self.scanner
        num_commits = scanner.num_commits
        try:
            yield from self.block(marker)
            scanner.commit()
        except Malformed as error:
            self._close_broken()
            scanner.rewind()
            if isinstance(error, Cut):
                rest = scanner.take(len(scanner.buffer))
                self._say("" if self._is_after_call and not rest.strip(SPACES) else rest)
            elif scanner.num_commits == num_commits:
                self._say(scanner.take(num_chars))

    def _close_broken(self) -> None:
        if self._closers is None:
            return
        self._give(self._closers)
        if not self._is_dropping:
            self._incomplete.append(self._num_calls)
        self.done_broken()

    def done_broken(self) -> None:
        self._closers = None
        self._num_calls += not self._is_dropping
        self._is_after_call = True

    def _say(self, text: str) -> None:
        if text:
            self._text.append(text)
            self._is_after_call = self._is_after_call and not text.strip(SPACES)
            self.scanner.commit()

    def _give(self, fragment: str) -> None:
        if self._is_dropping or not fragment:
            return
        if not self._deltas or self._deltas[-1][0] != self._num_calls or self._deltas[-1][1]:
            self._deltas.append((self._num_calls, None, [], None))
        self._deltas[-1][2].append(fragment)

    def _drain(self) -> ParsedText:
        if not self._text and not self._deltas:
            return ParsedText("", [])
        calls = [
            ToolCallDelta(index, name, "".join(fragments), call_id)
            for index, name, fragments, call_id in self._deltas
        ]
        parsed = ParsedText("".join(self._text), calls, self._incomplete)
        self._text, self._deltas, self._incomplete = [], [], []
        return parsed
