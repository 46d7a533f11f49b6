"""least_work: the worker that will answer first, by what it holds of the prompt."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Final

from radixlm.router.call import Call
from radixlm.router.policies.base import Policy
from radixlm.router.prompt import Holdings
from radixlm.router.worker import Worker

FIRST_RATE: Final = 5000.0  # prompt tokens a second, until it is learned
FIRST_STEP_S: Final = 0.02
LEARN: Final = 0.1  # weight of a new sample
MIN_SAMPLE: Final = 64  # tokens that were computed
FIRST_SHARE: Final = 0.5  # of prompt tokens that are cached, until it is learned
FILLING: Final = 0.5, 0.8  # occupancy from which new tokens begin to, and always do, evict others
FORGET_S: Final = 600.0  # a request that did not end well
KV_PRESSURE_S: Final = 0.15  # of waiting that a half full KV cache is worth (smg)


class _Pace:
    """What was learned of one worker."""

    __slots__ = ("eviction", "free_s", "rate", "step_s")

    def __init__(self) -> None:
        self.rate, self.step_s = FIRST_RATE, FIRST_STEP_S
        self.eviction = 1.0  # seconds of the future that a second of computing costs, and itself
        self.free_s = 0.0  # when the prompts that it was sent will be computed


class _Sent:
    """A request under way: when and where it was sent, and whether the worker was free."""

    __slots__ = ("is_alone", "num_computed", "sent_s", "worker")

    def __init__(self, worker: Worker, num_computed: int, sent_s: float, is_alone: bool) -> None:
        self.worker, self.num_computed = worker, num_computed
        self.sent_s, self.is_alone = sent_s, is_alone


class LeastWork(Policy):
    """The lowest sum, in seconds, of

        wait until the prompts before it are computed + tokens to compute / rate
        + one decoding step for each request in flight + 0.15 s x k / (1 - k), k = KV in use

    so that a cached prefix is worth the time that it saves and no more: when the worker that holds
    a prefix has more than that to do, another one computes it, and it lives twice. Rates are
    learned from the times to the first token."""

    name = "least_work"
    wants_load = True
    wants_prompt = True
    holdings: Holdings | None = None

    def __init__(self) -> None:
        self._paces: dict[str, _Pace] = {}  # by the worker's id
        self._members: dict[str, Worker] = {}
        self._sent: dict[str, _Sent] = {}  # by request id
        self.num_predicted = self.num_cached = 0  # tokens, of answers that told
        self._share = FIRST_SHARE

    def choose(self, call: Call, workers: Sequence[Worker]) -> Worker:
        now_s, prompt, holdings = time.monotonic(), call.prompt, self.holdings
        held: dict[str, int] = {}
        if holdings is not None and prompt is not None:
            held = holdings.of(prompt)
        num_tokens = prompt.num_tokens if prompt is not None else call.num_prompt_tokens
        best, lowest, paces = workers[0], float("inf"), self._paces
        first = random.randrange(len(workers))  # so that ties are drawn
        for worker in (*workers[first:], *workers[:first]):
            pace, load = paces.get(worker.id) or self._pace(worker), worker.load
            num_new = num_tokens - held.get(worker.name, 0) if held else num_tokens
            cost = num_new * pace.eviction / pace.rate + worker.num_inflight * pace.step_s
            if pace.free_s > now_s:
                cost += pace.free_s - now_s
            if load is not None:
                used = min(load.kv_usage, 0.99)
                cost += load.num_queued_tokens / pace.rate + KV_PRESSURE_S * used / (1 - used)
            if cost < lowest:
                best, lowest = worker, cost
        self._note(call, best, max(1, num_tokens - held.get(best.name, 0)), now_s)
        if holdings is not None and prompt is not None:
            holdings.placed(prompt, best)
        return best

    def joined(self, worker: Worker) -> None:
        self._members[worker.id] = worker

    def left(self, worker: Worker) -> None:
        self._paces.pop(worker.id, None)
        self._members.pop(worker.id, None)
        if self.holdings is not None:
            self.holdings.forget(worker.name)

    def ended(self, call: Call, worker: Worker, *, cached_tokens: int | None) -> None:
        sent = self._sent.pop(call.request_id, None)
        pace = self._paces.get(worker.id)
        if sent is None or sent.worker is not worker or pace is None:
            return
        now_s = time.monotonic()
        if call.first_s:
            if sent.is_alone and sent.num_computed >= MIN_SAMPLE:
                spent_s = max(1e-3, call.first_s - sent.sent_s)
                pace.rate += LEARN * (sent.num_computed / spent_s - pace.rate)
            if call.num_events > 8:
                step_s = (now_s - call.first_s) / (call.num_events - 1)
                pace.step_s += LEARN * (min(step_s, 1.0) - pace.step_s)
        if cached_tokens is not None and call.prompt is not None:
            self.num_cached += cached_tokens
            self.num_predicted += call.prompt.num_tokens - sent.num_computed
            share = min(1.0, cached_tokens / max(1, call.prompt.num_tokens))
            self._share += LEARN * (share - self._share)

    def tick(self, now_s: float) -> None:
        for rid in [rid for rid, sent in self._sent.items() if now_s - sent.sent_s > FORGET_S]:
            del self._sent[rid]  # it did not end well
        if self.holdings is not None:
            for worker in self._members.values():
                # what a full cache drops is asked again as often as prompts are found cached
                first, full = FILLING
                part = (self.holdings.occupancy(worker) - first) / (full - first)
                self._pace(worker).eviction = 1.0 + self._share * min(1.0, max(0.0, part))

    def _note(self, call: Call, worker: Worker, num_computed: int, now_s: float) -> None:
        pace = self._pace(worker)
        is_alone = pace.free_s <= now_s
        self._sent[call.request_id] = _Sent(worker, num_computed, now_s, is_alone)
        pace.free_s = max(pace.free_s, now_s) + num_computed / pace.rate

    def _pace(self, worker: Worker) -> _Pace:
        pace = self._paces.get(worker.id)
        if pace is None:
            pace = self._paces[worker.id] = _Pace()
            others = [other for other in self._paces.values() if other is not pace]
            if others:
                pace.rate = sum(other.rate for other in others) / len(others)
                pace.step_s = sum(other.step_s for other in others) / len(others)
        return pace
