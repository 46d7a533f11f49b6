"""Steps that nobody asked for: the largest that a server can meet, run once before the KV pools are
made, to see what they need besides; and one of every kind, so that no request waits for a compiler.
All pages are page 0: what comes out is nonsense, what it takes is not."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixlm.executor.runner import Runner
from radixlm.step.plan import Admission, Item, StepPlan
from radixlm.wire.requests import LogprobParams
from radixlm.wire.sampling_params import SamplingParams

_NO_IDS = np.zeros(0, np.int32)
_NO_MASKS: Mapping[int, NDArray[np.int32]] = {}
# filters need the most memory of all ways to draw
_SAMPLING = SamplingParams(max_new_tokens=1, temperature=1.0, top_p=0.9, sampling_seed=1)
_PENALISED = SamplingParams(
    max_new_tokens=1, temperature=1.0, presence_penalty=0.5, logit_bias={0: 1.0}, sampling_seed=1
)
FEW = 64  # up to so many tokens tiles are chosen more finely


class DummyRun:
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

    def sizes(self, step_tokens: int) -> None:
        """Parts of prompts behind all the rest of the context, and decodes, of every number of
        tokens that kernels tell apart; the largest first, which makes the memory of all."""
        self.prompts(step_tokens)
        for count in reversed(counts_up_to(step_tokens)):
            items, left = list[Item](), count
            while left > 0 and len(items) < self._num_slots:
                part = min(left, max(1, self._context_len - 2))
                items.append(self._prompt(len(items), part, self._context_len - 1 - part))
                left -= part
            self._run(tuple(items))
        for count in reversed(counts_up_to(self._num_slots)):
            self.decodes(count)
        if step_tokens < self._context_len:  # a whole chunk, which comes again and again
            self._run((self._prompt(0, step_tokens),))

    def draws(self) -> None:
        """A token drawn in every way: plainly, by a grammar's mask, with log-probabilities, with
        penalties and a bias."""
        masks = {0: np.full(-(-self._runner.sampling.vocab_size // 32), -1, np.int32)}
        item = self._decode(0)
        told = msgspec.structs.replace(item, logprobs=LogprobParams(top=2))
        for items in ((item,), (told,)):
            self._run(items)
            self._run(items, masks)
        again = Admission("0", 0, _PENALISED, np.zeros(1, np.int32), _NO_IDS)
        self._run((item,), admissions=(again,))
        self._run((item,), masks)

    def _prompt(self, slot: int, count: int, start: int = 0) -> Item:
        return Item(str(slot), slot, start, count, np.zeros(count, np.int32), True)

    def _decode(self, slot: int) -> Item:
        return Item(str(slot), slot, self._context_len - 2, 1, None, True)

    def _run(
        self,
        items: tuple[Item, ...],
        masks: Mapping[int, NDArray[np.int32]] = _NO_MASKS,
        admissions: tuple[Admission, ...] = (),
    ) -> None:
        if not self._is_begun:
            prompt = np.zeros(1, np.int32)
            admissions = tuple(
                Admission(str(slot), slot, _SAMPLING, prompt, _NO_IDS)
                for slot in range(self._num_slots)
            )
            self._is_begun = True
        step = self._runner.forward(StepPlan(0, items, admissions))
        self._runner.sample(step, masks)
        self._runner.read(step)


def counts_up_to(most: int) -> list[int]:
    """Powers of two, also times 1.5 where they are few, and ``most``: of each interval that a table
    of tiles has, one."""
    steps = [1 << step for step in range(most.bit_length())]
    middles = [3 * step // 2 for step in steps[1:] if 3 * step // 2 <= FEW]
    return sorted({count for count in (*steps, *middles, most) if 0 < count <= most})
