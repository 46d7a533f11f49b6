"""Claims that a long run has to bear out, and what was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from radixlm.bench import report


@dataclass(frozen=True, slots=True)
class SloCheck:
    """One claim: what was found, what is allowed, whether it holds."""

    claim: str
    found: str
    allowed: str
    is_kept: bool


def render(verdicts: Sequence[SloCheck]) -> str:
    """The table, with the number of broken claims below it."""
    rows: list[tuple[Any, ...]] = [
        (v.claim, v.found, v.allowed, "kept" if v.is_kept else "BROKEN") for v in verdicts
    ]
    broken = sum(not v.is_kept for v in verdicts)
    end = "all kept" if not broken else f"{broken} of {len(verdicts)} BROKEN"
    return report.table(("claim", "found", "allowed", ""), rows) + f"\n{end}\n"


def growth(values: Sequence[float]) -> tuple[float, float]:
    """(typical value of the second quarter, of the last quarter): medians, so that a burst does
    not count, and the first quarter is left to caches that fill."""
    quarter = max(len(values) // 4, 1)
    return _median(values[quarter : 2 * quarter] or values), _median(values[-quarter:])


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return float(ordered[len(ordered) // 2])
