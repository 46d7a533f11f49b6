"""Lark grammars as regular expressions.

Read are rules and terminals, aliases, ``%ignore`` and ``%import common``. Templates, priorities and
look-around have no such expression. Rules that refer to themselves at the end of an alternative are
repetitions. Other recursion is not regular: the expression has the texts down to some depth.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from radixlm.base.record import Record

MAX_CHARS = 1 << 15  # of the expression
MAX_DEPTH = 16
_NEVER = "(?:)never"  # in place of an expression: there is no text
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
_OPENING, _CLOSING, _REPEATS = (
    {("sign", sign) for sign in signs} for signs in ("([{", ")]}", "?*+~{")
)


class _NotRegular(Exception):
    """There is no regular expression, or none is found."""


class _TooLong(_NotRegular):
    """The expression is longer than MAX_CHARS."""


class Regular(Record):
    """``expression`` matches texts of a grammar, whole: all of them, or with ``depth`` above 0
    those in which rules of the same name are nested so deep at most (1: not at all)."""

    expression: str
    depth: int


def regex_of(grammar: str) -> Regular | None:
    """The texts of a Lark grammar; None if there is no expression, if it is longer than MAX_CHARS,
    or if the grammar is none or uses something that is not read."""
    try:
        return _Grammar(grammar).expression()
    except (_NotRegular, RecursionError):
        return None


class _Grammar:
    """``ignored``: expressions of ``%ignore``, which may stand behind each terminal of a rule."""

    def __init__(self, text: str) -> None:
        self._bodies: dict[str, list[Token]] = {}
        self._imported: dict[str, str] = {}  # name -> expression
        self._made: dict[str, str] = {}
        self._shallower: dict[str, str] = {}  # expressions with a depth less
        self._open: set[str] = set()  # names that are being read
        self._is_cut = False  # a name stands within itself
        self.ignored = ""
        ignored: list[list[Token]] = []
        for kind, tokens in _statements(list(_tokens(text))):
            if kind == "%ignore":
                ignored.append(tokens)
            elif kind == "%import":
                self._import(tokens)
            elif kind.startswith("%") or kind in self._bodies or kind in self._imported:
                raise _NotRegular
            else:
                self._bodies[kind] = tokens
        parts = [_Body(self, tokens, is_terminal=True).read() for tokens in ignored]
        if _NEVER in parts:
            raise _NotRegular
        self.ignored = f"(?:{'|'.join(parts)})*" if parts else ""

    def expression(self) -> Regular:
        """All texts, or those of the greatest depth that is not too long."""
        found: Regular | None = None
        for depth in range(1, MAX_DEPTH + 1):
            self._shallower, self._made, self._is_cut = self._made, {}, False
            try:
                made = self.name("start")
            except _TooLong:
                break
            if not self._is_cut:
                return Regular(self.ignored + made, 0)
            if made != _NEVER:
                found = Regular(self.ignored + made, depth)
        if found is None:
            raise _NotRegular
        return found

    def name(self, name: str) -> str:
        """The expression of a rule or terminal; _NEVER if it has no text of this depth."""
        if name in self._imported:
            return self._imported[name]
        if name in self._made:
            return self._made[name]
        if name not in self._bodies:
            raise _NotRegular
        if name in self._open:
            self._is_cut = True
            return self._shallower.get(name, _NEVER)
        self._open.add(name)
        made = self._rule(name)
        self._open.remove(name)
        self._made[name] = made
        return made

    def _rule(self, name: str) -> str:
        """What begins or ends with the rule itself is a repetition: ``a: a "x" | "y"`` is yx*."""
        myself = ("name", name)
        before: list[str] = []
        after: list[str] = []
        between: list[str] = []
        plain: list[str] = []
        for tokens in _alternatives(self._bodies[name]):
            if tokens == [myself]:
                continue
            begins, ends = tokens[:1] == [myself], tokens[-1:] == [myself]
            rest = tokens[begins : len(tokens) - ends]
            if myself in rest or (begins and rest and rest[0] in _REPEATS):
                begins, ends, rest = False, False, tokens
            made = _Body(self, rest, name.isupper()).read()
            kind = {(False, True): before, (True, False): after, (True, True): between}
            kind.get((begins, ends), plain).append(made)
        core = _any_of(plain)
        if core == _NEVER:
            return _NEVER
        one = _times(before) + core + _times(after)
        return _short(one + _times([inside + one for inside in between if inside != _NEVER]))

    def _import(self, tokens: list[Token]) -> None:
        """``common.INT``, ``common.INT -> NUMBER`` or ``common (INT, WS)``."""
        words = [text for kind, text in tokens if kind == "name"]
        if words[:1] != ["common"] or not all(word in _COMMON for word in words[1:2]):
            raise _NotRegular
        if ("sign", "->") in tokens:
            words = [words[0], words[1], words[2]]
            self._imported[words[2]] = _COMMON[words[1]]
            return
        for word in words[1:]:
            if word not in _COMMON:
                raise _NotRegular
            self._imported[word] = _COMMON[word]


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
        made = [self._sequence()]
        while self._take("|"):
            made.append(self._sequence())
        return _any_of(made)

    def _sequence(self) -> str:
        made = ""
        while (one := self._repeated()) is not None:
            made = _NEVER if _NEVER in (made, one) else _short(made + one)
        if self._take("->"):
            self._next("name")
        return made

    def _repeated(self) -> str | None:
        one = self._one()
        if one is None:
            return None
        for sign in "?*+":
            if self._take(sign):
                return _repeat(one, sign, sign != "+")
        if self._take("~"):
            low = high = self._next("number")
            if self._take(".."):
                high = self._next("number")
            return _repeat(one, f"{{{low},{high}}}", not int(low))
        if self._take("{"):
            low = high = self._next("number")
            if self._take(","):
                has_end = self._tokens[self._place : self._place + 1] != [("sign", "}")]
                high = self._next("number") if has_end else ""
            if not self._take("}"):
                raise _NotRegular
            return _repeat(one, f"{{{low},{high}}}", not int(low))
        return one

    def _one(self) -> str | None:
        if self._take("("):
            return self._closed(")")
        if self._take("["):
            return _repeat(self._closed("]"), "?", True)
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
        return made if made == _NEVER else f"(?:{made})"

    def _spaced(self, terminal: str) -> str:
        if self._is_terminal or terminal == _NEVER:
            return terminal
        return terminal + self._grammar.ignored


def _short(expression: str) -> str:
    if len(expression) > MAX_CHARS:
        raise _TooLong
    return expression


def _any_of(choices: list[str]) -> str:
    known = [choice for choice in choices if choice != _NEVER]
    if len(known) < 2:
        return known[0] if known else _NEVER
    return _short(f"(?:{'|'.join(known)})")


def _times(choices: list[str]) -> str:
    """Any number of these."""
    one = _any_of(choices)
    return "" if one == _NEVER else f"(?:{one})*"


def _repeat(one: str, times: str, may_be_none: bool) -> str:
    if one == _NEVER:
        return "" if may_be_none else _NEVER
    return f"(?:{one}){times}"


def _alternatives(tokens: list[Token]) -> list[list[Token]]:
    """The right side of a rule at its outer "|", without aliases."""
    found: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token in _OPENING) - (token in _CLOSING)
        if token == ("sign", "|") and not depth:
            found.append([])
        else:
            found[-1].append(token)
    return [one[:-2] if one[-2:-1] == [("sign", "->")] else one for one in found]


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
