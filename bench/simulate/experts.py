"""How unevenly experts are loaded, with and without the engine's own EPLB."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from radixlm.distributed.balance import Placement, balancedness, rebalance, trivial
from simulate.cost import Cost
from simulate.layout import Layout
from simulate.machine import GPUS_A_NODE, FloatArray

LAYERS = 8  # as many layers are drawn; the others are like them
_TOKENS = 4.0 ** np.arange(2, 11)  # of the table that is interpolated
_HISTORY_TOKENS = 1 << 20  # that the balancer has counted


def popularity(
    experts: int, spread: float, draw: np.random.Generator, layers: int = LAYERS
) -> FloatArray:
    """Shares of the tokens by layer and expert: lognormal with this sigma."""
    weights = np.exp(draw.normal(0, spread, (layers, experts)))
    found: FloatArray = weights / weights.sum(1, keepdims=True)
    return found


def place(cost: Cost, layout: Layout, counts_LE: NDArray[np.int64] | None) -> Placement:
    """Where the experts lie: by EPLB after these counts, or in order."""
    slots = cost.experts + layout.redundant
    if counts_LE is None:
        return trivial(LAYERS, cost.experts, slots)
    nodes = max(layout.tp // GPUS_A_NODE, 1)
    nodes = nodes if slots % nodes == 0 and layout.tp % nodes == 0 else 1
    return rebalance(counts_LE[None], slots, layout.tp, nodes, 1)


def skew(
    cost: Cost, layout: Layout, spread: float, is_balanced: bool, drift: float = 0.0, seed: int = 0
) -> Callable[[float], float]:
    """Load of the busiest rank over the mean, by the tokens of a step, averaged over layers.

    ``drift``: sigma of what has changed since the balancer counted."""
    layout.check(cost)
    draw = np.random.default_rng(seed)
    shares = popularity(cost.experts, spread, draw)
    history = draw.multinomial(_HISTORY_TOKENS, shares)
    placement = place(cost, layout, history if is_balanced else None)
    shares = shares * np.exp(draw.normal(0, drift, shares.shape))
    shares /= shares.sum(1, keepdims=True)
    found = []
    for tokens in _TOKENS:
        num = int(tokens * cost.top_k)
        each = [balancedness(draw.multinomial(num, shares), placement, layout.tp) for _ in range(4)]
        found.append(float(np.mean(1 / np.array(each))))
    log = np.log(_TOKENS)
    return lambda tokens: float(np.interp(np.log(max(tokens, 1.0)), log, found))
