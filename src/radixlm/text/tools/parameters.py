"""Arguments that a format writes one by one as raw text between markers, as a JSON object."""

import re
from collections.abc import Callable

from radixlm.text.tools import schema
from radixlm.text.tools.markup import MarkupParser
from radixlm.text.tools.scan import Malformed, Scanner, Step, Truncated, marker_set


class ArgumentWriter:
    """Writes the arguments of one call; the first value, or ``close``, emits the call's name."""

    def __init__(self, parser: MarkupParser, name: str, call_id: str | None = None) -> None:
        self._parser = parser
        self._name = name
        self._call_id = call_id
        self._num_values = 0

    def types(self, key: str) -> frozenset[str]:
        """JSON types that the tool's schema allows for ``key``."""
        return schema.parameter_types(self._parser.tools.get(self._name), key)

    def value(self, key: str, value_json: str) -> None:
        self._parser.put(self._key(key) + value_json, "}")

    def open_string(self, key: str) -> None:
        self._parser.put(self._key(key) + '"', '"}')

    def string_part(self, text: str) -> None:
        self._parser.put(schema.escape(text), '"}')

    def close_string(self) -> None:
        self._parser.put('"', "}")

    def close(self) -> None:
        if not self._num_values:
            self._parser.begin_call(self._name, self._call_id)
        self._parser.put("}" if self._num_values else "{}", "")
        self._parser.end_call()

    def _key(self, key: str) -> str:
        if not self._num_values:
            self._parser.begin_call(self._name, self._call_id)
        self._num_values += 1
        return ("{" if self._num_values == 1 else ", ") + schema.json_text(key) + ": "


class RawValue:
    """A raw value ends at ``end``, but only if white space and one of ``follow`` come next.

    So a value may contain its own end marker. ``is_trimmed``: one line break after the opening and
    one before ``end`` are not part of the value.
    """

    def __init__(self, end: str, *follow: str, is_trimmed: bool = False) -> None:
        self.end = end
        self.follow = follow
        self.is_trimmed = is_trimmed
        self._markers = marker_set(end)

    def read(
        self, scanner: Scanner, writer: ArgumentWriter, key: str, types: frozenset[str]
    ) -> Step[None]:
        """Read the value of ``key``; a string is emitted while it arrives."""
        if self.is_trimmed:
            yield from scanner.accept("\r\n", "\n")
        if types == schema.STRING:
            writer.open_string(key)
            yield from self._stream(scanner, writer)
            writer.close_string()
            return
        parts: list[str] = []
        yield from self._copy(scanner, parts.append)
        writer.value(key, schema.convert("".join(parts), types))

    def _stream(self, scanner: Scanner, writer: ArgumentWriter) -> Step[None]:
        try:
            yield from self._copy(scanner, writer.string_part)
        except Truncated:
            scanner.take(len(scanner.buffer))  # a part of the end marker
            scanner.commit()
            raise

    def _copy(self, scanner: Scanner, put: Callable[[str], None]) -> Step[None]:
        while True:
            at, marker = scanner.search(self._markers)
            if not marker and scanner.is_ended:
                partial = scanner.partial(self._markers, at)
                at = partial if partial >= 0 else at
            text = scanner.buffer[scanner.position : at]
            held = self._num_held(text, bool(marker))
            if marker:
                scanner.take(len(text) + len(marker))
                is_end = yield from self._is_end(scanner)
                put(text[: len(text) - held] if is_end else text + marker)
                if is_end:
                    return
            elif len(text) > held:
                put(scanner.take(len(text) - held))
            else:
                yield from scanner.more()

    def _num_held(self, text: str, is_whole: bool) -> int:
        """Length of a line break at the end of ``text`` that may belong to the markup."""
        if not self.is_trimmed or not text.endswith(("\n", "\r")):
            return 0
        if text.endswith("\r"):
            return 0 if is_whole else 1
        return 2 if text.endswith("\r\n") else 1

    def _is_end(self, scanner: Scanner) -> Step[bool]:
        """Whether the following text shows that the marker just read ends the value."""
        if not self.follow:
            return True
        num_spaces = len((yield from scanner.spaces()))
        found = yield from scanner.looking_at(*self.follow)
        is_cut = scanner.is_ended and any(map(scanner.is_cut, self.follow))
        scanner.position -= num_spaces
        return bool(found) or is_cut


def read_attribute(parser: MarkupParser, *names: str) -> Step[str]:
    """Read ``name="value"`` (quotes may be single or missing); returns the unescaped value."""
    scanner = parser.scanner
    yield from scanner.spaces()
    yield from scanner.expect(*(f"{name}=" for name in names))
    quote = yield from scanner.accept('"', "'")
    value = yield from scanner.take_while(_QUOTED[quote], _MAX_KEY_CHARS)
    if quote:
        yield from scanner.expect(quote)
    if not value:
        raise Malformed
    for entity, char in _ENTITIES:
        value = value.replace(entity, char)
    return value


def read_key(parser: MarkupParser, end: str) -> Step[str]:
    """Read an argument's name and the marker after it."""
    key = yield from parser.scanner.take_while(_KEY_CHARS, _MAX_KEY_CHARS)
    yield from parser.scanner.expect(end)
    if not key.strip():
        raise Malformed
    return key.strip()


def read_json_body(parser: MarkupParser, name: str) -> Step[bool]:
    """Read all arguments of ``name`` as one JSON object, if there is one."""
    yield from parser.scanner.spaces()
    if (yield from parser.scanner.peek()) != "{":
        return False
    yield from parser.read_json_arguments(name)
    return True


_MAX_KEY_CHARS = 256
_ENTITIES = (("&quot;", '"'), ("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&"))
_KEY_CHARS = re.compile(r"[^<>\n]+")
_QUOTED = {
    '"': re.compile(r'[^"<>\n]+'),
    "'": re.compile(r"[^'<>\n]+"),
    "": re.compile(r"[^\s\"'<>]+"),
}
