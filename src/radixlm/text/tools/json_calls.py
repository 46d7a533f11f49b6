"""Calls written as JSON objects: ``{"name": "f", "arguments": {...}}``, alone or in an array."""

import json
from typing import Any, ClassVar

from radixlm.text.tools import schema
from radixlm.text.tools.json_copy import JsonCopier, copy_string
from radixlm.text.tools.markup import MarkupParser
from radixlm.text.tools.scan import Malformed, Step, Truncated

_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters", "args")
_PLAIN_KEYS = frozenset(("name", "arguments", "parameters", "type", "id", "function", "index"))


class JsonBlocks(MarkupParser):
    """One JSON object, several, or an array of them, up to one of ``ends``."""

    ends: ClassVar[tuple[str, ...]] = ()

    def read_block(self, marker: str) -> Step[None]:
        yield from self.read_json_calls(is_bare=bool(marker) and marker in self.bare_starts)
        if self.ends:
            yield from self.read_end(*self.ends)

    def read_call(self, is_bare: bool) -> Step[None]:
        """Read one object; formats may override this."""
        yield from _JsonCall(self, is_bare).read()

    def read_json_calls(self, is_bare: bool = False) -> Step[None]:
        scanner = self.scanner
        yield from scanner.spaces()
        is_array = bool((yield from scanner.accept("[")))
        yield from scanner.spaces()
        yield from self.read_call(is_bare)
        while (yield from self._is_followed_by_call(is_array)):
            yield from self.read_call(is_bare)
        if is_array:
            yield from self.read_end("]")

    def _is_followed_by_call(self, is_array: bool) -> Step[bool]:
        """Read the separator before a further object; nothing if none follows."""
        scanner = self.scanner
        scanner.commit()
        yield from scanner.spaces()
        yield from scanner.accept(*(",",) if is_array else (",", ";"))
        yield from scanner.spaces()
        if (yield from scanner.peek()) == "{":
            return True
        scanner.rewind()
        return False


class _JsonCall:
    """Reads one object, streaming the arguments if the name precedes them.

    ``is_bare``: there was no marker, so the object may have the keys of a call only.
    """

    def __init__(self, parser: MarkupParser, is_bare: bool) -> None:
        self._parser = parser
        self._scanner = parser.scanner
        self._is_bare = is_bare
        self._name: str | None = None
        self._arguments: str | None = None
        self._is_emitted = False
        self._is_nested = False
        self._has_unknown_keys = False

    def read(self) -> Step[None]:
        yield from self._fields()
        if self._is_emitted:
            return
        must_have_arguments = self._is_bare or self._has_unknown_keys
        if not self._name or (must_have_arguments and self._arguments is None):
            raise Malformed
        self._parser.add_call(self._name, self._arguments or "{}")

    def _fields(self) -> Step[None]:
        scanner = self._scanner
        yield from scanner.expect("{")
        is_first = True
        while True:
            yield from scanner.spaces()
            comma = "" if is_first else (yield from scanner.accept(","))
            yield from scanner.spaces()
            if (yield from scanner.accept("}")):
                return
            if self._is_emitted and not comma:
                return  # a missing brace after complete arguments
            if not is_first and not comma:
                raise Truncated if scanner.is_exhausted else Malformed
            is_first = False
            key = json.loads((yield from JsonCopier(scanner, _ignore).key()).rstrip(": \t\r\n"))
            yield from self._field(key)

    def _field(self, key: str) -> Step[None]:
        char = yield from self._scanner.peek()
        if self._is_bare and key not in _PLAIN_KEYS:
            raise Malformed
        if key in _ARGUMENT_KEYS and self._arguments is None and not self._is_emitted:
            yield from self._argument_field(char)
        elif key == "function" and char == "{" and not self._is_nested:
            self._is_nested = True
            yield from self._fields()
        elif char == '"' and not self._name and key in (*_NAME_KEYS, "function"):
            self._name = json.loads((yield from self._raw_value()))
        else:
            self._has_unknown_keys = self._has_unknown_keys or key not in _PLAIN_KEYS
            yield from self._raw_value()

    def _argument_field(self, char: str) -> Step[None]:
        if char == "{" and self._name:
            self._is_emitted = True
            yield from self._parser.read_json_arguments(self._name)
        elif char == "{":
            self._arguments = yield from self._raw_value()
        else:
            self._arguments = _as_object((yield from self._raw_value()))

    def _raw_value(self) -> Step[str]:
        parts: list[str] = []
        yield from JsonCopier(self._scanner, lambda text, _: parts.append(text)).value()
        return "".join(parts)


class NamedJsonBlocks(JsonBlocks):
    """Objects whose only key is the name: ``{"f": {...}}``."""

    def read_call(self, is_bare: bool) -> Step[None]:
        scanner = self.scanner
        yield from scanner.expect("{")
        yield from scanner.spaces()
        yield from scanner.expect('"')
        parts: list[str] = []
        yield from copy_string(scanner, parts.append, 256)
        name = json.loads('"' + "".join(parts) + '"')
        yield from scanner.spaces()
        yield from scanner.expect(":")
        if not name:
            raise Malformed
        yield from self.read_json_arguments(name)
        yield from self.read_end("}")


def _as_object(raw: str) -> str:
    """Arguments that are null, or an object written as a string."""
    value: Any = json.loads(raw)
    if isinstance(value, str):
        value = schema.load_json(value) if value.strip() else {}
        if value is None:
            raise Malformed
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise Malformed
    try:
        return schema.json_text(value)
    except ValueError:  # a number too large to be finite
        raise Malformed from None


def _ignore(fragment: str, closers: str) -> None:
    """Discard a fragment."""
