"""Checks of a long run against its limits, and the table that shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from radixlm.bench import report


@dataclass(frozen=True, slots=True)
class SloCheck:
    """One check: the claim, the measured value, the allowed value and whether the claim holds."""

    claim: str
    found: str
    allowed: str
    is_kept: bool


def render(checks: Sequence[SloCheck]) -> str:
    """The table of checks, and below it the number of broken claims."""
    rows: list[tuple[Any, ...]] = [
        (v.claim, v.found, v.allowed, "kept" if v.is_kept else "BROKEN") for v in checks
    ]
    broken = sum(not v.is_kept for v in checks)
    end = "all kept" if not broken else f"{broken} of {len(checks)} BROKEN"
    return report.table(("claim", "found", "allowed", ""), rows) + f"\n{end}\n"


def growth(values: Sequence[float]) -> tuple[float, float]:
    """Medians of the second and of the last quarter. The first quarter is left out, because
    caches fill then; medians ignore short bursts."""
    quarter = max(len(values) // 4, 1)
    return _median(values[quarter : 2 * quarter] or values), _median(values[-quarter:])


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return float(ordered[len(ordered) // 2])
