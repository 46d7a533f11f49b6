"""StepRecorder: what a step took and held, as a record of the ring; and what requests do meanwhile.

A record is written when its step is committed. ``model_ms`` is launching the model, which on a CPU
computes it; on a GPU the host then waits in ``wait_ms``. With overlap the phases of one step stand
in two turns of the loop, so that the bars of neighbours overlap in time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from radixlm.observe.ring import MAX_COUNT, StepRing
from radixlm.scheduler.commit import Committer
from radixlm.scheduler.kv_cache_manager import KVCacheManager
from radixlm.scheduler.planner import Planner
from radixlm.scheduler.request import Request
from radixlm.step.plan import Items, StepPlan
from radixlm.step.result import StepResult
from radixlm.wire.replies import Moment, PageCounts

# steps with more tokens of prompts are announced before they run: they take long
LONG_PREFILL = 256

Launch = tuple[float, float, float, float]
"""Times of a step: planning begins, it is planned, the model is launched, that has ended."""


class StepRecorder:
    """Writes ``ring`` and collects ``moments`` for the next reply. One for each scheduler."""

    def __init__(
        self, ring: StepRing, planner: Planner, committer: Committer, clock: Callable[[], float]
    ) -> None:
        self._ring, self._planner, self._committer = ring, planner, committer
        self._clock = clock
        self._launches: deque[tuple[Launch, float, float]] = deque()  # of the steps in flight
        self._num_retracted = planner.num_retracted
        self._num_forced = committer.num_forced
        self._num_evicted = 0
        self.moments: list[Moment] = []
        self.wait_s = 0.0  # when the host began to wait for the last step

    def announce(self, plan: StepPlan, now_s: float) -> bool:
        """Before a step that takes long, note the prompts that it computes; whether it is one."""
        prefills = Items.of(plan.items).prefills
        if sum(item.count for item in prefills) < LONG_PREFILL:
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

    def committed(self, plan: StepPlan, result: StepResult, read_s: float) -> None:
        """A step was committed whose results were there at ``read_s``: write its record."""
        now_s, planner, items = self._clock(), self._planner, Items.of(plan.items)
        launch, sample_s, sampled_s = self._launches.popleft()
        start_s, planned_s, model_s, forward_s = launch
        model_s = model_s or planned_s
        num_tokens = 0
        if items.prefills:
            num_tokens = sum(item.count for item in items.prefills)
            self.moments += [
                (item.rid, "prefill", planned_s, now_s, item.count, item.start)
                for item in items.prefills
            ]
        counts = result.counts
        num_accepted = 0 if counts is None else max(0, int(counts.sum()) - len(counts))
        parts = planner.kv_manager.parts
        evicted = sum(part.prefix_cache.num_evicted for part in parts)
        forced, retracted = self._committer.num_forced, planner.num_retracted
        self._ring.write(
            start_s,
            1e3 * (planned_s - start_s),
            1e3 * (model_s - planned_s),
            1e3 * (forward_s - model_s),
            1e3 * (sampled_s - sample_s),
            1e3 * (now_s - read_s),
            1e3 * (read_s - self.wait_s),
            len(items.starts),
            num_tokens,
            forced - self._num_forced,
            num_accepted,
            min(planner.limits.step_tokens, MAX_COUNT),
            sum(part.pages.num_free for part in parts),
            retracted - self._num_retracted,
            evicted - self._num_evicted,
        )
        self._num_forced, self._num_retracted, self._num_evicted = forced, retracted, evicted

    def take(self) -> list[Moment]:
        """The moments since the last call."""
        moments, self.moments = self.moments, []
        return moments


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


def launched_s(step: Any) -> float:
    """When the executor launched the model of a step; 0 if it does not say."""
    return float(getattr(step, "launched_s", 0.0))
