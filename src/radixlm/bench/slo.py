"""Service level objectives: limits of a request's latencies, and who keeps them (goodput)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from radixlm.base.errors import ConfigError
from radixlm.bench.backends import Outcome

NAMES = ("ttft", "tpot", "e2el")
_EXAMPLE = "--goodput ttft:500 tpot:50 e2el:10000"


def limits_ms(words: Sequence[str] | None) -> dict[str, float]:
    """Name -> milliseconds of words like ttft:500. ConfigError for others."""
    found: dict[str, float] = {}
    for word in words or ():
        name, _, text = word.partition(":")
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if name not in NAMES or not value > 0:
            raise ConfigError(f"--goodput {word}: names are {', '.join(NAMES)}, in ms: {_EXAMPLE}")
        found[name] = value
    return found


def keeps(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    """Whether a request succeeded within all limits."""
    rest = max(1, outcome.num_output - 1)
    figures = {
        "ttft": outcome.ttft_s,
        "tpot": (outcome.latency_s - outcome.ttft_s) / rest,
        "e2el": outcome.latency_s,
    }
    return outcome.is_ok and all(figures[n] * 1e3 <= limit for n, limit in limits.items())


def goodput(
    outcomes: Sequence[Outcome], limits: Mapping[str, float], duration_s: float
) -> dict[str, Any]:
    """`request_goodput`: requests a second within the limits; `slo_attainment`: their share."""
    count = sum(keeps(outcome, limits) for outcome in outcomes)
    return {
        "goodput_limits_ms": dict(limits),
        "request_goodput": count / duration_s,
        "slo_attainment": count / len(outcomes),
    }
