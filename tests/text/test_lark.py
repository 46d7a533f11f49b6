"""Regular expressions of Lark grammars."""

from __future__ import annotations

import re

import pytest

from radixlm.text.lark import MAX_CHARS, MAX_DEPTH, regex_of

PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
"""Patches, as programs that edit code describe them to models."""
HEAD, TAIL = "*** Begin Patch\n", "*** End Patch"


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (
            PATCH,
            [f'{HEAD}*** Add File: a "b".py\n+x = "\\n"\n+\n{TAIL}\n'],
            [HEAD + TAIL, f"{HEAD}*** Add File: a\nx\n{TAIL}"],
        ),
        ('start: "a"i "."', ["a.", "A."], ["ab"]),
        ('start: "a".."f" | "\\n"', ["c", "\n"], ["g"]),
        ('start: A~2..3 B{2} C{1,}\nA: "a"\nB: /b/\nC: "c"', ["aabbc", "aaabbccc"], ["abbc"]),
        ('start: A ["b"]\nA: /x/i', ["Xb", "x"], ["b"]),
        ('?start: "a"\n  // one more\n  | "b" -> second\n', ["a", "b"], ["ab"]),
        ('start: N ("+" N)*\n%import common.INT -> N\n%ignore " "', ["1 + 2", " 1+2 "], ["1 2"]),
        ("%import common (WORD, NUMBER)\nstart: WORD NUMBER", ["a1.5e3"], ["1", "a"]),
        ('start: A?B\nA: "a"\nB: "b"', ["ab", "b"], ["a"]),
        ("start: A\nA: /a.b/s", ["a\nb"], ["ab"]),
        ("start: /a\\/[$^]/", ["a/$"], ["a/"]),
        ("start: ESCAPED_STRING\n%import common.ESCAPED_STRING", ['"a\\"b"'], ['"a"b"']),
    ],
)
def test_texts_of_the_grammar_match(grammar: str, good: list[str], bad: list[str]) -> None:
    regex = regex_of(grammar)
    assert regex is not None
    assert regex.depth == 0
    assert [text for text in good + bad if re.fullmatch(regex.expression, text)] == good


ARITHMETIC = """
start: sum
?sum: product | sum "+" product | sum "-" product
product: factor ("*" factor)*
factor: INT | "(" sum ")"
%import common.INT
%ignore " "
"""


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('start: "x" start | "y"', ["y", "xxy"], ["x", "xyy"]),
        ('start: list\nlist: /[a-z]/ -> one | list "," /[a-z]/ -> more', ["a", "a,b,c"], ["a,"]),
        ('start: start "+" start | start start | start | /[0-9]/', ["1", "1+23+4"], ["1+", "+1"]),
        ('start: "<" start | start ">" | "a"', ["a", "<<a>"], ["<>"]),
    ],
)
def test_a_rule_that_begins_or_ends_with_itself_is_a_repetition(
    grammar: str, good: list[str], bad: list[str]
) -> None:
    regex = regex_of(grammar)
    assert regex is not None and regex.depth == 0
    assert [text for text in good + bad if re.fullmatch(regex.expression, text)] == good


def test_rules_within_themselves_are_nested_to_a_depth() -> None:
    regex = regex_of(ARITHMETIC)
    assert regex is not None and 3 <= regex.depth <= MAX_DEPTH
    for nested in range(regex.depth):
        text = f"1 + 2 - {nested * '('}3*4 {nested * ')'}"
        assert re.fullmatch(regex.expression, text), text
    for text in ("1+", "()", "(1", regex.depth * "(" + "1" + regex.depth * ")"):
        assert not re.fullmatch(regex.expression, text)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "x" start "y"',  # has no text
        "start: /(?=a)b/",
        "start: /^a$/",
        'start{x}: x "a"',
        "start: A & B\nA: /a/\nB: /b/",
        "start: missing",
        "%import common.UNKNOWN\nstart: UNKNOWN",
        'rule: "a"',
        'start: "a"\n%ignore X\nX: "(" X ")"',
        'start: "a',
        "start: (" * 5000,
        "",
    ],
)
def test_others_have_no_expression(grammar: str) -> None:
    assert regex_of(grammar) is None


def test_the_expression_is_bounded() -> None:
    rules = [f"r{n}: r{n + 1} r{n + 1} | r{n + 1}" for n in range(40)]
    assert regex_of("\n".join(["start: r0", *rules, 'r40: "a"'])) is None
    choices = " | ".join(['"a"'] * MAX_CHARS)
    assert regex_of(f"start: {choices}") is None
