"""XTML of Kimi K3: ``<|open|>call tool="F" index="1"<|sep|>…<|close|>call<|sep|>``.

An argument is ``<|open|>argument key="k" type="string"<|sep|>v<|close|>argument<|sep|>``; the
text of a reply is in a ``response`` element.
"""

from radixlm.text.tools import schema
from radixlm.text.tools.markup import MarkupParser
from radixlm.text.tools.parameters import ArgumentWriter, RawValue, read_attribute
from radixlm.text.tools.scan import Step

_CALL = "<|open|>call"
_CALL_END = "<|close|>call<|sep|>"
_ARGUMENT = "<|open|>argument"
_TOOLS = ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>")


class KimiK3(MarkupParser):
    starts = (_TOOLS[0], _CALL)
    stripped = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
    value = RawValue("<|close|>argument<|sep|>", _ARGUMENT, _CALL_END)

    def read_block(self, marker: str) -> Step[None]:
        if marker == _TOOLS[0]:
            yield from self.scanner.spaces()
            yield from self.scanner.expect(_CALL)
        yield from self._call()
        yield from self.read_end(_TOOLS[1])

    def _call(self) -> Step[None]:
        scanner = self.scanner
        name = yield from read_attribute(self, "tool")
        yield from scanner.spaces()
        if not (yield from scanner.accept("<|sep|>")):
            yield from read_attribute(self, "index")
            yield from scanner.expect("<|sep|>")
        writer = ArgumentWriter(self, name)
        while True:
            yield from scanner.spaces()
            if (yield from scanner.expect(_ARGUMENT, _CALL_END)) == _CALL_END:
                break
            yield from self._argument(writer)
        writer.close()

    def _argument(self, writer: ArgumentWriter) -> Step[None]:
        scanner = self.scanner
        key = yield from read_attribute(self, "key")
        types = writer.types(key)
        yield from scanner.spaces()
        if not (yield from scanner.accept("<|sep|>")):
            kind = yield from read_attribute(self, "type")
            types = schema.STRING if kind == "string" else types - schema.STRING
            yield from scanner.expect("<|sep|>")
        yield from self.value.read(scanner, writer, key, types)
