"""MiniMax M3: XML with the token ``]<]minimax[>[`` before every tag, arguments as elements.

    T<tool_call>T<invoke name="f">T<city>ParisT</city>T<days>T<item>1T</item>T</days>T</invoke>…

Members of an object and ``item``s of an array are elements again; leaves are typed by the schema.
"""

import re
from typing import Any

from radixlm.text.tools import schema
from radixlm.text.tools.markup import MarkupParser
from radixlm.text.tools.parameters import ArgumentWriter, RawValue, read_attribute, read_key
from radixlm.text.tools.scan import Malformed, Step

_T = "]<]minimax[>["
_INVOKE = f"{_T}<invoke "
_INVOKE_END = f"{_T}</invoke>"
_OUTER = (f"{_T}<tool_call>", f"{_T}</tool_call>")
_OPENING = re.compile(re.escape(_T) + r"<([^<>/\s]+)>")
_MAX_DEPTH = 32


class MiniMaxM3(MarkupParser):
    starts = (_OUTER[0], _INVOKE)

    def read_block(self, marker: str) -> Step[None]:
        if marker == _OUTER[0]:
            yield from self.scanner.spaces()
            yield from self.scanner.expect(_INVOKE)
        yield from self._invoke()
        yield from self.read_end(_OUTER[1])

    def _invoke(self) -> Step[None]:
        scanner = self.scanner
        name = yield from read_attribute(self, "name")
        yield from scanner.expect(">")
        writer = ArgumentWriter(self, name)
        while True:
            yield from scanner.spaces()
            if (yield from scanner.expect(f"{_T}<", _INVOKE_END)) == _INVOKE_END:
                break
            key = yield from read_key(self, ">")
            yield from self._element(writer, name, key)
        writer.close()

    def _element(self, writer: ArgumentWriter, name: str, key: str) -> Step[None]:
        scanner = self.scanner
        types = writer.types(key)
        end = f"{_T}</{key}>"
        if types == schema.STRING:
            yield from RawValue(end, f"{_T}<").read(scanner, writer, key, types)
            return
        raw = yield from scanner.until(end)
        tool = self.tools.get(name)
        root = (tool.parameters if tool else None) or {}
        value_schema = schema.member_schema(root, key, root)
        writer.value(key, schema.json_text(_value(raw, value_schema, root, 0)))


def _value(raw: str, value_schema: Any, root: dict[str, Any], depth: int) -> Any:
    """The value of an element's inside: elements again, or a leaf typed by the schema."""
    types = schema.schema_types(value_schema, root)
    if not _OPENING.match(raw.lstrip()):
        is_empty_list = "array" in types and not raw.strip()
        return [] if is_empty_list else schema.load_json(schema.convert(raw, types))
    if depth > _MAX_DEPTH:
        raise Malformed
    members = _members(raw)
    if all(key == "item" for key, _ in members) and "object" not in types:
        item = value_schema.get("items") if isinstance(value_schema, dict) else None
        return [_value(inside, item, root, depth + 1) for _, inside in members]
    return {
        key: _value(inside, schema.member_schema(value_schema, key, root), root, depth + 1)
        for key, inside in members
    }


def _members(raw: str) -> list[tuple[str, str]]:
    """(name, content) of the consecutive elements in ``raw``."""
    members = []
    at = 0
    while found := _OPENING.match(raw, _skip_spaces(raw, at)):
        key = found.group(1)
        inside_end, at = _closing(raw, key, found.end())
        members.append((key, raw[found.end() : inside_end]))
    if raw[at:].strip():
        raise Malformed
    return members


def _skip_spaces(raw: str, at: int) -> int:
    return len(raw) - len(raw[at:].lstrip())


def _closing(raw: str, key: str, at: int) -> tuple[int, int]:
    """End of the content, and of the whole element ``key`` that was opened before ``at``."""
    tag = re.compile(re.escape(_T) + rf"<(/?){re.escape(key)}>")
    depth = 1
    for found in tag.finditer(raw, at):
        depth += -1 if found.group(1) else 1
        if not depth:
            return found.start(), found.end()
    raise Malformed
