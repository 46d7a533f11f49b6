"""Lark grammars as regular expressions: those without recursion are regular.

Read are rules and terminals, aliases, ``%ignore`` and ``%import common``. Rules that refer to
themselves, templates, priorities and look-around have no such expression.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_CHARS = 1 << 15  # of the expression
_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r]+|(?://|\#)[^\n]*)
    | (?P<newline>\n)
    | (?P<string>"(?:\\.|[^"\\\n])*"i?)
    | (?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[a-z]*)
    | (?P<directive>%[a-z]+)
    | (?P<name>(?:(?<![^\n])[!?])?[A-Za-z_]\w*)
    | (?P<number>\d+)
    | (?P<sign>->|\.\.|[|:()\[\]{},.*+?~])""",
    re.VERBOSE | re.ASCII,
)
_LOOKING = re.compile(r"\\[bBAZz1-9kG]|[\^$]|\(\?(?![a-z]*:)")  # outside of classes
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]")
_DIGITS = r"[0-9]+"
_DECIMAL = r"(?:[0-9]+\.[0-9]*|\.[0-9]+)"
_EXPONENT = r"[eE][+-]?[0-9]+"
_FLOAT = f"(?:{_DIGITS}{_EXPONENT}|{_DECIMAL}(?:{_EXPONENT})?)"
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": _DIGITS,
    "SIGNED_INT": f"[+-]?{_DIGITS}",
    "DECIMAL": _DECIMAL,
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": f"[+-]?{_FLOAT}",
    "NUMBER": f"(?:{_FLOAT}|{_DIGITS})",
    "SIGNED_NUMBER": f"[+-]?(?:{_FLOAT}|{_DIGITS})",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z_0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
}
Token = tuple[str, str]  # a group of _TOKEN, and the text


class _NotRegular(Exception):
    """There is no regular expression, or none is found."""


def regex_of(grammar: str) -> str | None:
    """A regular expression that matches the texts of a Lark grammar, whole; None if there is none,
    if it is longer than MAX_CHARS, or if the grammar is none or uses something that is not read."""
    try:
        return _Grammar(grammar).expression()
    except (_NotRegular, RecursionError):
        return None


class _Grammar:
    """``ignored``: expressions of ``%ignore``, which may stand behind each terminal of a rule."""

    def __init__(self, text: str) -> None:
        self._bodies: dict[str, list[Token]] = {}
        self._made: dict[str, str] = {}  # expressions of names
        self._open: set[str] = set()  # names that are being read
        self.ignored = ""
        ignored: list[list[Token]] = []
        for kind, tokens in _statements(list(_tokens(text))):
            if kind == "%ignore":
                ignored.append(tokens)
            elif kind == "%import":
                self._import(tokens)
            elif kind.startswith("%") or kind in self._bodies or kind in self._made:
                raise _NotRegular
            else:
                self._bodies[kind] = tokens
        parts = [_Body(self, tokens, is_terminal=True).read() for tokens in ignored]
        self.ignored = f"(?:{'|'.join(parts)})*" if parts else ""

    def expression(self) -> str:
        return self.ignored + self.name("start")

    def name(self, name: str) -> str:
        """The expression of a rule or terminal."""
        if name in self._made:
            return self._made[name]
        if name in self._open or name not in self._bodies:
            raise _NotRegular
        self._open.add(name)
        made = _Body(self, self._bodies[name], name.isupper()).read()
        self._open.remove(name)
        self._made[name] = made
        return made

    def _import(self, tokens: list[Token]) -> None:
        """``common.INT``, ``common.INT -> NUMBER`` or ``common (INT, WS)``."""
        words = [text for kind, text in tokens if kind == "name"]
        if words[:1] != ["common"] or not all(word in _COMMON for word in words[1:2]):
            raise _NotRegular
        if ("sign", "->") in tokens:
            words = [words[0], words[1], words[2]]
            self._made[words[2]] = _COMMON[words[1]]
            return
        for word in words[1:]:
            if word not in _COMMON:
                raise _NotRegular
            self._made[word] = _COMMON[word]


class _Body:
    """Reads the right side of a rule, or with ``is_terminal`` of a terminal."""

    def __init__(self, grammar: _Grammar, tokens: list[Token], is_terminal: bool) -> None:
        self._grammar, self._tokens, self._is_terminal = grammar, tokens, is_terminal
        self._place = 0

    def read(self) -> str:
        made = self._choices()
        if self._place < len(self._tokens):
            raise _NotRegular
        return made

    def _take(self, *signs: str) -> bool:
        """Whether one of these stands here; it is passed."""
        if self._place < len(self._tokens) and self._tokens[self._place] in (
            ("sign", sign) for sign in signs
        ):
            self._place += 1
            return True
        return False

    def _next(self, kind: str) -> str:
        if self._place >= len(self._tokens) or self._tokens[self._place][0] != kind:
            raise _NotRegular
        self._place += 1
        return self._tokens[self._place - 1][1]

    def _choices(self) -> str:
        made = self._sequence()
        is_one = True
        while self._take("|"):
            made, is_one = _short(f"{made}|{self._sequence()}"), False
        return made if is_one else f"(?:{made})"

    def _sequence(self) -> str:
        made = ""
        while (one := self._repeated()) is not None:
            made = _short(made + one)
        if self._take("->"):
            self._next("name")
        return made

    def _repeated(self) -> str | None:
        one = self._one()
        if one is None:
            return None
        for sign in "?*+":
            if self._take(sign):
                return f"(?:{one}){sign}"
        if self._take("~"):
            low = high = self._next("number")
            if self._take(".."):
                high = self._next("number")
            return f"(?:{one}){{{low},{high}}}"
        if self._take("{"):
            low = high = self._next("number")
            if self._take(","):
                has_end = self._tokens[self._place : self._place + 1] != [("sign", "}")]
                high = self._next("number") if has_end else ""
            if not self._take("}"):
                raise _NotRegular
            return f"(?:{one}){{{low},{high}}}"
        return one

    def _one(self) -> str | None:
        if self._take("("):
            return self._closed(")")
        if self._take("["):
            return f"(?:{self._closed(']')})?"
        kind, text = self._tokens[self._place] if self._place < len(self._tokens) else ("", "")
        if kind == "name":
            self._place += 1
            made = self._grammar.name(text)
            return self._spaced(made) if text.strip("_").isupper() else made
        if kind == "regex":
            self._place += 1
            return self._spaced(_expression(text))
        if kind == "string":
            self._place += 1
            if not self._take(".."):
                return self._spaced(_literal(text))
            ends = _text(text), _text(self._next("string"))
            if not all(len(end) == 1 for end in ends):
                raise _NotRegular
            return self._spaced("[{}-{}]".format(*map(_escaped, ends)))
        return None

    def _closed(self, sign: str) -> str:
        made = self._choices()
        if not self._take(sign):
            raise _NotRegular
        return f"(?:{made})"

    def _spaced(self, terminal: str) -> str:
        return terminal if self._is_terminal else terminal + self._grammar.ignored


def _short(expression: str) -> str:
    if len(expression) > MAX_CHARS:
        raise _NotRegular
    return expression


def _tokens(text: str) -> Iterator[Token]:
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None or match.lastgroup is None:
            raise _NotRegular
        place = match.end()
        if match.lastgroup != "skip":
            yield match.lastgroup, match[0]


def _statements(tokens: list[Token]) -> Iterator[tuple[str, list[Token]]]:
    """(directive or name, what follows): a directive ends with its line, a rule where the next
    statement begins."""
    begins = [
        place
        for place, (kind, _) in enumerate(tokens)
        if (not place or tokens[place - 1][0] == "newline")
        and (kind == "directive" or tokens[place + 1 : place + 2] == [("sign", ":")])
    ]
    if not begins or any(kind != "newline" for kind, _ in tokens[: begins[0]]):
        raise _NotRegular
    for begin, end in zip(begins, [*begins[1:], len(tokens)], strict=True):
        kind, text = tokens[begin]
        is_rule = kind == "name"
        body = [token for token in tokens[begin + 1 + is_rule : end] if token[0] != "newline"]
        yield text.lstrip("!?"), body


def _text(string: str) -> str:
    """What a string literal stands for."""
    inside = string.removesuffix("i")[1:-1]
    escapes = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
    if re.search(r"\\[xuUN0-9]", inside):
        raise _NotRegular
    return re.sub(r"\\(.)", lambda found: escapes.get(found[1], found[1]), inside)


def _literal(string: str) -> str:
    made = "".join(map(_escaped, _text(string)))
    return f"(?i:{made})" if string.endswith("i") else made


def _escaped(char: str) -> str:
    """One character as an expression, also within a class."""
    names = {"\n": r"\n", "\t": r"\t", "\r": r"\r", "\f": r"\f", "\v": r"\v"}
    special = r"\.+*?()|[]{}^$-/"
    return names.get(char) or (f"\\{char}" if char in special else char)


def _expression(literal: str) -> str:
    body, _, flags = literal[1:].rpartition("/")
    outside = _CLASS.sub("", body.replace("\\\\", ""))
    if set(flags) - set("isu") or _LOOKING.search(re.sub(r"\\[\^$(]", "", outside)):
        raise _NotRegular
    flags = flags.replace("u", "")
    return f"(?{flags}:{body})"
