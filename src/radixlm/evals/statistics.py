"""Confidence intervals, and whether two runs over the same items differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z = 1.959964  # of 95 %
_DRAWS = 4000


def wilson(num_right: float, count: int) -> tuple[float, float]:
    """95 % score interval of a share (Wilson 1927); it never leaves 0 to 1."""
    if count == 0:
        return 0.0, 1.0
    share, z2 = num_right / count, Z * Z
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z * math.sqrt(share * (1 - share) / count + z2 / (4 * count * count)) / (1 + z2 / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def bootstrap(values: Sequence[float], seed: int) -> tuple[float, float]:
    """95 % interval of the mean by resampling (Efron's percentiles)."""
    sample = np.asarray(values, np.float64)
    draw = np.random.default_rng(seed)
    means = np.array(
        [sample[draw.integers(0, len(sample), len(sample))].mean() for _ in range(_DRAWS)]
    )
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def interval(scores: Sequence[float], seed: int) -> tuple[float, float, str]:
    """(low, high, method): Wilson for scores of 0 and 1, else bootstrap."""
    if all(score in (0.0, 1.0) for score in scores):
        return *wilson(sum(scores), len(scores)), "Wilson"
    return *bootstrap(scores, seed), "bootstrap"


def mcnemar(only_first: int, only_second: int) -> float:
    """Exact two-sided p of McNemar's test: of the items that one run alone got right, how likely
    is a split as uneven as this if both are equally good."""
    count, few = only_first + only_second, min(only_first, only_second)
    if count == 0:
        return 1.0
    tail = sum(math.comb(count, k) for k in range(few + 1))
    return float(min(1.0, 2 * tail / 2**count))


def sign_flips(differences: Sequence[float], seed: int) -> float:
    """Two-sided p of the mean difference by flipping the signs of pairs at random."""
    values = np.asarray(differences, np.float64)
    seen = abs(values.sum())
    draw = np.random.default_rng(seed)
    sums = (values @ (draw.integers(0, 2, len(values)) * 2 - 1) for _ in range(_DRAWS))
    num_larger = sum(bool(abs(one) >= seen - 1e-12) for one in sums)
    return (num_larger + 1) / (_DRAWS + 1)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The first run's mean score less the second's, over pairs. `detectable`: a true difference
    that a run of so many pairs would show four times of five."""

    num_pairs: int
    first: float
    second: float
    only_first: int
    only_second: int
    difference: float
    low: float
    high: float
    p: float
    method: str
    detectable: float

    @property
    def is_real(self) -> bool:
        return self.p < 0.05

    def sentence(self) -> str:
        points = f"{100 * self.difference:+.1f} points"
        ranged = f"95% {100 * self.low:+.1f} to {100 * self.high:+.1f}"
        if self.is_real:
            better = "first" if self.difference > 0 else "second"
            verdict = f"The difference is real: {points} ({ranged}), p = {self.p:.2g}"
            return f"{verdict}; the {better} is better."
        return (
            f"No difference is shown: {points} ({ranged}), p = {self.p:.2g}. "
            f"{self.num_pairs} items show one of {100 * self.detectable:.1f} points or more."
        )


def compare(first: Sequence[float], second: Sequence[float], seed: int) -> Comparison:
    """Compare the scores of the same items in two runs (lengths equal, at least one)."""
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    gaps = a - b
    only_first, only_second = int((gaps > 0).sum()), int((gaps < 0).sum())
    is_binary = bool(np.isin(np.concatenate([a, b]), (0.0, 1.0)).all())
    p = mcnemar(only_first, only_second) if is_binary else sign_flips(gaps.tolist(), seed)
    low, high = bootstrap(gaps.tolist(), seed)
    # of pairs that all agree the spread is unknown: as if one pair differed
    spread = max(float(gaps.std()), 1 / math.sqrt(len(gaps)))
    return Comparison(
        num_pairs=len(gaps),
        first=float(a.mean()),
        second=float(b.mean()),
        only_first=only_first,
        only_second=only_second,
        difference=float(gaps.mean()),
        low=low,
        high=high,
        p=p,
        method="McNemar" if is_binary else "sign flips",
        detectable=min(1.0, 2.8 * spread / math.sqrt(len(gaps))),
    )
