"""``<tool_call>NAME\\n<arg_key>k</arg_key>\\n<arg_value>v</arg_value>…</tool_call>``: GLM 4.5-4.7.

Also Ling 3, Spark 2.5, Poolside and, with other tags, Hunyuan, IQuest and K2-Horizon. Line breaks
between the tags depend on the version; a value is used as it is.
"""

from typing import ClassVar

from radixlm.text.tools import schema
from radixlm.text.tools.json_calls import JsonBlocks
from radixlm.text.tools.parameters import ArgumentWriter, RawValue, read_key
from radixlm.text.tools.scan import Step


class Glm45(JsonBlocks):
    """A name, then pairs of keys and values. ``group_tags`` may enclose several calls."""

    call_tags: ClassVar[tuple[str, str]] = ("<tool_call>", "</tool_call>")
    group_tags: ClassVar[tuple[str, ...]] = ()
    name_end: ClassVar[str] = ""
    tag_prefix: ClassVar[str] = ""
    is_trimmed: ClassVar[bool] = False
    starts: ClassVar[tuple[str, ...]] = (call_tags[0],)

    def read_block(self, marker: str) -> Step[None]:
        if marker in self.group_tags:
            yield from self.scanner.spaces()
            yield from self.scanner.expect(self.call_tags[0])
        yield from self._call()
        if self.group_tags:
            yield from self.read_end(self.group_tags[1])

    def _call(self) -> Step[None]:
        scanner = self.scanner
        yield from scanner.spaces()
        if (yield from scanner.peek()) in ("{", "["):
            yield from self.read_json_calls()
            yield from self.read_end(self.call_tags[1])
            return
        name = yield from self.read_name()
        yield from scanner.spaces()
        if self.name_end:
            yield from scanner.expect(self.name_end)
        writer = ArgumentWriter(self, name)
        while (yield from self._is_pair()):
            yield from self._pair(writer)
        writer.close()

    def _is_pair(self) -> Step[bool]:
        yield from self.scanner.spaces()
        tag = yield from self.scanner.expect(self._tag("arg_key"), self.call_tags[1])
        return tag != self.call_tags[1]

    def _pair(self, writer: ArgumentWriter) -> Step[None]:
        scanner = self.scanner
        key = yield from read_key(self, self._tag("arg_key", "/"))
        yield from scanner.spaces()
        types = writer.types(key)
        if (yield from scanner.accept(self._tag("arg_type"))):
            declared = yield from read_key(self, self._tag("arg_type", "/"))
            types = types or frozenset((declared,))
            yield from scanner.spaces()
        yield from scanner.expect(self._tag("arg_value"))
        value = RawValue(
            self._tag("arg_value", "/"),
            self._tag("arg_key"),
            self.call_tags[1],
            is_trimmed=self.is_trimmed,
        )
        yield from value.read(scanner, writer, key, types or schema.ANY)

    def _tag(self, name: str, slash: str = "") -> str:
        return f"<{slash}{self.tag_prefix}{name}>"


class PoolsideV1(Glm45):
    """Line breaks before and after a value are not part of it."""

    is_trimmed = True


class Hunyuan(Glm45):
    """``<tool_calls><tool_call>NAME<tool_sep><arg_key>…</tool_call></tool_calls>``"""

    group_tags = ("<tool_calls>", "</tool_calls>")
    name_end = "<tool_sep>"
    starts = ("<tool_calls>", "<tool_call>")


class IQuestQ1(Glm45):
    """The same inside ``<iquest_tool_call>``."""

    call_tags = ("<iquest_tool_call>", "</iquest_tool_call>")
    starts = (call_tags[0],)


class K2Horizon(Glm45):
    """``<ifm|tool_call>NAME<ifm|arg_key>…``, with the type of a value in some; JSON in others."""

    call_tags = ("<ifm|tool_call>", "</ifm|tool_call>")
    group_tags = ("<ifm|tool_calls>", "</ifm|tool_calls>")
    tag_prefix = "ifm|"
    starts = (group_tags[0], call_tags[0])
