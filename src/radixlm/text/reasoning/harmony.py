"""The channels of gpt-oss: analysis is reasoning, all else is text.

A message addressed to a tool is passed on with its markup, for the tool parser to read; run that
parser on the text whether or not the request has tools, and no markup is left.
"""

from __future__ import annotations

from radixlm.text.reasoning.markup import MarkupReasoning
from radixlm.text.tools.harmony import ANALYSIS, CHANNEL, ENDS, START, drop_cut_header, read_header
from radixlm.text.tools.scan import Cut, Malformed, MarkerSet, Step

_MARKERS = MarkerSet(CHANNEL, START, *ENDS)


class HarmonyReasoning(MarkupReasoning):
    _is_call = False

    def run(self) -> Step[None]:
        scanner = self.scanner
        while True:
            at, marker = scanner.search(_MARKERS)
            self._give(scanner.take(at - scanner.position))
            if marker in ENDS:
                scanner.take(len(marker))
                self._give(marker if self._is_call else "")
                self._is_call = self.is_inside = False
            elif marker:
                yield from self._header(marker)
            elif scanner.is_ended:
                return
            else:
                yield

    def _header(self, marker: str) -> Step[None]:
        """Read a message's header and turn to where its content goes."""
        scanner = self.scanner
        scanner.take(len(marker))
        try:
            header = yield from read_header(scanner, marker)
        except Malformed as error:
            is_cut = isinstance(error, Cut)
            if is_cut:
                drop_cut_header(scanner)
            scanner.rewind()
            self._give(scanner.take(len(scanner.buffer) if is_cut else len(marker)))
            return
        self._is_call = header.function is not None
        self.is_inside = header.channel == ANALYSIS and not self._is_call
        self._give(header.raw if self._is_call else "")
        if self.is_inside and self.has_reasoned:
            self.think("\n")

    def _give(self, text: str) -> None:
        if self.is_inside:
            self.has_reasoned = self.has_reasoned or bool(text)
            self.think(text)
        else:
            self.say(text)
