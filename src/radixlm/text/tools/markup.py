"""The parser that all tool-call formats share: text up to a marker, then a block of calls.

Rules for every format:

- White space between text and markup belongs to the markup, and so does white space after the
  last call; white space before text that follows a call is text.
- A block that is malformed before its first call was emitted is text, character for character.
  The search continues right after its opening marker.
- A call that was emitted and then becomes malformed is closed to valid JSON and reported as
  incomplete; the unused rest is text.
"""

import re
from collections.abc import Sequence
from typing import ClassVar

from radixlm.text.tools.base import ParsedText, ToolCallDelta, ToolSpec
from radixlm.text.tools.json_copy import JsonCopier
from radixlm.text.tools.scan import SPACES, Malformed, Scanner, Step, Truncated, marker_set

NAME_CHARS = re.compile(r"[^\s<>{}\[\]()\"'`,;=]+")
_MAX_NAME_CHARS = 256
_MIN_PART_CHARS = 4


class MarkupParser:
    """A ToolParser; a format defines ``starts``, ``stripped`` and ``read_block``."""

    starts: ClassVar[tuple[str, ...]] = ()
    """Markers that may open a block of calls."""
    stripped: ClassVar[tuple[str, ...]] = ()
    """Markers that are removed from the text."""
    bare_starts: ClassVar[str] = ""
    """Characters that open a block at the start of the message; ``read_block`` reads them too."""

    def __init__(self, tools: Sequence[ToolSpec] = (), *, drop_unknown: bool = False) -> None:
        self.scanner = Scanner()
        self.tools = {tool.name: tool for tool in tools}
        self._drop_unknown = drop_unknown
        self._markers = marker_set(*self.starts, *self.stripped)
        self._text: list[str] = []
        self._deltas: list[tuple[int, str | None, list[str], str | None]] = []
        self._incomplete: list[int] = []
        self._num_calls = 0
        self._closers: str | None = None
        self._is_dropping = False
        self._is_after_call = False
        self._machine = self._run()
        next(self._machine)

    # ToolParser

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

    # for the formats

    def read_block(self, marker: str) -> Step[None]:
        """Read a block of calls after its opening ``marker``."""
        raise NotImplementedError

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Emit the name of a call, which cannot be withdrawn."""
        self._is_dropping = self._drop_unknown and name not in self.tools
        if not self._is_dropping:
            self._deltas.append((self._num_calls, name, [], call_id))
        self._closers = "{}"
        self.scanner.commit()

    def put(self, fragment: str, closers: str) -> None:
        """Emit arguments; ``closers`` would complete all emitted so far to a valid JSON object."""
        self._emit(fragment)
        self._closers = closers
        self.scanner.commit()

    def end_call(self) -> None:
        """The arguments of the current call are complete."""
        self._closers = None
        self._num_calls += not self._is_dropping
        self._is_after_call = True
        self.scanner.commit()

    def add_call(self, name: str, arguments: str) -> None:
        """Emit a whole call with its JSON arguments."""
        self.begin_call(name)
        self.put(arguments, "")
        self.end_call()

    def read_name(self) -> Step[str]:
        """Read a function's name."""
        name = yield from self.scanner.take_while(NAME_CHARS, _MAX_NAME_CHARS)
        if not name:
            raise Truncated if self.scanner.is_ended and self.scanner.is_exhausted else Malformed
        return name

    def read_json_arguments(self, name: str, call_id: str | None = None) -> Step[None]:
        """Read a JSON object as the arguments of ``name``."""
        yield from self.scanner.spaces()
        if (yield from self.scanner.peek()) != "{":
            raise Truncated if self.scanner.is_exhausted else Malformed
        self.begin_call(name, call_id)
        yield from JsonCopier(self.scanner, self.put).value()
        self.end_call()

    def read_end(self, *literals: str, min_part: int = 1) -> Step[str]:
        """Read a closing marker and white space before it; nothing if there is none.

        A prefix of at least ``min_part`` characters at the message's end counts as one.
        """
        scanner = self.scanner
        scanner.commit()
        yield from scanner.spaces()
        found = yield from scanner.accept(*literals)
        num_left = len(scanner.buffer) - scanner.position
        if not found and num_left >= min_part and scanner.is_ended:
            found = next(filter(scanner.is_cut, literals), "")
            scanner.take(num_left if found else 0)
        if found:
            scanner.commit()
        else:
            scanner.rewind()
        return found

    def read_ends(self, *literals: str) -> Step[None]:
        """Read all closing markers that follow."""
        found = yield from self.read_end(*literals)
        while found:
            found = yield from self.read_end(*literals, min_part=_MIN_PART_CHARS)

    # the generator behind feed and finish

    def _run(self) -> Step[None]:
        if self.bare_starts:
            spaces = yield from self.scanner.spaces()
            opening = yield from self.scanner.peek()
            if opening and opening in self.bare_starts:
                yield from self._try_block(opening, len(spaces) + 1)
            else:
                self.scanner.rewind()
        while marker := (yield from self._plain_text()):
            num_chars = self.scanner.position - self.scanner.mark
            yield from self._try_block(marker, num_chars)

    def _plain_text(self) -> Step[str]:
        """Emit text up to the next opening marker; "" at the message's end."""
        scanner = self.scanner
        while True:
            at, marker = scanner.search(self._markers)
            end = len(scanner.buffer[scanner.position : at].rstrip(SPACES)) + scanner.position
            num_spaces = at - end
            self._emit_text(scanner.take(end - scanner.position))
            if marker in self.stripped and not self._is_after_call:
                self._emit_text(scanner.take(num_spaces))
                num_spaces = 0
            if marker:
                scanner.take(num_spaces + len(marker))
            elif scanner.is_ended:
                rest = scanner.take(len(scanner.buffer))
                self._emit_text("" if self._is_after_call else rest)
                return ""
            if marker in self.starts:
                return marker
            if marker:
                scanner.commit()
            else:
                yield

    def _try_block(self, marker: str, num_chars: int) -> Step[None]:
        """Read a block; if it is malformed, the unused part is text."""
        scanner = self.scanner
        num_commits = scanner.num_commits
        try:
            yield from self.read_block(marker)
            scanner.commit()
        except Malformed as error:
            self._close_malformed()
            scanner.rewind()
            if isinstance(error, Truncated):
                rest = scanner.take(len(scanner.buffer))
                self._emit_text("" if self._is_after_call and not rest.strip(SPACES) else rest)
            elif scanner.num_commits == num_commits:
                self._emit_text(scanner.take(num_chars))

    def _close_malformed(self) -> None:
        if self._closers is None:
            return
        self._emit(self._closers)
        if not self._is_dropping:
            self._incomplete.append(self._num_calls)
        self._closers = None
        self._num_calls += not self._is_dropping
        self._is_after_call = True

    def _emit_text(self, text: str) -> None:
        if text:
            self._text.append(text)
            self._is_after_call = self._is_after_call and not text.strip(SPACES)
            self.scanner.commit()

    def _emit(self, fragment: str) -> None:
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
