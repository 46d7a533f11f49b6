"""The interface of the policies."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from radixlm.base.errors import RadixError
from radixlm.router.call import Call
from radixlm.router.worker import Worker


class NoChoice(RadixError):
    """The policy has no worker for this call: the client named one that cannot take it."""


class Policy:
    """Chooses among workers of one model and one type. One object serves one such pool. A policy
    inherits from it, and overrides what it needs."""

    name: str
    holdings: Any = None  # a policy that asks what workers hold of a prompt gets a ``Holdings``
    wants_prompt = False  # whether it reads ``call.prompt``
    reads_key = False  # whether a call's routing key decides
    wants_load = False  # whether it reads ``worker.load``
    num_predicted = num_cached = 0  # cached tokens, as expected and as told

    def choose(self, call: Call, workers: Sequence[Worker]) -> Worker:
        """One of ``workers``, which are available, at least one, and not yet tried for ``call``.
        Ties are drawn at random. NoChoice if none will do."""
        raise NotImplementedError

    def joined(self, worker: Worker) -> None:
        """A worker became a member of the pool."""

    def left(self, worker: Worker) -> None:
        """A worker is gone for good."""

    def ended(self, call: Call, worker: Worker, *, cached_tokens: int | None) -> None:
        """An answer is complete. ``cached_tokens``: what the worker found cached, None if it did
        not tell."""

    def tick(self, now_s: float) -> None:
        """Called about once a second, with ``time.monotonic()``: evict, adjust bounds."""


def work(worker: Worker) -> tuple[int, int]:
    """(requests, tokens) in flight: what "least loaded" compares."""
    return worker.num_inflight, worker.num_tokens


def least(workers: Sequence[Worker], cost: Callable[[Worker], Any] = work) -> Worker:
    """The worker of the lowest cost; ties at random."""
    if len(workers) == 1:
        return workers[0]
    if cost is work:  # which most often only requests decide
        loads = [worker.num_inflight for worker in workers]
        lowest = min(loads)
        if loads.count(lowest) == 1:
            return workers[loads.index(lowest)]
        workers = [worker for worker in workers if worker.num_inflight == lowest]
        costs = [worker.num_tokens for worker in workers]
    else:
        costs = [cost(worker) for worker in workers]
    lowest = min(costs)
    if costs.count(lowest) == 1:
        return workers[costs.index(lowest)]
    ties = [one for one, c in zip(workers, costs, strict=True) if c == lowest]
    return ties[int(random.random() * len(ties))]
