"""StageBatches: what a step may hold of several pipeline stages.

Steps in flight have disjoint requests, since a token is known when its step has passed all stages.
"""

from __future__ import annotations

import sys
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from radixlm.scheduler.planner import Planner
from radixlm.scheduler.request import Request
from radixlm.scheduler.slot_table import Int64Array

# parts of all prompts for each stage behind the first, and the least tokens
STAGE_CHUNKS, LEAST_STAGE_CHUNK = 8, 64


class StageBatches:
    """Of one planner."""

    def __init__(self, planner: Planner) -> None:
        self._limits, self._queue = planner.limits, planner.queue
        self._table = planner.kv_manager.table
        self._max_items = planner.limits.max_micro_batch or sys.maxsize
        # by slot: index of the step that it last decoded in
        self._last_decoded = np.zeros(planner.limits.max_running, np.int64)
        self._staged_tokens = 0  # of the prompts that pass the stages together

    def micro_batch(
        self, slots: Int64Array, is_decoding: NDArray[np.bool_], index: int
    ) -> NDArray[np.bool_]:
        """Of several pipeline stages: which rows decode in this step. None that is in flight, an
        even share of all, those that have waited longest."""
        num_rows = int(np.count_nonzero(is_decoding))
        is_free: NDArray[np.bool_] = is_decoding & (self._table.inflight[slots] == 0)
        rows = np.flatnonzero(is_free)
        share = min(-(-num_rows // self._limits.stages), self._max_items)
        if len(rows) > share:
            order = np.argsort(self._last_decoded[slots[rows]], kind="stable")
            is_free[rows[order[share:]]] = False
        self._last_decoded[slots[is_free]] = index
        return is_free

    def prompt_tokens(self, prefilling: list[Request], left: int) -> int:
        """The tokens of prompts that a step may have, ``left`` at most: with several stages a part
        of all prompts, as parts that pass one stage after another keep all stages at work."""
        limits = self._limits
        if limits.waits_for_chunks or not limits.chunked:
            return left
        num_parts = STAGE_CHUNKS * (limits.stages - 1)
        total = 0
        for request in chain(prefilling, self._queue):
            total += request.prefill_len
            if total >= num_parts * left:
                break
        # until all prompts are computed: else the parts would shrink with what is left of them
        self._staged_tokens = max(self._staged_tokens, total) if total else 0
        return min(left, max(LEAST_STAGE_CHUNK, -(-self._staged_tokens // num_parts)))
