"""One policy for each pool: the workers of one model and one type."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from radixlm.router.call import Call
from radixlm.router.policies import table
from radixlm.router.policies.base import Policy
from radixlm.router.policies.cache_aware import CacheAware
from radixlm.router.policies.manual import Manual
from radixlm.router.policies.ring import routing_key
from radixlm.router.worker import Worker, WorkerType


class Pools:
    """Policies by (model, worker type), made when the first worker joins. The model is None unless
    the gateway keeps models apart (``--enable-igw``)."""

    def __init__(self, options: Any) -> None:
        """``options``: of the command line."""
        self._options = options
        self._names = {
            "regular": options.policy,
            "prefill": options.prefill_policy or options.policy,
            "decode": options.decode_policy or options.policy,
        }
        for name in {*self._names.values()}:
            table.make(name, options)  # an unknown name fails at start
        self.by_pool: dict[tuple[str | None, WorkerType], Policy] = {}
        self._joined: dict[str, Policy] = {}  # by the worker's id
        self._by_key: dict[Policy, Policy] = {}  # with --routing-key-override

    def of(self, worker: Worker) -> Policy:
        """The policy of a worker's pool. The label "policy" of a model's first worker names it."""
        model = worker.model_id if self._options.enable_igw else None
        known = self.by_pool.get((model, worker.worker_type))
        if known is not None:
            return known
        name = worker.labels.get("policy", "") if self._options.enable_igw else ""
        name = name if name in table.POLICIES else self._names[worker.worker_type]
        policy = self.by_pool[model, worker.worker_type] = table.make(name, self._options)
        return policy

    def chooser(self, policy: Policy, call: Call) -> Policy:
        """What chooses a worker in ``policy``'s pool: with --routing-key-override, for a call with
        a key, a table of keys."""
        if not self._options.routing_key_override or policy.reads_key or routing_key(call) is None:
            return policy
        if policy not in self._by_key:
            self._by_key[policy] = table.make("manual", self._options)
        return self._by_key[policy]

    def on_worker(self, event: str, worker: Worker) -> None:
        """A worker has joined or left the registry, or its model may be another."""
        policy = None if event == "left" else self.of(worker)
        if policy is not None and self._joined.get(worker.id) is policy:
            return
        if self._joined.pop(worker.id, None) is not None:
            # a call that names no model may have any
            for other in (*self.by_pool.values(), *self._by_key.values()):
                other.left(worker)
        if policy is not None:
            self._joined[worker.id] = policy
            policy.joined(worker)

    def count(self, metrics: Any) -> None:
        """Define the gauges of the policies' tables."""

        def of(kind: type[Policy], read: Callable[[Any], float]) -> Callable[[], dict[Any, float]]:
            return lambda: {
                (model or "", worker_type): read(policy)
                for (model, worker_type), policy in self.by_pool.items()
                if isinstance(policy, kind)
            }

        labels = ("model", "worker_type")
        metrics.gauge(
            "radix_router_prefix_tree_bytes", "Bytes of the trees of cache_aware.",
            of(CacheAware, lambda policy: policy.tree.num_bytes), labels,
        )  # fmt: skip
        metrics.gauge(
            "smg_manual_policy_cache_entries", "Routing keys that manual keeps.",
            of(Manual, lambda policy: policy.num_keys), labels,
        )  # fmt: skip
        metrics.gauge(
            "smg_manual_policy_branch_total", "How manual decided.",
            lambda: {(branch,): float(num) for branch, num in self._branches().items()},
            ("branch",),
        )  # fmt: skip

    def _branches(self) -> Counter[str]:
        manuals = (one for one in self.by_pool.values() if isinstance(one, Manual))
        return sum((one.branches for one in manuals), Counter())

    def tick(self) -> None:
        """About once a second."""
        now_s = time.monotonic()
        for policy in (*self.by_pool.values(), *self._by_key.values()):
            policy.tick(now_s)
