"""Harmony, the channels of gpt-oss: ``<|channel|>commentary to=functions.f<|message|>{...}``.

A message addressed to nobody is text whatever its channel; splitting off the analysis is the
reasoning parser's business, which passes addressed messages on as they are.
"""

from __future__ import annotations

from radixlm.text.tools.harmony import CHANNEL, ENDS, START, drop_cut_header, read_header
from radixlm.text.tools.markup import MarkupParser
from radixlm.text.tools.scan import Cut, Step


class GptOss(MarkupParser):
    starts = (CHANNEL, START)
    silent = ENDS

    def block(self, marker: str) -> Step[None]:
        try:
            header = yield from read_header(self.scanner, marker)
        except Cut:
            drop_cut_header(self.scanner)
            raise
        if header.function is None:
            return
        yield from self.json_arguments(header.function)
        yield from self.end(*ENDS)
