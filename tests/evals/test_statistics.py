"""Intervals and tests against figures worked out by hand or by counting all cases."""

from __future__ import annotations

import math
from itertools import product

import pytest

from radixlm.evals.statistics import bootstrap, compare, interval, mcnemar, sign_flips, wilson


def test_wilson_solves_its_equation() -> None:
    """The ends are where the share lies 1.96 standard errors of the end away."""
    for num_right, count in ((0, 10), (7, 10), (10, 10), (181, 200)):
        for end in wilson(num_right, count):
            error = math.sqrt(end * (1 - end) / count)
            assert abs(num_right / count - end) == pytest.approx(1.959964 * error, abs=1e-7)


def test_mcnemar_counts_all_splits() -> None:
    for first, second in ((0, 0), (3, 3), (1, 5), (9, 2)):
        count, gap = first + second, abs(first - second)
        splits = list(product((0, 1), repeat=count))
        as_far = sum(abs(2 * sum(split) - count) >= gap for split in splits)
        assert mcnemar(first, second) == pytest.approx(as_far / len(splits))


def test_sign_flips_are_near_all_flips() -> None:
    gaps = [0.5, 0.25, -0.1, 0.3, 0.6, 0.2]
    sums = [
        abs(sum(s * g for s, g in zip(signs, gaps, strict=True)))
        for signs in product((1, -1), repeat=6)
    ]
    exact = sum(one >= abs(sum(gaps)) - 1e-12 for one in sums) / len(sums)
    assert sign_flips(gaps, 1) == pytest.approx(exact, abs=0.02)


def test_bootstrap_is_near_the_normal_interval_and_follows_the_seed() -> None:
    values = [(i * 37 % 101) / 100 for i in range(101)]
    mean = sum(values) / 101
    error = math.sqrt(sum((v - mean) ** 2 for v in values)) / 101
    low, high = bootstrap(values, 3)
    assert (low, high) == bootstrap(values, 3) != bootstrap(values, 4)
    assert low == pytest.approx(mean - 1.96 * error, abs=0.01)
    assert high == pytest.approx(mean + 1.96 * error, abs=0.01)


def test_interval_names_its_method() -> None:
    assert interval([1.0, 0.0], 0)[2] == "Wilson" and interval([0.5, 1.0], 0)[2] == "bootstrap"


def test_compare_says_whether_a_difference_is_real() -> None:
    worse = [float(i % 10 < 7) for i in range(200)]
    better = [float(i % 10 < 9) for i in range(200)]
    found = compare(worse, better, 0)
    assert found.is_real and found.only_second == 40 and found.only_first == 0
    assert found.p == pytest.approx(mcnemar(0, 40)) and found.high < 0
    assert found.sentence().startswith("The difference is real: -20.0 points")
    near = [1.0, *worse[1:-1], 1.0]
    same = compare(worse, near, 0)
    assert not same.is_real and same.low <= same.difference <= same.high
    assert same.sentence().startswith("No difference is shown: -0.5 points")
    assert compare([0.5, 0.25], [0.5, 0.5], 0).method == "sign flips"
