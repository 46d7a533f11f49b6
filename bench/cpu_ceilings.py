"""Measured ceilings of this machine: memory bandwidth and arithmetic rates of the kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from radixlm.kernels.cpu.extension import native

READ, MULTIPLY_ADD, PAIRS_BF16, INT8 = range(4)  # kinds of `_cpu.measure`
_ROUNDS = {MULTIPLY_ADD: 200_000, PAIRS_BF16: 60_000, INT8: 60_000}  # a few milliseconds


@dataclass(frozen=True, slots=True)
class Ceilings:
    """GB/s of reading, GFLOP/s of float32 multiply-adds and of bfloat16 pairs (matrix tiles or
    dot products; 0 if the instruction set in use has neither), GOP/s of int8 products."""

    gb_per_s: float
    fp32_gflop_per_s: float
    bf16_gflop_per_s: float
    int8_gop_per_s: float

    def rate(self, arithmetic: str) -> float:
        """GFLOP/s or GOP/s of "fp32", "bf16" or "int8"; float32's rate for bf16 without pairs."""
        rates = {"bf16": self.bf16_gflop_per_s, "int8": self.int8_gop_per_s}
        return rates.get(arithmetic, 0.0) or self.fp32_gflop_per_s

    def best(self, other: Ceilings) -> Ceilings:
        """The higher of each rate; a lower one was disturbed by other processes."""
        return Ceilings(
            max(self.gb_per_s, other.gb_per_s),
            max(self.fp32_gflop_per_s, other.fp32_gflop_per_s),
            max(self.bf16_gflop_per_s, other.bf16_gflop_per_s),
            max(self.int8_gop_per_s, other.int8_gop_per_s),
        )


def measure_ceilings(memory: Tensor, num_threads: int, budget_s: float) -> Ceilings:
    """The best of at least two runs, for about `budget_s` seconds. `memory` must be much larger
    than the caches."""
    found = [_once(memory, num_threads)]
    end_s = time.perf_counter() + budget_s
    while len(found) < 2 or time.perf_counter() < end_s:
        found.append(found[-1].best(_once(memory, num_threads)))
    return found[-1]


def _once(memory: Tensor, num_threads: int) -> Ceilings:
    measure: Callable[[int, int, int, int], float] = native().measure
    read = measure(READ, memory.data_ptr(), memory.nbytes, num_threads)
    rates = [measure(kind, 0, rounds, num_threads) for kind, rounds in _ROUNDS.items()]
    return Ceilings(read / 1e9, rates[0] / 1e9, rates[1] / 1e9, rates[2] / 1e9)


def large_memory(num_bytes: int) -> Tensor:
    """A buffer whose pages are written, so that they exist."""
    return torch.ones(num_bytes // 4)
