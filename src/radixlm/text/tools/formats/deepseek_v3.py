"""DeepSeek V3 and V3.1, and Kimi K2: a section of calls, each a name, a marker and JSON."""

from typing import ClassVar

from radixlm.text.tools.markup import MarkupParser
from radixlm.text.tools.scan import Step


class SectionBlocks(MarkupParser):
    """``section_begin (call_begin CALL call_end)* section_end``; the section may be missing."""

    section: ClassVar[tuple[str, str]] = ("", "")
    brackets: ClassVar[tuple[str, str]] = ("", "")

    def read_block(self, marker: str) -> Step[None]:
        if marker == self.section[0]:
            yield from self.scanner.spaces()
            yield from self.scanner.expect(self.brackets[0])
        yield from self.read_call()
        yield from self.read_ends(self.brackets[1], self.section[1])

    def read_call(self) -> Step[None]:
        raise NotImplementedError


class DeepSeekV31(SectionBlocks):
    """``NAME<｜tool▁sep｜>{...}``"""

    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    brackets = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    starts = (section[0], brackets[0])

    def read_call(self) -> Step[None]:
        yield from self.scanner.spaces()
        name = yield from self.read_name()
        yield from self.scanner.spaces()
        yield from self.scanner.expect("<｜tool▁sep｜>")
        yield from self.read_json_arguments(name)


class DeepSeekV3(DeepSeekV31):
    """``function<｜tool▁sep｜>NAME\\n```json\\n{...}\\n``` ``"""

    def read_call(self) -> Step[None]:
        yield from self.scanner.spaces()
        yield from self.scanner.expect("function")
        yield from self.scanner.expect("<｜tool▁sep｜>")
        name = yield from self.read_name()
        yield from self.scanner.spaces()
        fence = yield from self.scanner.accept("```json", "```")
        yield from self.read_json_arguments(name)
        if fence:
            yield from self.read_end("```")
