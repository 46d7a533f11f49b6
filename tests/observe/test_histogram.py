"""Percentiles of the last minutes, against sorted lists."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixlm.observe.histogram import LEAST_S, PER_OCTAVE, QUANTILES, Histogram

# half a bucket, and what rounding adds at its edge
WIDEST = 2 ** (0.5 / PER_OCTAVE) * (1 + 1e-9)


class Clock:
    now_s = 1000 * 60.0

    def __call__(self) -> float:
        return self.now_s


@given(st.lists(st.floats(LEAST_S, 1e5), min_size=1, max_size=200))
def test_percentiles_are_those_of_the_sorted_times(times: list[float]) -> None:
    found = Histogram(Clock())
    for one in times:
        found.add(one)
    got = found.percentiles(1)
    assert got is not None
    for quantile, value in zip(QUANTILES, got, strict=True):
        exact = sorted(times)[max(1, math.ceil(quantile * len(times))) - 1]
        assert exact / WIDEST <= value <= exact * WIDEST


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 5)), max_size=60))
def test_old_minutes_do_not_count(steps: list[tuple[int, int]]) -> None:
    clock = Clock()
    found = Histogram(clock)
    kept: list[tuple[int, float]] = []
    for minutes, count in steps:
        clock.now_s += 60.0 * minutes
        found.add(0.01 * count, count)
        kept += [(int(clock.now_s / 60), 0.01 * count)] * count
    now = int(clock.now_s / 60)
    for minutes in (1, 5, 60):
        recent = sorted(value for minute, value in kept if minute >= now - minutes)
        got = found.percentiles(minutes, (0.5,))
        if not recent:
            assert got is None
        else:
            exact = recent[math.ceil(0.5 * len(recent)) - 1]
            assert got is not None and got[0] == pytest.approx(exact, rel=WIDEST - 1)
    assert len(found._minutes) <= 62


def test_times_of_nothing_are_the_shortest() -> None:
    found = Histogram(Clock())
    found.add(0.0)
    found.add(-1.0)
    assert found.percentiles(1) == pytest.approx([LEAST_S] * 3, rel=0.05)
