"""Regular expressions over a text that arrives in chunks, in time linear in the text.

Python's ``re`` backtracks: one regex of a client could block a process for hours, and it cannot
resume a search. Here a regex becomes a nondeterministic automaton (Thompson, 1968) with a bounded
number of states, and all its threads advance together, one character at a time. Look-around, back
references, atomic groups and possessive quantifiers are refused.
"""

import re
import re._constants as sre  # type: ignore[import-not-found]
import re._parser as sre_parser  # type: ignore[import-not-found]
from collections.abc import Callable
from typing import Any

from radixlm.base.errors import InvalidRequest

MAX_STATES = 1000
_PARAM = "stop_regex"
Test = Callable[[str], bool]
Boundary = Callable[[str, str], bool]  # (character before, character after), "" at an end


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


_CATEGORIES: dict[Any, Test] = {
    sre.CATEGORY_DIGIT: str.isdecimal,
    sre.CATEGORY_SPACE: str.isspace,
    sre.CATEGORY_WORD: _is_word,
}
_NOT_CATEGORIES: dict[Any, Any] = {
    sre.CATEGORY_NOT_DIGIT: sre.CATEGORY_DIGIT,
    sre.CATEGORY_NOT_SPACE: sre.CATEGORY_SPACE,
    sre.CATEGORY_NOT_WORD: sre.CATEGORY_WORD,
}


def _word_boundary(before: str, after: str) -> bool:
    return _is_word(before) != _is_word(after)


class Program:
    """The automaton of one or more regexes. State 0 is the start; ``accepts``: end state -> regex.

    A state consumes a character (``tests``), is passed freely (``jumps``), or is passed at a
    boundary (``boundaries``). ``late`` boundaries depend on the character after them.
    """

    def __init__(self, patterns: tuple[str, ...], is_whole: bool = False) -> None:
        """``is_whole``: the text is complete, so "$" is its end, and matches may be empty; else
        InvalidRequest for a regex that matches the empty text."""
        self._is_whole = is_whole
        self.tests: dict[int, tuple[Test, int]] = {}
        self.jumps: dict[int, list[int]] = {}
        self.boundaries: dict[int, tuple[Boundary, int]] = {}
        self.late: set[int] = set()
        self.accepts: dict[int, str] = {}
        self._num_states = 1
        self.jumps[0] = []
        for pattern in patterns:
            tree = _parse(pattern)
            end = self._new()
            self.jumps[0].append(self._build_all(tree, end, tree.state.flags))
            self.accepts[end] = pattern
        if not is_whole:
            self._refuse_empty()

    def _new(self) -> int:
        self._num_states += 1
        if self._num_states > MAX_STATES:
            raise InvalidRequest(f"the regexes need more than {MAX_STATES} states", _PARAM)
        return self._num_states - 1

    def _refuse_empty(self) -> None:
        """A regex that matches the empty text would stop before the first token."""
        for state in self.closure(0, lambda state: True, set()):
            if state in self.accepts:
                pattern = self.accepts[state]
                raise InvalidRequest(f"the regex {pattern!r} matches the empty text", _PARAM)

    def closure(self, start: int, passes: Callable[[int], bool], seen: set[int]) -> list[int]:
        """All states reached from ``start`` without a character, except those already ``seen``.

        ``passes`` says whether a boundary can be passed here; reached states are added to ``seen``.
        """
        reached: list[int] = []
        stack = [start]
        while stack:
            state = stack.pop()
            if state in seen:
                continue
            seen.add(state)
            reached.append(state)
            if state in self.boundaries:
                if passes(state):
                    stack.append(self.boundaries[state][1])
            else:
                stack.extend(self.jumps.get(state, ()))
        return reached

    def _build_all(self, tree: Any, end: int, flags: int) -> int:
        for op, argument in reversed(list(tree)):
            end = self._build(op, argument, end, flags)
        return end

    def _build(self, op: Any, argument: Any, end: int, flags: int) -> int:
        """The entry state of one node that goes on to ``end``."""
        if op is sre.SUBPATTERN:
            _, added, removed, tree = argument
            return self._build_all(tree, end, (flags | added) & ~removed)
        if op is sre.BRANCH:
            state = self._new()
            self.jumps[state] = [self._build_all(tree, end, flags) for tree in argument[1]]
            return state
        if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            low, high, tree = argument
            return self._build_repeat(low, high, tree, end, flags)
        if op is sre.AT:
            return self._build_boundary(argument, end, flags)
        test = _character_test(op, argument, flags)
        if test is None:
            raise InvalidRequest(f"{str(op).lower()} is not supported in stop_regex", _PARAM)
        state = self._new()
        self.tests[state] = (test, end)
        return state

    def _build_repeat(self, low: int, high: Any, tree: Any, end: int, flags: int) -> int:
        if max(low, 0 if high is sre.MAXREPEAT else high) > MAX_STATES:
            raise InvalidRequest(f"the regexes need more than {MAX_STATES} states", _PARAM)
        if high is sre.MAXREPEAT:
            loop = self._new()
            self.jumps[loop] = []
            self.jumps[loop] = [self._build_all(tree, loop, flags), end]
            entry = loop
        else:
            entry = end
            for _ in range(high - low):
                state = self._new()
                self.jumps[state] = [self._build_all(tree, entry, flags), end]
                entry = state
        for _ in range(low):
            entry = self._build_all(tree, entry, flags)
        return entry

    def _build_boundary(self, kind: Any, end: int, flags: int) -> int:
        state = self._new()
        test: Boundary
        if kind in (sre.AT_END, sre.AT_END_STRING) and self._is_whole:
            self.boundaries[state] = (lambda before, after: after == "", end)
            return state
        if kind in (sre.AT_END, sre.AT_END_STRING):
            self.jumps[state] = [end]  # the text so far ends here
            return state
        if kind in (sre.AT_BOUNDARY, sre.AT_NON_BOUNDARY):
            is_boundary = kind is sre.AT_BOUNDARY
            test = lambda before, after: _word_boundary(before, after) == is_boundary  # noqa: E731
            self.late.add(state)
        elif kind is sre.AT_BEGINNING and flags & re.MULTILINE:
            test = lambda before, after: before in ("", "\n")  # noqa: E731
        else:
            test = lambda before, after: before == ""  # noqa: E731
        self.boundaries[state] = (test, end)
        return state


def _parse(pattern: str) -> Any:
    try:
        return sre_parser.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"{pattern!r:.80} is not a valid regex: {error}", _PARAM) from None


def _character_test(op: Any, argument: Any, flags: int) -> Test | None:
    """The test of a node that consumes one character; None for every other node."""
    fold = bool(flags & re.IGNORECASE)
    if op is sre.ANY:
        return (lambda char: True) if flags & re.DOTALL else (lambda char: char != "\n")
    if op is sre.LITERAL:
        return _literal_test(argument, fold)
    if op is sre.NOT_LITERAL:
        test = _literal_test(argument, fold)
        return lambda char: not test(char)
    if op is sre.IN:
        return _set_test(argument, flags)
    return None


def _literal_test(code: int, fold: bool) -> Test:
    literal = chr(code)
    if not fold:
        return literal.__eq__
    both = {literal, literal.lower(), literal.upper()}
    return lambda char: char in both or char.lower() == literal.lower()


def _set_test(items: list[tuple[Any, Any]], flags: int) -> Test:
    negate = items[0][0] is sre.NEGATE
    tests = [_item_test(op, argument, flags) for op, argument in items[negate:]]
    return lambda char: any(test(char) for test in tests) != negate


def _item_test(op: Any, argument: Any, flags: int) -> Test:
    fold = bool(flags & re.IGNORECASE)
    if op is sre.LITERAL:
        return _literal_test(argument, fold)
    if op is sre.RANGE:
        low, high = chr(argument[0]), chr(argument[1])
        if not fold:
            return lambda char: low <= char <= high
        return lambda char: any(low <= c <= high for c in (char, char.lower(), char.upper()))
    negate = argument in _NOT_CATEGORIES
    test = _CATEGORIES[_NOT_CATEGORIES.get(argument, argument)]
    if flags & re.ASCII:
        return lambda char: (char.isascii() and test(char)) != negate
    return lambda char: test(char) != negate


def occurs(pattern: str, text: str) -> bool:
    """Whether the regex matches somewhere in the text. InvalidRequest if it is not supported."""
    program = Program((pattern,), is_whole=True)
    threads: set[int] = set()
    for place in range(len(text) + 1):
        around = text[place - 1 : place] if place else "", text[place : place + 1]
        seen: set[int] = set()
        for state in (*threads, 0):
            program.closure(state, lambda one: program.boundaries[one][0](*around), seen)  # noqa: B023
        if seen & program.accepts.keys():
            return True
        tests = (program.tests[state] for state in seen if state in program.tests)
        threads = {after for test, after in tests if around[1] and test(around[1])}
    return False


class RegexFinder:
    """Finds the first end of a match, and the longest match that ends there.

    ``_threads`` maps a state to the start of its earliest candidate. Candidates that start with the
    next character are not threads: ``_entries`` are their first states.
    """

    def __init__(self, patterns: tuple[str, ...], max_chars: int) -> None:
        self._program = Program(patterns)
        self._max_chars = max_chars
        self._threads: dict[int, int] = {}
        self._before = ""
        self._has_entry_boundary = False
        self._entries = self._program.closure(0, self._note_boundary, set())

    def _note_boundary(self, state: int) -> bool:
        self._has_entry_boundary = True
        return True

    def earliest(self, position: int) -> int:
        """Start of the earliest open candidate; ``position`` if none is open."""
        return min(self._threads.values(), default=position)

    def look_ahead(self, after: str) -> tuple[int, str] | None:
        """Pass the boundaries that depend on the next character ("" at the end of the text).

        Returns (start, regex) if that completes a match at the current position.
        """
        late = self._program.late
        if not late or not self._threads:
            return None
        waiting = {state: start for state, start in self._threads.items() if state in late}
        for state in waiting:
            del self._threads[state]
        boundaries = self._program.boundaries
        return self._enter(waiting, lambda state: boundaries[state][0](self._before, after))

    def step(self, char: str, position: int) -> tuple[int, str] | None:
        """Consume ``char`` at ``position``; (start, regex) of a match that ends after it."""
        tests = self._program.tests
        after: dict[int, int] = {}
        for state, start in self._threads.items():
            entry = tests.get(state)
            if entry is not None and entry[0](char):
                after[entry[1]] = min(start, after.get(entry[1], start))
        for state in self._entries if not self._has_entry_boundary else self._open_entries(char):
            entry = tests.get(state)
            if entry is not None and entry[0](char):
                after.setdefault(entry[1], position)
        self._before = char
        self._threads = {}
        if not after:
            return None
        oldest = position + 1 - self._max_chars
        return self._enter({state: max(start, oldest) for state, start in after.items()})

    def _open_entries(self, char: str) -> list[int]:
        boundaries = self._program.boundaries
        return self._program.closure(
            0, lambda state: boundaries[state][0](self._before, char), set()
        )

    def _enter(
        self, starts: dict[int, int], passes: Callable[[int], bool] | None = None
    ) -> tuple[int, str] | None:
        """Add the states that threads reach, earliest start first; a match if one is an end."""
        match = None
        seen: set[int] = set()  # states reached by an earlier start
        for state, start in sorted(starts.items(), key=lambda item: item[1]):
            for reached in self._program.closure(state, passes or self._passes_now, seen):
                if reached in self._program.accepts and match is None:
                    match = (start, self._program.accepts[reached])
                self._threads[reached] = min(start, self._threads.get(reached, start))
        return match

    def _passes_now(self, state: int) -> bool:
        late = state in self._program.late
        return not late and self._program.boundaries[state][0](self._before, "")
