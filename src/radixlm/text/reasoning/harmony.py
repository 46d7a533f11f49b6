"""The channels of gpt-oss: analysis is reasoning, everything else is text.

A message to a tool is passed on with its markup for the tool-call parser, which must run even
if the request has no tools: it removes the markup.
"""

from radixlm.text.reasoning.markup import MarkupReasoning
from radixlm.text.tools.harmony import (
    ANALYSIS,
    CHANNEL,
    ENDS,
    START,
    drop_truncated_header,
    read_header,
)
from radixlm.text.tools.scan import Malformed, MarkerSet, Step, Truncated

_MARKERS = MarkerSet(CHANNEL, START, *ENDS)


class HarmonyReasoning(MarkupReasoning):
    _is_call = False

    def run(self) -> Step[None]:
        scanner = self.scanner
        while True:
            at, marker = scanner.search(_MARKERS)
            self._emit(scanner.take(at - scanner.position))
            if marker in ENDS:
                scanner.take(len(marker))
                self._emit(marker if self._is_call else "")
                self._is_call = self.is_inside = False
            elif marker:
                yield from self._header(marker)
            elif scanner.is_ended:
                return
            else:
                yield

    def _header(self, marker: str) -> Step[None]:
        """Read a message's header, which decides what its content is."""
        scanner = self.scanner
        scanner.take(len(marker))
        try:
            header = yield from read_header(scanner, marker)
        except Malformed as error:
            is_truncated = isinstance(error, Truncated)
            if is_truncated:
                drop_truncated_header(scanner)
            scanner.rewind()
            self._emit(scanner.take(len(scanner.buffer) if is_truncated else len(marker)))
            return
        self._is_call = header.function is not None
        self.is_inside = header.channel == ANALYSIS and not self._is_call
        self._emit(header.raw if self._is_call else "")
        if self.is_inside and self.has_reasoned:
            self.add_reasoning("\n")

    def _emit(self, text: str) -> None:
        if self.is_inside:
            self.has_reasoned = self.has_reasoned or bool(text)
            self.add_reasoning(text)
        else:
            self.add_text(text)
