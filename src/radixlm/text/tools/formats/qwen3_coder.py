"""``<tool_call><function=NAME><parameter=K>V</parameter></function></tool_call>``: Qwen3-Coder.

Also Step 3.5, Nanbeige, MiMo and Seed-OSS. Line breaks around a value are not part of it; some
models omit the outer tag.
"""

from typing import ClassVar

from radixlm.text.tools.markup import MarkupParser
from radixlm.text.tools.parameters import ArgumentWriter, RawValue, read_key
from radixlm.text.tools.scan import Step

_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="


class Qwen3Coder(MarkupParser):
    outer: ClassVar[tuple[str, str]] = ("<tool_call>", "</tool_call>")
    starts = (outer[0], _FUNCTION)
    value = RawValue("</parameter>", _PARAMETER, _FUNCTION_END, outer[1], is_trimmed=True)

    def read_block(self, marker: str) -> Step[None]:
        if marker != _FUNCTION:
            yield from self.scanner.spaces()
            yield from self.scanner.expect(_FUNCTION)
        yield from self._function()
        yield from self.read_end(self.outer[1])

    def _function(self) -> Step[None]:
        scanner = self.scanner
        name = yield from self.read_name()
        yield from scanner.expect(">")
        writer = ArgumentWriter(self, name)
        while True:
            yield from scanner.spaces()
            if (yield from scanner.looking_at(self.outer[1])):
                break  # the function has no end tag
            if (yield from scanner.expect(_PARAMETER, _FUNCTION_END)) == _FUNCTION_END:
                break
            key = yield from read_key(self, ">")
            yield from self.value.read(scanner, writer, key, writer.types(key))
        writer.close()


class SeedOss(Qwen3Coder):
    """The same inside ``<seed:tool_call>``."""

    outer = ("<seed:tool_call>", "</seed:tool_call>")
    starts = (outer[0], _FUNCTION)
    value = RawValue("</parameter>", _PARAMETER, _FUNCTION_END, outer[1], is_trimmed=True)
