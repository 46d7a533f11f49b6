"""The work for every engine: cases, and prompts that no engine has cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LOW_ID, HIGH_ID = 300, 31_900  # ids that are neither special nor single bytes in the model's text


@dataclass(frozen=True, slots=True)
class Case:
    """`num_prompts` sent at once; their first `num_shared` tokens are equal.

    `measure`: "decode" (tokens a second after the first), "prefill" (prompt tokens a second up to
    the first token), "output" (output tokens a second overall), "total" (seconds overall).
    """

    name: str
    num_prompts: int
    num_input: int
    num_output: int
    measure: str
    num_shared: int = 0
    is_long: bool = False

    @property
    def unit(self) -> str:
        """Unit of the value."""
        return "s" if self.measure == "total" else "tok/s"

    @property
    def is_higher_better(self) -> bool:
        """True for speeds, False for durations."""
        return self.measure != "total"


@dataclass(frozen=True, slots=True)
class Timed:
    """Times in seconds when all prompts were sent, the first and the last token came; the number of
    tokens."""

    start_s: float
    first_s: float
    end_s: float
    num_tokens: int


CASES = {
    case.name: case
    for case in (
        Case("decode", 1, 128, 128, "decode"),
        Case("prefill512", 1, 512, 1, "prefill"),
        Case("prefill2048", 1, 2048, 1, "prefill"),
        Case("batch16", 16, 256, 64, "output", is_long=True),
        Case("shared16", 16, 1056, 32, "total", num_shared=1024, is_long=True),
        Case("prefill8192", 1, 8192, 1, "prefill", is_long=True),
        Case("prefill32000", 1, 32_000, 1, "prefill", is_long=True),
        Case("decode8192", 1, 8192, 33, "decode", is_long=True),
        Case("decode32000", 1, 32_000, 33, "decode", is_long=True),
    )
}
COMMON = tuple(name for name in CASES if "8192" not in name and "32000" not in name)
WARM_UP = (Case("warm-up", 1, 128, 4, "total"), Case("warm-up", 1, 300, 4, "total"))
FIRST_TOKEN = Case("first token", 1, 128, 1, "total")


class Prompts:
    """Fresh random prompts; equal seeds give the same prompts in the same order."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def of(self, case: Case) -> list[list[int]]:
        """Token ids of each prompt of one run."""
        shared = self._draw(case.num_shared)
        rest = case.num_input - case.num_shared
        return [shared + self._draw(rest) for _ in range(case.num_prompts)]

    def _draw(self, count: int) -> list[int]:
        ids: list[int] = self._random.integers(LOW_ID, HIGH_ID, count).tolist()
        return ids


def value_of(case: Case, timed: Timed) -> float:
    """The value of one run. ValueError if tokens are missing."""
    expected = case.num_prompts * case.num_output
    if timed.num_tokens != expected:
        raise ValueError(f"{timed.num_tokens} tokens came instead of {expected}")
    if case.measure == "decode":
        return (timed.num_tokens - case.num_prompts) / (timed.end_s - timed.first_s)
    if case.measure == "prefill":
        return case.num_prompts * case.num_input / (timed.first_s - timed.start_s)
    total_s = timed.end_s - timed.start_s
    return total_s if case.measure == "total" else timed.num_tokens / total_s


def chosen(names: Sequence[str]) -> list[Case]:
    """Cases by name. KeyError for an unknown name."""
    return [CASES[name] for name in names]
