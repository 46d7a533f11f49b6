"""Parameters of tests that repeat one property over many cases: a few always run, the others are
slow tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_unless(is_quick: Callable[..., bool], cases: Iterable[Any]) -> list[Any]:
    """All cases, those as slow for which ``is_quick`` (of a case, or of its values) is false."""
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=() if is_quick(*values) else pytest.mark.slow))
    return found


def first(count: int, cases: Iterable[Any]) -> list[Any]:
    """All cases, the first ``count`` of them quick: drawn numbers, of which none is special."""
    return [
        pytest.param(case, marks=() if place < count else pytest.mark.slow)
        for place, case in enumerate(cases)
    ]
