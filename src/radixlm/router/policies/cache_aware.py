"""cache_aware: to the worker that was sent the longest prefix of the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from radixlm.router.call import Call
from radixlm.router.policies.base import Policy, least
from radixlm.router.policies.prefix_tree import MAX_TEXT_BYTES, PrefixTree
from radixlm.router.worker import Worker

# where the prompt stands in a body: a quote inside a JSON string is escaped, so that these are
# found as keys only
KEYS = (b'"messages"', b'"prompt"', b'"input_ids"', b'"text"', b'"input"', b'"query"')


def prompt_bytes(body: bytes) -> bytes:
    """The body from its prompt on. Bytes do as well as text, since a client writes equal messages
    in equal bytes; so nothing is parsed."""
    for key in KEYS:
        if (at := body.find(key)) >= 0:
            return body[at : at + MAX_TEXT_BYTES]
    return body[:MAX_TEXT_BYTES]


class CacheAware(Policy):
    """Of the workers that are not overloaded, the one with the longest prefix if that is more than
    ``threshold`` of the prompt, else the least loaded. Overloaded: ``balance_abs`` requests more in
    flight than the least loaded worker, and ``balance_rel`` times as many."""

    name = "cache_aware"

    def __init__(
        self, threshold: float, balance_abs: int, balance_rel: float, max_bytes: int
    ) -> None:
        """``max_bytes``: of the whole tree."""
        self._threshold, self._abs, self._rel = threshold, balance_abs, balance_rel
        self.tree = PrefixTree(max_bytes)
        self._bits: dict[str, int] = {}  # worker id -> its bit in the tree
        self._pool: tuple[Sequence[Worker], int] = ((), 0)  # the last workers, and their bits

    def choose(self, call: Call, workers: Sequence[Worker]) -> Worker:
        loads = [worker.num_inflight for worker in workers]
        limit = max(min(loads) + self._abs, min(loads) * self._rel)
        fit = workers
        if max(loads) > limit:
            fit = [worker for worker in workers if worker.num_inflight <= limit]
        text = prompt_bytes(call.body)
        path = self.tree.path(text)
        bits = self._bits
        if fit is not self._pool[0]:  # the registry gives the same list until a worker changes
            self._pool = fit, sum([self._bit(worker) for worker in fit])
        able = self._pool[1]
        depth, holders = 0, 0
        for node in path:
            if not node.workers & able:
                break
            depth, holders = depth + len(node.edge), node.workers & able
        if depth > self._threshold * len(text):
            fit = [worker for worker in fit if bits[worker.id] & holders]
        chosen = least(fit)
        self.tree.mark(path, bits[chosen.id])
        return chosen

    def joined(self, worker: Worker) -> None:
        self._bit(worker)

    def left(self, worker: Worker) -> None:
        if bit := self._bits.pop(worker.id, 0):
            self.tree.forget(bit)
            self._pool = (), 0

    def _bit(self, worker: Worker) -> int:
        """The worker's bit; the lowest that is free where it has none."""
        if worker.id not in self._bits:
            taken = sum(self._bits.values())
            self._bits[worker.id] = ~taken & (taken + 1)
        return self._bits[worker.id]
