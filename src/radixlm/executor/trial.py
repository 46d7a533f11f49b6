"""The largest steps that a server can meet, run once before the KV pools are made, to see what
they need besides. All pages are page 0: what comes out is nonsense, what it takes is not."""

from __future__ import annotations

import numpy as np

from radixlm.executor.runner import Runner
from radixlm.step.plan import Admission, Item, StepPlan
from radixlm.wire.sampling_params import SamplingParams

_NO_IDS = np.zeros(0, np.int32)
# filters need the most memory of all ways to draw
_SAMPLING = SamplingParams(max_new_tokens=1, temperature=1.0, top_p=0.9, sampling_seed=1)


class Trial:
    """Steps of a runner whose pools have one page."""

    def __init__(self, runner: Runner, num_slots: int, context_len: int) -> None:
        self._runner, self._num_slots, self._context_len = runner, num_slots, context_len
        self._is_begun = False

    def prompts(self, step_tokens: int) -> None:
        """A step full of prompts beside as many requests as there may be, each with a token."""
        left = max(step_tokens, self._num_slots) - self._num_slots
        items = []
        for slot in range(self._num_slots):
            count = min(left + 1, self._context_len - 1)
            left -= count - 1
            items.append(self._prompt(slot, count) if count > 1 else self._decode(slot))
        self._run(tuple(items))

    def decodes(self, count: int) -> None:
        """``count`` requests that have filled their context."""
        self._run(tuple(self._decode(slot) for slot in range(count)))

    def _prompt(self, slot: int, count: int) -> Item:
        return Item(str(slot), slot, 0, count, np.zeros(count, np.int32), True)

    def _decode(self, slot: int) -> Item:
        return Item(str(slot), slot, self._context_len - 2, 1, None, True)

    def _run(self, items: tuple[Item, ...]) -> None:
        admissions: tuple[Admission, ...] = ()
        if not self._is_begun:
            prompt = np.zeros(1, np.int32)
            admissions = tuple(
                Admission(str(slot), slot, _SAMPLING, prompt, _NO_IDS)
                for slot in range(self._num_slots)
            )
            self._is_begun = True
        step = self._runner.forward(StepPlan(0, items, admissions))
        self._runner.sample(step, {})
        self._runner.read(step)
