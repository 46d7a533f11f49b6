"""ContinuousDecoding: how many tokens the rows of a step decode in turn
(--num-continuous-decode-steps).

A step of a small model takes less time than to plan, commit and report it. So its rows go through
the model several times before anybody looks at them again: as often as was asked for, or as fits
into AUTOMATIC_S. What a request has sampled behind its end is dropped, as behind a right draft.
"""

from __future__ import annotations

import numpy as np

from radixlm.scheduler.kv_cache_manager import KVCacheManager
from radixlm.scheduler.limits import Limits
from radixlm.scheduler.plan_parts import allocate_beyond
from radixlm.scheduler.slot_table import RECENT
from radixlm.step.plan import EMPTY_DECODES, DecodeBatch, Drafts, Items
from radixlm.step.result import StepResult

AUTOMATIC_S = 0.004  # that a step of several passes may take where nobody chose their number
AUTOMATIC_PASSES = 16
FIRST_PASSES = 4  # for each token that a request has by then
TELLING_PASSES = 8  # of a step, from which on it tells what a further pass costs


class ContinuousDecoding:
    """Chooses the passes of steps in which all rows decode."""

    def __init__(self, limits: Limits, kv_manager: KVCacheManager) -> None:
        self._kv_manager, self._table = kv_manager, kv_manager.table
        self._is_timed = limits.max_passes == 0
        # the rings of recent tokens have room for so many
        self._most = AUTOMATIC_PASSES if self._is_timed else min(limits.max_passes, RECENT // 2)
        self._pass_s = AUTOMATIC_S  # of one pass, as the last step took
        # of the first pass, which the host prepares, what a further one takes: not known yet
        self._further_share = 1.0
        # batches that took one pass all the same: in the last step; and in two, as their model or
        # sampling must (in one, all rows may have come to an end that they ignore)
        self._lone = self._refused = EMPTY_DECODES

    def plan(self, batch: DecodeBatch) -> Drafts | None:
        """Further tokens for the rows of the batch, whose next tokens count as computed; these then
        count too. None: one pass."""
        most = self._num_passes(self._pass_s)
        if most < 2 or not self._goes_on(batch):
            return None
        table, slots = self._table, batch.slots
        computed = table.num_computed[slots]
        if self._is_timed:  # the first tokens of a stream do not wait for many others
            most = min(most, FIRST_PASSES * int((computed - table.prompt_len[slots]).min()))
        lens = np.minimum(table.end[slots] - computed, most - 1)
        allocate_beyond(self._kv_manager, slots, computed, lens)
        if not np.count_nonzero(lens):
            return None
        table.num_computed[slots] += lens
        return Drafts(lens.astype(np.int32), None, continues=True)

    def _goes_on(self, batch: DecodeBatch) -> bool:
        """Whether a batch may have several passes: no feature must see each of its tokens before
        the next."""
        goes_on = self._table.goes_on[batch.slots]
        is_free = batch is not self._refused and np.count_nonzero(goes_on) == len(goes_on)
        return self._most > 1 and is_free

    def _num_passes(self, pass_s: float) -> int:
        """Passes of a step, where each takes so long."""
        if not self._is_timed:
            return self._most
        return max(1, min(self._most, int(AUTOMATIC_S / max(pass_s, 1e-9))))

    def observe(
        self, items: Items, result: StepResult, seconds: float, model_s: float, sleep_s: float = 0.0
    ) -> float:
        """A step without prompts and drafts took so long, and the model's first pass ``model_s``.
        ``sleep_s`` behind each step stand for a slower model.

        Returns the seconds of a pass, of steps with as many passes as are planned: those of a lone
        one, after which a drafter sees the step, would let drafts look cheap."""
        num_passes = 1
        if items.more_N is not None:
            assert result.counts is not None
            num_passes = int(result.counts.max())
            if num_passes == 1 and items.decodes is self._lone:
                self._refused = items.decodes
            self._lone = items.decodes if num_passes == 1 else EMPTY_DECODES
        self._pass_s = seconds / num_passes + sleep_s
        if num_passes >= TELLING_PASSES and model_s:
            share = max(0.0, seconds - model_s) / (num_passes - 1) / model_s
            self._further_share += 0.2 * (min(1.0, share) - self._further_share)
        if num_passes > 1 or not self._goes_on(items.decodes):
            return seconds / num_passes
        model_s *= self._further_share
        others_s = max(0.0, seconds - model_s)
        return seconds - others_s * (1 - 1 / self._num_passes(model_s + others_s / self._most))
