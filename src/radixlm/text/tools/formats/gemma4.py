"""``<|tool_call>call:NAME{key:<|"|>text<|"|>,n:1}<tool_call|>``: Gemma 4.

JSON except for strings, which are written between ``<|"|>`` without escapes, and unquoted keys.
"""

import re

from radixlm.text.tools import schema
from radixlm.text.tools.json_copy import JsonCopier
from radixlm.text.tools.markup import MarkupParser
from radixlm.text.tools.scan import Malformed, MarkerSet, Step

_QUOTE = '<|"|>'
_KEY_CHARS = re.compile(r"[^:<>{}\[\],\s\"]+")
_MARKERS = MarkerSet(_QUOTE)


class Gemma4(MarkupParser):
    starts = ("<|tool_call>",)
    ends = ("<tool_call|>",)

    def read_block(self, marker: str) -> Step[None]:
        scanner = self.scanner
        yield from scanner.spaces()
        yield from scanner.expect("call:")
        name = yield from self.read_name()
        yield from scanner.spaces()
        if (yield from scanner.looking_at("{")) != "{":
            raise Malformed
        self.begin_call(name)
        yield from _GemmaCopier(scanner, self.put).value()
        self.end_call()
        yield from self.read_end(*self.ends)


class _GemmaCopier(JsonCopier):
    def key(self) -> Step[str]:
        scanner = self.scanner
        if (yield from scanner.peek()) == '"':
            return (yield from super().key())
        quoted = yield from scanner.accept(_QUOTE)
        key = yield from (
            scanner.until(_QUOTE, 256) if quoted else scanner.take_while(_KEY_CHARS, 256)
        )
        yield from scanner.spaces()
        yield from scanner.expect(":")
        yield from scanner.spaces()
        if not key:
            raise Malformed
        return schema.json_text(key) + ": "

    def item(self, held: str) -> Step[None]:
        if not (yield from self.scanner.accept(_QUOTE)):
            yield from super().item(held)
            return
        closers = '"' + self.closers()
        self.put(held + '"', closers)
        while True:
            at, marker = self.scanner.search(_MARKERS)
            text = self.scanner.take(at - self.scanner.position)
            if marker:
                self.scanner.take(len(marker))
            if text:
                self.put(schema.escape(text), closers)
            if marker:
                break
            yield from self.scanner.more()
        self.put('"', self.closers())
