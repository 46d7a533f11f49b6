"""Stop strings and stop regexes on a text that arrives in chunks.

The match that ends first wins, and of those that end together the longest: the only rule that
gives the same text for every way to chunk it. Text that could begin a match is held back.
"""

from collections import deque
from collections.abc import Sequence

from radixlm.text.stop_regex import RegexFinder

MAX_HELD_CHARS = 4096  # for unbounded regexes ("a.*b"): older text is sent


class StringFinder:
    """Searches for many strings at once (Aho and Corasick, 1975), one step per character.

    State s is a prefix of ``depth[s]`` characters: the longest that the text ends with.
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
            target = self._goto[state].get(char)
            if target is None:
                target = len(self._goto)
                self._goto[state][char] = target
                self._goto.append({})
                self._fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.longest.append("")
            state = target
        self.longest[state] = text

    def _link(self) -> None:
        queue = deque(self._goto[0].values())
        while queue:
            state = queue.popleft()
            for char, target in self._goto[state].items():
                self._fail[target] = self.step(self._fail[state], char)
                self.longest[target] = self.longest[target] or self.longest[self._fail[target]]
                queue.append(target)

    def scan(self, state: int, text: str) -> tuple[int, int]:
        """(state, characters read) at the first end of a string in ``text``, or at its end."""
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
    """Checks one growing text for stops.

    ``trim``: the text ends before the match, else after it. The matched value is the stop string or
    the regex. Raises InvalidRequest for an invalid regex.
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
        self._position = 0  # in the whole text, of the first character after the held text
        self._match_start = 0
        self.matched: str | None = None

    def feed(self, delta: str) -> tuple[str, str | None]:
        """(text to send, matched stop or None). After a match nothing more is sent."""
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
        """(text that was held back, matched stop or None) at the end of the text."""
        if self.matched is None and self._regexes is not None:
            match = self._regexes.look_ahead("")
            if match is not None:
                self._match_start, self.matched = match
                return self._stop(self._held, self._position - len(self._held))
        emit, self._held = self._held, ""
        return emit, self.matched

    def _step(self, char: str, regexes: RegexFinder) -> bool:
        """Consume one character; returns whether it completes a match."""
        if match := regexes.look_ahead(char):
            self._match_start, self.matched = match
            return True
        self._state = self._strings.step(self._state, char)
        self._position += 1
        match = None
        if stop := self._strings.longest[self._state]:
            match = (self._position - len(stop), stop)
        by_regex = regexes.step(char, self._position - 1)
        if by_regex is not None and (match is None or by_regex[0] < match[0]):
            match = by_regex
        if match is not None:
            self._match_start, self.matched = match
        return match is not None

    def _stop(self, text: str, origin: int) -> tuple[str, str | None]:
        end = self._match_start if self._trim else self._position
        self._held = ""
        return text[: max(0, end - origin)], self.matched

    def _earliest(self) -> int:
        """Position from which the text might still become a match."""
        start = self._position - self._strings.depth[self._state]
        if self._regexes is not None:
            start = min(start, self._regexes.earliest(self._position))
        return start
