"""Reasoning between two markers.

White space around the reasoning, and before the text that follows it, is dropped. Unexpected
markers, such as an end marker outside the reasoning, are dropped. Once reasoning has ended, plain
text that reads as a start marker is text, as in SGLang, and so are the markers that close it.
"""

from radixlm.text.reasoning.table import Markers
from radixlm.text.tools.scan import SPACES, Scanner, Step, marker_set


class MarkupReasoning:
    """A ReasoningParser for ``markers``.

    ``starts_inside``: the message begins inside the reasoning (the prompt opened it).
    Without ``stream_reasoning`` the reasoning is returned at once when it ends.
    """

    def __init__(
        self, markers: Markers, *, starts_inside: bool, stream_reasoning: bool = True
    ) -> None:
        self.scanner = Scanner()
        self.markers = markers
        self.is_inside = starts_inside
        self.has_reasoned = False
        self._was_inside = starts_inside
        self._is_over = False  # a start marker is text from now on
        self._num_quoted = 0  # start markers in the text that no end marker has closed
        self._stream_reasoning = stream_reasoning
        self._inside = marker_set(
            *markers.starts, *markers.ends, *markers.breaks, *markers.stripped
        )
        resume = (markers.resume,) if markers.resume else ()
        self._outside = marker_set(*markers.starts, *markers.ends, *markers.stripped, *resume)
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self._machine = self.run()
        next(self._machine)

    def feed(self, chunk: str) -> tuple[str, str]:
        if chunk and not self.scanner.is_ended:
            self.scanner.push(chunk)
            next(self._machine, None)
        return self._drain()

    def finish(self) -> tuple[str, str]:
        if not self.scanner.is_ended:
            self.scanner.is_ended = True
            next(self._machine, None)
        return self._drain()

    def run(self) -> Step[None]:
        """The generator behind feed and finish: reasoning and text in turn."""
        while not (self.scanner.is_ended and self.scanner.is_exhausted):
            if self.is_inside:
                yield from self._read_reasoning()
            else:
                yield from self._read_text()

    def add_reasoning(self, text: str) -> None:
        self._reasoning.append(text)
        self.scanner.commit()

    def add_text(self, text: str) -> None:
        self._text.append(text)
        self.scanner.commit()

    def _read_reasoning(self) -> Step[None]:
        """Read up to a marker that ends the reasoning; drop white space at both ends."""
        scanner = self.scanner
        is_blank = True
        while True:
            at, marker = scanner.search(self._inside)
            text = scanner.buffer[scanner.position : at]
            body = text.strip(SPACES)
            if is_blank and body:
                scanner.take(len(text) - len(text.lstrip(SPACES)))
                self.add_reasoning("\n" if self.has_reasoned else "")
                is_blank, self.has_reasoned = False, True
                self.add_reasoning(scanner.take(len(body)))
            elif body:
                self.add_reasoning(scanner.take(len(text.rstrip(SPACES))))
            is_end = marker in self.markers.ends or marker in self.markers.breaks
            if marker and not is_end:
                self._drop_marker(marker, is_blank)
            elif marker or scanner.is_ended:
                self._end_reasoning(marker)
                return
            else:
                yield

    def _drop_marker(self, marker: str, is_blank: bool) -> None:
        """Drop an unexpected marker; white space before it separates words."""
        spaces = self.scanner.take(
            self.scanner.buffer.index(marker, self.scanner.position) - self.scanner.position
        )
        self.scanner.take(len(marker))
        self.add_reasoning("" if is_blank else spaces)

    def _end_reasoning(self, marker: str) -> None:
        """End the reasoning at ``marker``, or at the message's end."""
        scanner = self.scanner
        end = scanner.buffer.index(marker, scanner.position) if marker else len(scanner.buffer)
        scanner.take(end - scanner.position)
        if marker in self.markers.ends:
            scanner.take(len(marker))
        scanner.commit()
        self.is_inside, self._was_inside = False, True
        self._is_over = marker in self.markers.ends and not self.markers.is_special

    def _read_text(self) -> Step[None]:
        """Read up to a start marker; drop white space after reasoning and around markup."""
        scanner = self.scanner
        is_blank, is_trimming = True, self._was_inside
        while True:
            at, marker = scanner.search(self._outside)
            text = scanner.buffer[scanner.position : at]
            if is_blank and (body := text.lstrip(SPACES)):
                spaces = scanner.take(len(text) - len(body))
                self.add_text("" if is_trimming else spaces)
                is_blank = False
            if not is_blank:
                self.add_text(scanner.take(at - scanner.position))
            if marker and self._is_quoted(marker):
                spaces = scanner.take(at - scanner.position)
                self.add_text(("" if is_trimming else spaces) + scanner.take(len(marker)))
                is_blank = False
                continue
            if marker:
                scanner.take(at - scanner.position + len(marker))
                self.add_text(marker if marker == self.markers.resume else "")
                is_trimming = True
            if marker and marker in (*self.markers.starts, self.markers.resume):
                self.is_inside = True
                return
            if not marker and scanner.is_ended:
                rest = scanner.take(len(scanner.buffer))
                self.add_text("" if is_trimming else rest)
                return
            if not marker:
                yield

    def _is_quoted(self, marker: str) -> bool:
        """Whether a marker in the text is text. Counts those that are open."""
        if self._is_over and marker in self.markers.starts:
            self._num_quoted += 1
            return True
        is_closed = self._num_quoted > 0 and marker in self.markers.ends
        self._num_quoted -= is_closed
        return is_closed

    def _drain(self) -> tuple[str, str]:
        text, self._text = "".join(self._text), []
        is_held = self.is_inside and not self._stream_reasoning and not self.scanner.is_ended
        if is_held:
            return "", text
        reasoning, self._reasoning = "".join(self._reasoning), []
        return reasoning, text


class AppendThink:
    """Splits nothing: puts the start marker, which is in the prompt, before the text."""

    def __init__(
        self, markers: Markers, *, starts_inside: bool, stream_reasoning: bool = True
    ) -> None:
        self._prefix = markers.starts[0] if starts_inside else ""

    def feed(self, chunk: str) -> tuple[str, str]:
        if not chunk:
            return "", ""
        prefix, self._prefix = self._prefix, ""
        return "", prefix + chunk

    def finish(self) -> tuple[str, str]:
        prefix, self._prefix = self._prefix, ""
        return "", prefix
