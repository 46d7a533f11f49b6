"""The requests for all compared engines; imports no engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SEED = 0


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A prompt and the number of wanted tokens."""

    ids: NDArray[np.int32]
    output: int


def requests(vocab: int, count: int, least: int, most: int) -> list[BenchRequest]:
    """Prompts and answers of U(least, most) tokens as in nano-vllm's benchmark; always the same."""
    draw = np.random.default_rng(SEED)
    lengths = draw.integers(least, most + 1, (count, 2))
    return [BenchRequest(draw.integers(0, vocab, n, np.int32), int(out)) for n, out in lengths]
