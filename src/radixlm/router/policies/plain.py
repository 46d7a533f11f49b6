"""Policies that look at workers only."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median

from radixlm.router.call import Call
from radixlm.router.policies.base import Policy, least, work
from radixlm.router.worker import Load, Worker


class Random(Policy):
    """Any worker."""

    name = "random"

    def choose(self, call: Call, workers: Sequence[Worker]) -> Worker:
        return random.choice(workers)


class RoundRobin(Policy):
    """One after the other."""

    name = "round_robin"

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, call: Call, workers: Sequence[Worker]) -> Worker:
        self._turn += 1
        return workers[self._turn % len(workers)]


class Passthrough(Policy):
    """The first worker: for a gateway before one server, or before another balancer."""

    name = "passthrough"

    def choose(self, call: Call, workers: Sequence[Worker]) -> Worker:
        return workers[0]


class PowerOfTwo(Policy):
    """Of two workers at random the one with less in flight (Mitzenmacher 2001)."""

    name = "power_of_two"

    def choose(self, call: Call, workers: Sequence[Worker]) -> Worker:
        if len(workers) == 1:
            return workers[0]
        one, other = random.sample(workers, 2)
        return one if work(one) <= work(other) else other


class LeastLoad(Policy):
    """The shortest expected wait, from what the workers tell of themselves: tokens before the
    request over the throughput, and ``pressure_s`` x k / (1 - k) for a KV cache that is used to
    k."""

    name = "least_load"
    wants_load = True

    def __init__(self, pressure_s: float, default_tokens_per_s: float) -> None:
        """``default_tokens_per_s``: the throughput while no worker tells its own."""
        self._pressure_s, self._default = pressure_s, default_tokens_per_s

    def choose(self, call: Call, workers: Sequence[Worker]) -> Worker:
        rates = [w.load.tokens_per_s for w in workers if w.load and w.load.tokens_per_s > 0]
        # a worker that has not told its rate counts as a middling one
        usual = median(rates) if rates else self._default

        def wait(worker: Worker) -> tuple[float, int]:
            load = worker.load or Load()
            tokens = load.num_queued_tokens + worker.num_tokens
            used = min(load.kv_usage, 0.99)
            pressure_s = self._pressure_s * used / (1 - used)
            return tokens / (load.tokens_per_s or usual) + pressure_s, worker.num_inflight

        return least(workers, wait)
