"""``[f(a=1, b="x"), g()]``: Llama 4, Llama 3.2, LFM2, Olmo 3.

A call is emitted after its closing bracket, if it is a Python call with literal keyword arguments;
any other list is text.
"""

import ast
import json
import re
from typing import Any, ClassVar

from radixlm.text.tools import schema
from radixlm.text.tools.json_calls import JsonBlocks
from radixlm.text.tools.scan import Malformed, Scanner, Step, Truncated

_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_NAME_CHARS = re.compile(r"[\w.\-]+")
_PLAIN = re.compile(r"[^\"'()\[\]{}\\]+")
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_CONSTANTS = {"true": True, "false": False, "null": None}
_MAX_DEPTH = 64
_MAX_CALL_CHARS = 1 << 20
_KEYWORD = re.compile(r"([(,]\s*)(from|in|class|import|global|is|not|or|and|if|for|as|with)(\s*=)")
_KEYWORD_MARK = "_keyword_of_python"


class Pythonic(JsonBlocks):
    wraps: ClassVar[tuple[str, ...]] = ("<|python_end|>",)
    starts: ClassVar[tuple[str, ...]] = ("[", "<|python_start|>")
    stripped: ClassVar[tuple[str, ...]] = ("<|python_end|>",)

    def read_block(self, marker: str) -> Step[None]:
        scanner = self.scanner
        if marker != "[":
            yield from scanner.spaces()
            yield from scanner.expect("[")
        yield from self.read_python_calls("]")
        yield from self.read_end(*self.wraps)

    def read_python_calls(self, closer: str) -> Step[None]:
        """Calls up to ``closer``, after the list's opening bracket."""
        scanner = self.scanner
        yield from scanner.spaces()
        while True:
            name, arguments = yield from self._call()
            yield from scanner.spaces()
            char = yield from scanner.peek()
            if char not in (",", closer):
                raise Malformed if char else Truncated
            self.add_call(name, arguments)
            yield from scanner.accept(",")
            yield from scanner.spaces()
            if (yield from scanner.accept(closer)):
                return

    def _call(self) -> Step[tuple[str, str]]:
        scanner = self.scanner
        name = yield from scanner.take_while(_NAME_CHARS, 256)
        if not _NAME.fullmatch(name):
            raise Truncated if scanner.is_exhausted else Malformed
        source = yield from _bracketed(scanner)
        return name, _arguments(source)


class Olmo3(Pythonic):
    """One call per line inside ``<function_calls>``."""

    starts = ("<function_calls>",)
    wraps = ("</function_calls>",)
    stripped = ()

    def read_block(self, marker: str) -> Step[None]:
        scanner = self.scanner
        yield from scanner.spaces()
        while True:
            name, arguments = yield from self._call()
            self.add_call(name, arguments)
            if (yield from self.read_end(*self.wraps)):
                return
            yield from scanner.spaces()


class Lfm2(Pythonic):
    """``<|tool_call_start|>[f(x=1)]<|tool_call_end|>``, sometimes with JSON inside."""

    starts = ("<|tool_call_start|>",)
    wraps = ("<|tool_call_end|>",)
    stripped = ()

    def read_block(self, marker: str) -> Step[None]:
        scanner = self.scanner
        yield from scanner.spaces()
        is_list = yield from scanner.accept("[")
        yield from scanner.spaces()
        if (yield from scanner.peek()) == "{":
            yield from self.read_json_calls()
            yield from self.read_end("]")
        else:
            yield from self.read_python_calls("]" if is_list else self.wraps[0])
        yield from self.read_end(*self.wraps)


def _bracketed(scanner: Scanner) -> Step[str]:
    """Read from an opening bracket to the matching one, skipping strings."""
    yield from scanner.expect("(")
    parts, closers = ["("], [")"]
    num_chars = 0
    while closers:
        run = scanner.take_run(_PLAIN)
        num_chars += len(run) + 1
        if num_chars > _MAX_CALL_CHARS or len(closers) > _MAX_DEPTH:
            raise Malformed
        char = yield from scanner.next_char()
        parts += (run, char)
        if not char.strip("\"'([{}])\\"):
            yield from _bracket(scanner, char, parts, closers)
    return "".join(parts)


def _bracket(scanner: Scanner, char: str, parts: list[str], closers: list[str]) -> Step[None]:
    if char in _CLOSERS:
        closers.append(_CLOSERS[char])
    elif char in ('"', "'"):
        parts.append((yield from _string(scanner, char)))
    elif char != closers.pop():
        raise Malformed


def _string(scanner: Scanner, quote: str) -> Step[str]:
    """Read a Python string after its first quote."""
    triple = yield from scanner.accept(quote * 2)
    if triple and (yield from scanner.peek()) != quote:
        return triple  # the empty string
    ending = quote * 3 if triple else quote
    parts = [triple + (scanner.take(1) if triple else "")]
    while True:
        char = yield from scanner.next_char()
        if char == "\\":
            char += yield from scanner.next_char()
        elif char == quote and (ending == quote or (yield from scanner.accept(quote * 2))):
            return "".join(parts) + ending
        parts.append({"\n": "\\n", "\r": "\\r"}.get(char, char) if ending == quote else char)


def _arguments(source: str) -> str:
    """``(a=1, b="x")`` as a JSON object; Malformed for anything but literal keyword arguments."""
    call = _parse("f" + source)
    if call is None:
        call = _parse("f" + _KEYWORD.sub(rf"\1\2{_KEYWORD_MARK}\3", source))
    if call is None or call.args:
        raise Malformed
    try:
        members = {
            str(keyword.arg).removesuffix(_KEYWORD_MARK): _literal(keyword.value)
            for keyword in call.keywords
            if keyword.arg is not None
        }
        if len(members) != len(call.keywords):
            raise Malformed
        return schema.json_text(members)
    except (ValueError, TypeError, RecursionError):
        raise Malformed from None


def _parse(source: str) -> ast.Call | None:
    try:
        body = ast.parse(schema.double_unknown_escapes(source), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    return body if isinstance(body, ast.Call) else None


def _literal(node: ast.expr) -> Any:
    """The value of a literal that JSON can express; ValueError otherwise."""
    if isinstance(node, ast.Constant):
        return _constant(node.value)
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {
            _key(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True)
        }
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _literal(node.operand)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value if isinstance(node.op, ast.USub) else value
    raise ValueError("not a literal")


def _constant(value: object) -> Any:
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float) and value - value == 0:
        return value
    raise ValueError("no JSON form")


def _key(node: ast.expr | None) -> str:
    value = _literal(node) if node is not None else None
    return value if isinstance(value, str) else json.dumps(value)
