"""Rebalancer: from time to time, new places for the experts of a model that serves.

It runs on rank 0. The places are computed in a thread; some layers at a time are moved by all ranks
between two steps.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from radixlm.base.record import Record
from radixlm.distributed.balance import Placement, balancedness, rebalance
from radixlm.distributed.record import ExpertRecorder

log = logging.getLogger(__name__)


class RebalanceOptions(Record):
    """``num_steps`` between two rebalancings; ``num_layers`` moved at once, 0 for all;
    ``threshold``: only below this mean balancedness."""

    num_steps: int
    num_layers: int
    threshold: float
    algorithm: str
    nodes: int = 1
    groups: int = 1


class Rebalancer:
    """Reads the recorder's counts; ``due`` says what to move."""

    def __init__(self, recorder: ExpertRecorder, options: RebalanceOptions) -> None:
        self._recorder, self._options = recorder, options
        self._thread = ThreadPoolExecutor(1, "expert-balance")
        self._future: Future[Placement] | None = None
        self._rows: list[tuple[int, list[int]]] = []
        self._num_seen = 0

    def due(self) -> dict[str, Any] | None:
        """Called before each step: layers and the experts of their slots, or None."""
        if (future := self._future) is not None and future.done():
            self._future = None
            if (error := future.exception()) is not None:
                log.error("experts stay where they are: %s: %s", type(error).__name__, error)
            else:
                self._rows = self._changed(future.result())
        if self._rows:
            count = self._options.num_layers or len(self._rows)
            rows, self._rows = self._rows[:count], self._rows[count:]
            return {"rows": rows}
        num_passes = self._recorder.num_passes
        if self._future is None and num_passes - self._num_seen >= self._options.num_steps:
            self._num_seen = num_passes
            counted = self._recorder.counts_SLE  # none if they have just been written to a file
            if counted and self._recorder.mean_balance <= self._options.threshold:
                self._begin()
        return None

    def _begin(self) -> None:
        options, recorder = self._options, self._recorder
        counts_SLE = np.stack(recorder.counts_SLE)
        self._future = self._thread.submit(
            rebalance, counts_SLE, recorder.placement.num_slots, recorder.options.ranks,
            options.nodes, options.groups, options.algorithm,
        )  # fmt: skip

    def _changed(self, placement: Placement) -> list[tuple[int, list[int]]]:
        """The layers that change."""
        old, ranks = self._recorder.placement, self._recorder.options.ranks
        counts_LE = sum(self._recorder.counts_SLE, np.zeros_like(old.counts_LE))
        before, after = (float(balancedness(counts_LE, p, ranks).mean()) for p in (old, placement))
        pairs = enumerate(zip(placement.logical_LP, old.logical_LP, strict=True))
        rows = [(layer, new.tolist()) for layer, (new, now) in pairs if (new != now).any()]
        log.info("experts of %d layers move: balancedness %.3f to %.3f", len(rows), before, after)
        return rows
