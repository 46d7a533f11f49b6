"""Stop strings and stop expressions on a text that arrives in pieces.

The match that ENDS first wins, and of those that end together the longest: the only rule that
gives the same text whatever the pieces are. Text that could begin a match is held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from radixlm.text.stop_regex import RegexFinder

MAX_HELD_CHARS = 4096  # of an expression without end ("a.*b"): what is older is sent


class StringFinder:
    """Many strings at once, after Aho and Corasick (1975): one step a character.

    State s stands for a prefix of ``depth[s]`` characters: the longest that the text ends with.
    ``longest[s]`` is the longest string that the text ends with in that state, "" if none.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._goto: list[dict[str, int]] = [{}]
        self._fail = [0]
        self.depth = [0]
        self.longest = [""]
        for text in strings:
            self._add(text)
        self._link()

    def _add(self, text: str) -> None:
        state = 0
        for char in text:
            following = self._goto[state].get(char)
            if following is None:
                following = len(self._goto)
                self._goto[state][char] = following
                self._goto.append({})
                self._fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.longest.append("")
            state = following
        self.longest[state] = text

    def _link(self) -> None:
        queue = deque(self._goto[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self._goto[state].items():
                self._fail[following] = self.step(self._fail[state], char)
                self.longest[following] = (
                    self.longest[following] or self.longest[self._fail[following]]
                )
                queue.append(following)

    def scan(self, state: int, text: str) -> tuple[int, int]:
        """(state, characters read) of ``text`` up to the first end of a string, or all of it."""
        goto, fail, longest = self._goto, self._fail, self.longest
        for position, char in enumerate(text):
            while char not in goto[state] and state:
                state = fail[state]
            state = goto[state].get(char, 0)
            if longest[state]:
                return state, position + 1
        return state, len(text)

    def step(self, state: int, char: str) -> int:
        """The state after ``char``."""
        goto = self._goto
        while char not in goto[state]:
            if state == 0:
                return 0
            state = self._fail[state]
        return goto[state][char]


class StopChecker:
    """Watches one growing text for stops.

    ``trim``: the text ends before the match, else with it. The matched value is the stop string,
    or the expression as it was given. Raises InvalidRequest for an expression that is no good.
    """

    def __init__(
        self, stops: Sequence[str] = (), stop_regexes: Sequence[str] = (), trim: bool = True
    ) -> None:
        self._strings = StringFinder([stop for stop in stops if stop])
        self._regexes = RegexFinder(tuple(stop_regexes), MAX_HELD_CHARS) if stop_regexes else None
        self._is_idle = not any(stops) and self._regexes is None
        self._trim = trim
        self._state = 0
        self._held = ""
        self._position = 0  # of the first character after the held text, in the whole text
        self._match_start = 0
        self.matched: str | None = None

    def feed(self, delta: str) -> tuple[str, str | None]:
        """(text to send, what matched). After a match nothing more is sent."""
        if self.matched is not None:
            return "", self.matched
        if self._is_idle:
            return delta, None
        text = self._held + delta
        origin = self._position - len(self._held)
        if self._regexes is None:
            self._state, num_read = self._strings.scan(self._state, delta)
            self._position += num_read
            if stop := self._strings.longest[self._state]:
                self._match_start, self.matched = self._position - len(stop), stop
                return self._stop(text, origin)
        elif any(self._step(char, self._regexes) for char in delta):
            return self._stop(text, origin)
        start = self._position if not self._trim else self._earliest()
        emit, self._held = text[: start - origin], text[start - origin :]
        return emit, None

    def finish(self) -> tuple[str, str | None]:
        """(what was held back, what matched): the text has ended."""
        if self.matched is None and self._regexes is not None:
            found = self._regexes.look_ahead("")
            if found is not None:
                self._match_start, self.matched = found
                return self._stop(self._held, self._position - len(self._held))
        emit, self._held = self._held, ""
        return emit, self.matched

    def _step(self, char: str, regexes: RegexFinder) -> bool:
        """Consume one character; whether that completes a match."""
        if found := regexes.look_ahead(char):
            self._match_start, self.matched = found
            return True
        self._state = self._strings.step(self._state, char)
        self._position += 1
        found = None
        if stop := self._strings.longest[self._state]:
            found = (self._position - len(stop), stop)
        by_regex = regexes.step(char, self._position - 1)
        if by_regex is not None and (found is None or by_regex[0] < found[0]):
            found = by_regex
        if found is not None:
            self._match_start, self.matched = found
        return found is not None

    def _stop(self, text: str, origin: int) -> tuple[str, str | None]:
        end = self._match_start if self._trim else self._position
        self._held = ""
        return text[: max(0, end - origin)], self.matched

    def _earliest(self) -> int:
        """Where the text that might still become a match begins."""
        start = self._position - self._strings.depth[self._state]
        if self._regexes is not None:
            start = min(start, self._regexes.earliest(self._position))
        return start
