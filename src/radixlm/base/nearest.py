"""Suggestions for misspelled names."""

from collections.abc import Iterable
from difflib import get_close_matches


def suggestion(text: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" for the nearest of ``known``, or "" if none is near."""
    near = get_close_matches(text, list(known), 1, 0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
