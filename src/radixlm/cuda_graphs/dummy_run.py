"""DummyRun: steps without requests. The largest possible steps run before the KV pools are made, to
measure the memory that they need; one of every kind runs at start, so that no request waits for a
compiler. All pages of requests are page 0, so the results mean nothing.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from radixlm.executor.runner import Runner
from radixlm.step.masks import Masks
from radixlm.step.plan import Admission, Drafts, Item, Items, PageCopy, StepPlan
from radixlm.wire.requests import LogprobParams
from radixlm.wire.sampling_params import SamplingParams

_NO_IDS = np.zeros(0, np.int32)
_NO_MASKS = Masks()
# top-p needs the most memory of all ways to sample
_SAMPLING = SamplingParams(max_new_tokens=1, temperature=1.0, top_p=0.9, sampling_seed=1)
_PENALISED = SamplingParams(
    max_new_tokens=1, temperature=1.0, presence_penalty=0.5, logit_bias={0: 1.0}, sampling_seed=1
)
MAX_FINE = 64  # up to this many tokens, kernels have tiles for sizes in between


class DummyRun:
    """Steps of a runner whose pools have one page. ``adapter``: the number of all requests'."""

    def __init__(self, runner: Runner, num_slots: int, context_len: int, adapter: int = -1) -> None:
        self._runner, self._num_slots, self._context_len = runner, num_slots, context_len
        self._adapter = adapter
        self._is_begun = False

    def prompts(self, step_tokens: int) -> None:
        """A step full of prompt tokens, with as many requests as possible."""
        left = max(step_tokens, self._num_slots) - self._num_slots
        items = []
        for slot in range(self._num_slots):
            count = min(left + 1, self._context_len - 1)
            left -= count - 1
            items.append(self._prompt(slot, count) if count > 1 else self._decode(slot))
        self._run(tuple(items))

    def decodes(self, count: int) -> None:
        """A step that decodes ``count`` requests at full context."""
        self._run(tuple(self._decode(slot) for slot in range(count)))

    def drafts(self, max_drafts: int, step_tokens: int) -> None:
        """A step of as many requests as possible that verify ``max_drafts`` tokens each."""
        count = max(1, min(self._num_slots, step_tokens // (1 + max_drafts)))
        batch = Items.of([self._decode(slot) for slot in range(count)])
        lens = np.full(count, min(max_drafts, self._context_len - 2), np.int32)
        tokens = np.zeros(int(lens.sum()), np.int32)
        self._run(Items(batch.decodes, batch.starts - lens, (), Drafts(lens, tokens)))

    def sizes(self, step_tokens: int) -> None:
        """Chunks at the end of the context, and decodes, of every number of tokens that kernels
        distinguish; the largest first, so that it allocates the memory for all."""
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
        if step_tokens < self._context_len:  # a whole chunk, which is common
            self._run((self._prompt(0, step_tokens),))

    def sampling(self) -> None:
        """Sample a token in every way: plainly, with a grammar's mask, with log-probabilities, with
        penalties and a bias."""
        masks = Masks({0: np.full(-(-self._runner.sampling.vocab_size // 32), -1, np.int32)})
        item = self._decode(0)
        with_logprobs = msgspec.structs.replace(item, logprobs=LogprobParams(top=2))
        for items in ((item,), (with_logprobs,)):
            self._run(items)
            self._run(items, masks)
        penalised = Admission("0", 0, _PENALISED, np.zeros(1, np.int32), _NO_IDS)
        self._run((item,), admissions=(penalised,))
        self._run((item,), masks)

    def page_copies(self) -> None:
        """Copy pages in every way: one page, to another and to itself, and two that change places;
        kernels may distinguish odd and even numbers of pages. The pools have two pages or more."""
        for pairs in (((0, 1),), ((0, 0),), ((0, 1), (1, 0))):
            copies = tuple(PageCopy(space, 0, *pair) for space in (0, 1) for pair in pairs)
            self._run((self._decode(0),), copies=copies)

    def _prompt(self, slot: int, count: int, start: int = 0) -> Item:
        return Item(str(slot), slot, start, count, np.zeros(count, np.int32), True)

    def _decode(self, slot: int) -> Item:
        return Item(str(slot), slot, self._context_len - 2, 1, None, True)

    def _run(
        self,
        items: Sequence[Item],
        masks: Masks = _NO_MASKS,
        admissions: tuple[Admission, ...] = (),
        copies: tuple[PageCopy, ...] = (),
    ) -> None:
        if not self._is_begun:
            prompt = np.zeros(1, np.int32)
            admissions = tuple(
                Admission(str(slot), slot, _SAMPLING, prompt, _NO_IDS, adapter=self._adapter)
                for slot in range(self._num_slots)
            )
            self._is_begun = True
        plan = StepPlan(0, items, admissions, copies=copies)
        if not self._runner.samples:
            self._runner.follow(plan)
            return
        step = self._runner.forward(plan)
        self._runner.sample(step, masks)
        self._runner.read(step)


def counts_up_to(limit: int) -> list[int]:
    """Powers of two, small ones also times 1.5, and ``limit``: one count of each interval in the
    kernels' tables of tiles."""
    steps = [1 << step for step in range(limit.bit_length())]
    middles = [3 * step // 2 for step in steps[1:] if 3 * step // 2 <= MAX_FINE]
    return sorted({count for count in (*steps, *middles, limit) if 0 < count <= limit})
