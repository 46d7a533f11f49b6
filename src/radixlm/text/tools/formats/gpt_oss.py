"""Harmony, the channels of gpt-oss: ``<|channel|>commentary to=functions.f<|message|>{...}``.

A message without a recipient is text in every channel. The reasoning parser removes the analysis
and passes messages with a recipient on unchanged.
"""

from radixlm.text.tools.harmony import CHANNEL, ENDS, START, drop_truncated_header, read_header
from radixlm.text.tools.markup import MarkupParser
from radixlm.text.tools.scan import Step, Truncated


class GptOss(MarkupParser):
    starts = (CHANNEL, START)
    stripped = ENDS

    def read_block(self, marker: str) -> Step[None]:
        try:
            header = yield from read_header(self.scanner, marker)
        except Truncated:
            drop_truncated_header(self.scanner)
            raise
        if header.function is None:
            return
        yield from self.read_json_arguments(header.function)
        yield from self.read_end(*ENDS)
