"""Copy one JSON value out of a message while it arrives, as valid JSON only.

A fragment is emitted only if closing brackets alone would complete it: a key waits for its value's
first character, a number for the character after it. Harmless mistakes of models are corrected:
raw control characters in strings, unknown escapes, lone surrogates, a superfluous comma.
"""

import re
from collections.abc import Callable
from typing import TypeAlias

from radixlm.text.tools.scan import Malformed, Scanner, Step, Truncated

Put: TypeAlias = Callable[[str, str], None]
"""put(fragment, closers): ``closers`` complete all fragments so far to a valid value."""

MAX_DEPTH = 128
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR_CHARS = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_HEX = re.compile(r"[0-9a-fA-F]")
_CONTROL = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
_MAX_SCALAR_CHARS = 1024
_MAX_KEY_CHARS = 1 << 16


class JsonCopier:
    """Copies the value at the scanner's position to ``put``; iterative, so depth needs no stack."""

    def __init__(self, scanner: Scanner, put: Put) -> None:
        self.scanner = scanner
        self.put = put
        self._open: list[str] = []
        self._is_first = False

    def value(self) -> Step[None]:
        yield from self.item("")
        while self._open:
            yield from self._member()

    def item(self, held: str) -> Step[None]:
        """A whole string or scalar, or the opening of a container; ``held`` is put before it."""
        char = yield from self.scanner.peek()
        if char in ("{", "["):
            yield from self._descend(held, char)
        elif char == '"':
            self.scanner.take(1)
            closers = '"' + self.closers()
            self.put(held + '"', closers)
            yield from copy_string(self.scanner, lambda text: self.put(text, closers))
            self.put('"', self.closers())
        else:
            scalar = yield from self.scanner.take_while(_SCALAR_CHARS, _MAX_SCALAR_CHARS)
            if self.scanner.is_ended and self.scanner.is_exhausted:
                raise Truncated
            if not _SCALAR.fullmatch(scalar):
                raise Malformed
            self.put(held + scalar, self.closers())

    def key(self) -> Step[str]:
        """A member's key with its colon, as JSON."""
        scanner = self.scanner
        yield from scanner.expect('"')
        parts = ['"']
        yield from copy_string(scanner, parts.append, _MAX_KEY_CHARS)
        parts.append('"')
        parts.append((yield from scanner.spaces()))
        parts.append((yield from scanner.expect(":")))
        parts.append((yield from scanner.spaces()))
        return "".join(parts)

    def _descend(self, held: str, char: str) -> Step[None]:
        if len(self._open) >= MAX_DEPTH:
            raise Malformed
        self.scanner.take(1)
        self._open.append("}" if char == "{" else "]")
        self._is_first = True
        self.put(held + char, self.closers())
        yield from ()

    def _member(self) -> Step[None]:
        scanner = self.scanner
        closer = self._open[-1]
        held = yield from scanner.spaces()
        comma = "" if self._is_first else (yield from scanner.accept(","))
        after_comma = (yield from scanner.spaces()) if comma else ""
        if (yield from scanner.accept(closer)):
            self._open.pop()
            self._is_first = False
            self.put(held + closer, self.closers())
            return
        if not comma and not self._is_first:
            raise Truncated if scanner.is_ended and scanner.is_exhausted else Malformed
        self._is_first = False
        held += comma + after_comma
        if closer == "}":
            held += yield from self.key()
        yield from self.item(held)

    def closers(self) -> str:
        return "".join(reversed(self._open))


def copy_string(
    scanner: Scanner, put: Callable[[str], None], limit_chars: int = 1 << 30
) -> Step[None]:
    """Copy a JSON string after its opening quote; the closing quote is read but not copied."""
    num_chars = 0
    while True:
        run = scanner.take_run(_PLAIN)
        num_chars += len(run)
        if num_chars > limit_chars:
            raise Malformed
        if run:
            put(run)
        if scanner.is_exhausted:
            yield from scanner.more()
            continue
        char = scanner.take(1)
        if char == '"':
            return
        if char == "\\":
            yield from _copy_escape(scanner, put)
        else:
            put(_CONTROL.get(char) or f"\\u{ord(char):04x}")


def _copy_escape(scanner: Scanner, put: Callable[[str], None]) -> Step[None]:
    kind = yield from scanner.next_char()
    if kind == "u":
        code = yield from _hex_digits(scanner)
        yield from _copy_code(scanner, put, code)
    elif kind in '"\\/bfnrt':
        put("\\" + kind)
    elif kind == "'":
        put("'")
    else:
        put("\\\\" + (kind if kind >= " " else _CONTROL.get(kind) or f"\\u{ord(kind):04x}"))


def _copy_code(scanner: Scanner, put: Callable[[str], None], code: str) -> Step[None]:
    """Copy ``\\uXXXX``: surrogate pairs together, a lone surrogate as U+FFFD."""
    while True:
        value = int(code, 16) if len(code) == 4 else -1
        if value < 0:
            put("\\\\u" + code)
            return
        if not 0xD800 <= value <= 0xDFFF:
            put("\\u" + code)
            return
        if value >= 0xDC00 or not (yield from scanner.accept("\\u")):
            put("\\ufffd")
            return
        low = yield from _hex_digits(scanner)
        if len(low) == 4 and 0xDC00 <= int(low, 16) <= 0xDFFF:
            put(f"\\u{code}\\u{low}")
            return
        put("\\ufffd")
        code = low


def _hex_digits(scanner: Scanner) -> Step[str]:
    """Up to four hexadecimal digits."""
    digits = ""
    while len(digits) < 4:
        char = yield from scanner.peek()
        if not char:
            raise Truncated
        if not _HEX.match(char):
            break
        digits += scanner.take(1)
    return digits
