"""Prediction: a text that the client expects, as OpenAI's ``prediction``, beside the output."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

_SURE_TOKENS = 4  # after so many that agreed, the output is taken to repeat the text


class Prediction:
    """The expected tokens ``ids``, and how far the output has repeated them.

    Where the output departs from them, it is found again by its last two tokens, at the first
    place behind the departure where they stand, else at the last before it."""

    def __init__(self, ids: NDArray[np.int32]) -> None:
        self.ids: list[int] = ids.tolist()
        self.num_seen = 0  # tokens of the output
        self._accepted: set[int] = set()  # places of ids that the output has repeated
        self._next: int | None = 0
        self._run = _SURE_TOKENS  # tokens that agreed since the place was found
        self._expected, self._last = 0, -1
        self._places: dict[tuple[int, int], list[int]] | None = None

    @property
    def num_accepted(self) -> int:
        """Tokens of the text that the output holds."""
        return len(self._accepted)

    def follow(self, output: Iterable[int]) -> None:
        """Go on with new tokens of the output."""
        for token in output:
            self.num_seen += 1
            place = self._next
            if place is not None and place < len(self.ids) and self.ids[place] == token:
                self._accepted.add(place)
                self._next, self._run = place + 1, self._run + 1
            else:
                self._find(token)
            self._last = token

    def _find(self, token: int) -> None:
        """Look for the last two tokens of the output."""
        if self._next is not None:
            self._expected = self._next
        if self._places is None:
            self._places = {}
            for place in range(1, len(self.ids)):
                pair = (self.ids[place - 1], self.ids[place])
                self._places.setdefault(pair, []).append(place + 1)
        places = self._places.get((self._last, token), [])
        ahead = bisect_left(places, self._expected)
        self._next, self._run = None, 0
        if places:
            self._next = places[min(ahead, len(places) - 1)]
            self._accepted |= {self._next - 2, self._next - 1}

    def following(self, max_tokens: int) -> list[int]:
        """At most ``max_tokens`` tokens that may follow; none where the place is lost."""
        place = self._next
        return [] if place is None else self.ids[place : place + max_tokens]

    @property
    def is_repeated(self) -> bool:
        """Whether the last tokens of the output agreed."""
        return self._run >= _SURE_TOKENS
