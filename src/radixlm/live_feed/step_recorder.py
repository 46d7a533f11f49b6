"""StepRecorder: what a step took and held, as a record of the ring; and what requests do meanwhile.

A record is written when its step is committed. ``model_ms`` is launching the model, which on a CPU
computes it; on a GPU the host then waits in ``wait_ms``. With overlap the phases of one step stand
in two turns of the loop, so that the bars of neighbours overlap in time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from radixlm.observe.ring import MAX_COUNT, StepRing
from radixlm.scheduler.commit import Committer
from radixlm.scheduler.interfaces import Launch
from radixlm.scheduler.kv_cache_manager import KVCacheManager
from radixlm.scheduler.planner import Planner
from radixlm.scheduler.request import Request
from radixlm.step.plan import Items, StepPlan
from radixlm.step.result import StepResult
from radixlm.wire.replies import Moment, PageCounts

# steps with more tokens of prompts are announced before they run: they take long
LONG_PREFILL = 256


class StepRecorder:
    """Writes ``ring`` and collects ``moments`` for the next reply. One for each scheduler."""

    def __init__(self, ring: StepRing) -> None:
        self._ring = ring
        self._launches: deque[tuple[Launch, float, float]] = deque()  # of the steps in flight
        self._num_evicted = 0
        self.moments: list[Moment] = []
        self.num_prefilled = 0  # prompt tokens since the start
        # seconds of steps since the start: launching the model, sampling, waiting for results
        self.forward_s = {"extend": 0.0, "decode": 0.0, "mixed": 0.0}

    def follow(self, planner: Planner, committer: Committer, clock: Callable[[], float]) -> None:
        """Record the steps of these from now on."""
        self._planner, self._committer, self._clock = planner, committer, clock
        self._num_retracted = planner.num_retracted
        self._num_forced = committer.num_forced
        self._budget = min(planner.limits.step_tokens, MAX_COUNT)
        first, *self._other_parts = planner.kv_manager.parts
        self._pages, self._cache = first.pages, first.prefix_cache
        planner.on_start = self.started

    def announce(self, plan: StepPlan, now_s: float) -> bool:
        """Before a step that takes long, note the prompts that it computes; whether it is one."""
        prefills = Items.of(plan.items).prefills
        if not prefills or sum(item.count for item in prefills) < LONG_PREFILL:
            return False
        self.moments += [
            (item.rid, "prefill", now_s, 0.0, item.count, item.start) for item in prefills
        ]
        return True

    def launched(self, launch: Launch, sample_s: float) -> None:
        """A step was launched, and from ``sample_s`` on its sampling."""
        self._launches.append((launch, sample_s, self._clock()))

    def started(self, request: Request) -> None:
        """A request was admitted: tell how long its grammar compiled, if it waited for that."""
        if request.wire.grammar is not None and not request.retractions:
            queued_s, done_s = request.queued_s, self._planner.hooks.prepared_s(request)
            if done_s > queued_s:
                self.moments.append((request.rid, "grammar", queued_s, done_s, 0, 0))

    def retracted(self, request: Request) -> None:
        """A request has lost its slot."""
        self.moments.append((request.rid, "retracted", self._clock(), 0.0, 0, 0))

    def committed(self, plan: StepPlan, result: StepResult, wait_s: float, read_s: float) -> None:
        """A step was committed for whose results the host waited from ``wait_s`` to ``read_s``:
        write its record."""
        planner, items, num_tokens, num_accepted = self._planner, Items.of(plan.items), 0, 0
        now_s = self._clock()
        (start_s, planned_s, model_s, forward_s), sample_s, sampled_s = self._launches.popleft()
        model_s = model_s or planned_s
        if items.prefills:
            num_tokens = sum(item.count for item in items.prefills)
            self.num_prefilled += num_tokens
            self.moments += [
                (item.rid, "prefill", planned_s, now_s, item.count, item.start)
                for item in items.prefills
            ]
        decodes = "mixed" if items.prefills else "decode"
        self.forward_s[decodes if len(items.starts) else "extend"] += (
            forward_s - model_s + sampled_s - sample_s + read_s - wait_s
        )
        num_decodes = len(items.starts)
        if result.counts is not None:
            num_further = max(0, int(result.counts.sum()) - len(result.counts))
            if items.more_N is None:
                num_accepted = num_further
            else:
                num_decodes += num_further
        free, evicted = self._pages.num_free, self._cache.num_evicted
        for part in self._other_parts:
            free, evicted = free + part.pages.num_free, evicted + part.prefix_cache.num_evicted
        forced, retracted = self._committer.num_forced, planner.num_retracted
        self._ring.write(
            start_s,
            planned_s - start_s,
            model_s - planned_s,
            forward_s - model_s,
            sampled_s - sample_s,
            now_s - read_s,
            read_s - wait_s,
            num_decodes,
            num_tokens,
            forced - self._num_forced,
            num_accepted,
            self._budget,
            free,
            retracted - self._num_retracted,
            evicted - self._num_evicted,
        )
        self._num_forced, self._num_retracted, self._num_evicted = forced, retracted, evicted

    def take(self) -> list[Moment]:
        """The moments since the last call."""
        moments, self.moments = self.moments, []
        return moments

    def pages(self) -> PageCounts:
        """The pages of the KV cache now."""
        return page_counts(self._planner.kv_manager.parts)


def page_counts(parts: Sequence[KVCacheManager]) -> PageCounts:
    """The pages of the KV cache now."""
    total = PageCounts(size=parts[0].page_size)
    for part in parts:
        cache, window = part.prefix_cache, part.window
        total.total += part.pages.num_total
        total.free += part.pages.num_free
        total.cached += cache.total_pages
        total.locked += cache.num_locked
        if window is not None:
            num, used = window.pages.num_total, window.pages.num_total - window.pages.num_free
            if window.is_state:
                total.states_total += num
                total.states_used += used
            else:
                total.window_total += num
                total.window_used += used
    return total
