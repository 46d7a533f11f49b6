"""A real scheduler whose executor computes nothing: a unit (`unit.py`) says how long a step takes.

While requests only decode, a plan stands for many steps at once: each row verifies as many drafts
as the shortest request has tokens left, and all are accepted. When something happens before the
last of them, the rest is refused, which is how drafts end early in any engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from radixlm.memory.pages import PageAllocator
from radixlm.memory.prefix.base import PrefixCache
from radixlm.memory.prefix.radix import RadixCache
from radixlm.memory.slots import SlotAllocator
from radixlm.scheduler.kv_cache_manager import KVCacheManager
from radixlm.scheduler.limits import Limits
from radixlm.scheduler.loop import Scheduler
from radixlm.scheduler.request import Request
from radixlm.speculative.draft_counts import DraftCounts
from radixlm.step.plan import DecodeBatch, Drafts, Items, StepPlan
from radixlm.step.result import ItemResult, StepResult
from radixlm.wire.channel import MemoryChannel
from radixlm.wire.replies import StepReply, TokenDelta
from radixlm.wire.requests import TokenizedRequest

MAX_STEPS = 64  # that one plan may stand for
_BLOCKED_STEPS = 16  # the same while a request waits for pages
_TOKEN, _NO_TOKEN = ItemResult((0,)), ItemResult()


class LongSteps:
    """The scheduler's ``Drafting``: as many drafts for each row as the shortest has tokens left."""

    def __init__(self, kv_manager: KVCacheManager, most: int = MAX_STEPS) -> None:
        self._kv_manager, self._table, self.most = kv_manager, kv_manager.table, most
        self.counts = DraftCounts(has_drafter=False)
        self.is_blocked: Callable[[], bool] = lambda: False

    def plan(self, batch: DecodeBatch, other_tokens: int) -> Drafts | None:
        """Drafts for the rows of the batch, whose next tokens count as computed."""
        if other_tokens:
            return None
        table, slots = self._table, batch.slots
        computed = table.num_computed[slots]
        most = min(self.most, _BLOCKED_STEPS) if self.is_blocked() else self.most
        num = min(int((table.end[slots] - computed).min()), most - 1)
        ends = computed + num
        for i in np.flatnonzero(ends > table.num_allocated[slots]).tolist():
            request = self._kv_manager.request_in(int(slots[i]))
            if not self._kv_manager.allocate(request, int(ends[i])):
                num = min(num, request.num_allocated - int(computed[i]))
        if num <= 0:
            return None
        table.num_computed[slots] += num
        return Drafts(np.full(len(slots), num, np.int32), np.zeros(len(slots) * num, np.int32))

    def register(self, request: Request) -> None: ...
    def device_lens(self, items: Items) -> None: ...
    def observe(self, items: Items, result: StepResult) -> None: ...
    def observe_step(self, plan: StepPlan, seconds: float) -> None: ...
    def forget(self, request: Request) -> None: ...


class Worker:
    """One scheduler with its KV cache, and the plan that it has in flight.

    ``left``: steps of the plan that are still to come; ``done``: those that have passed. ``rows``:
    sequences that decode; ``cached``: tokens whose KV they read in its first step; ``chunk``:
    tokens of prompts, ``pairs``: theirs with earlier tokens, ``ends``: prompts that end.
    ``is_decode_side``: the KV of prompts has come from elsewhere, so that they cost nothing."""

    def __init__(
        self,
        limits: Limits,
        num_tokens: int,
        clock: Callable[[], float],
        is_decode_side: bool = False,
        has_cache: bool = True,
    ) -> None:
        size = limits.page_size
        pages = PageAllocator(max(num_tokens // size, 2), size)
        cache = RadixCache(pages, size) if has_cache else PrefixCache(size, False)
        self.kv_manager = KVCacheManager(pages, SlotAllocator(limits.max_running), cache, size)
        self.limits, self.is_decode_side = limits, is_decode_side
        self._mine, theirs = MemoryChannel.pair()
        steps = LongSteps(self.kv_manager)
        self.scheduler = Scheduler(
            limits,
            self,
            theirs,
            self.kv_manager,
            clock=clock,
            drafting=steps,  # type: ignore[arg-type]
        )
        steps.is_blocked = lambda: bool(self.scheduler.queue)
        self.inbox: deque[TokenizedRequest] = deque()
        self.items: Items | None = None
        self.left = self.done = 0
        self.rows = self.cached = self.chunk = self.ends = 0
        self.pairs = 0.0

    # ---- the scheduler's executor ----------------------------------------------------------

    def forward(self, plan: StepPlan) -> StepPlan:
        return plan

    def sample(self, step: StepPlan, masks: Any) -> None: ...

    def read(self, step: StepPlan) -> StepResult:
        """Zeros: nobody stops at a token."""
        items = Items.of(step.items)
        counts, num = None, len(items.starts)
        if items.drafts is not None:
            counts = np.full(num, self.done, np.int32)
        prefills = [_TOKEN if item.emit else _NO_TOKEN for item in items.prefills]
        return StepResult(np.zeros(num * max(self.done, 1), np.int32), {}, prefills, counts)

    def control(self, verb: str, args: dict[str, Any]) -> Any:
        return None

    # ---- steps -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Plan the next step, if there is work."""
        while self.inbox:
            self._mine.send(self.inbox.popleft())
        self.scheduler.tick(wait=False)
        self.items, self.left, self.done = None, 0, 0
        if self.scheduler.inflight:
            self.items = items = Items.of(self.scheduler.inflight[0][0].items)
            self.left = 1 if items.drafts is None else int(items.drafts.lens[0]) + 1
            self._count(items)

    def finish(self) -> list[TokenDelta]:
        """Commit the steps of the plan that have passed; what has become of requests."""
        self.left = 0
        if self.items is None:
            return []
        self.scheduler.commit_inflight()
        self.items = None
        replies = self._mine.receive(0)
        return [delta for r in replies if isinstance(r, StepReply) for delta in r.deltas]

    @property
    def can_admit(self) -> bool:
        """Whether the next plan may take up a request that has come."""
        return not self.scheduler.queue

    @property
    def requests(self) -> dict[str, Request]:
        return self.scheduler.committer.requests

    def _count(self, items: Items) -> None:
        """The figures of the plan. Where KV has come from elsewhere only the last token of a prompt
        is computed, as one of a row that decodes."""
        self.rows = len(items.starts)
        self.chunk, self.pairs, self.ends = 0, 0.0, 0
        self.cached = int(items.starts.sum()) + self.rows
        for item in items.prefills:
            if self.is_decode_side:
                self.rows += item.emit
                self.cached += item.emit * (item.start + item.count)
                continue
            self.chunk += item.count
            self.pairs += item.count * (item.start + 0.5 * item.count)
            self.ends += item.emit
