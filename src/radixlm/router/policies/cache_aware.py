"""cache_aware: to the worker that was sent the longest prefix of the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from radixlm.router.call import Call
from radixlm.router.policies.base import Policy, least
from radixlm.router.policies.prefix_tree import PAGE_BYTES, Node, PrefixTree
from radixlm.router.worker import Worker

MAX_TEXT_BYTES = 1 << 20  # of a prompt; images in base64 would push out everything else
# where the prompt stands in a body: a quote inside a JSON string is escaped, so that these are
# found as keys only
KEYS = (b'"messages"', b'"prompt"', b'"input_ids"', b'"text"', b'"inputs"', b'"input"',
        b'"query"')  # fmt: skip
USUAL = {  # a search for others goes through the whole body
    "/v1/completions": b'"prompt"',
    "/generate": b'"text"',
    "/completion": b'"prompt"',
    "/v1/responses": b'"input"',
    "/v1/embeddings": b'"input"',
    "/v1/rerank": b'"query"',
}


def prompt_span(call: Call) -> tuple[int, int]:
    """Where the prompt begins in the body, and the bytes from there on that count. Bytes do as
    well as text, since a client writes equal messages in equal bytes; so nothing is parsed."""
    body = call.body
    at = body.find(USUAL.get(call.path, KEYS[0]))
    if at < 0:
        found = (body.find(key) for key in KEYS)
        at = next((at for at in found if at >= 0), 0)
    return at, min(len(body) - at, MAX_TEXT_BYTES)


class CacheAware(Policy):
    """Of the workers that are not overloaded, the one with the longest prefix if that is more than
    ``threshold`` of the prompt, else the least loaded. Overloaded: ``balance_abs`` requests more in
    flight than the least loaded worker, and ``balance_rel`` times as many; or its KV cache is used
    to more than ``max_usage``, or to ``usage_spread`` more than that of another one (0 to 1; 1 is
    off)."""

    name = "cache_aware"

    def __init__(
        self,
        threshold: float,
        balance_abs: int,
        balance_rel: float,
        max_bytes: int,
        max_usage: float = 1.0,
        usage_spread: float = 1.0,
    ) -> None:
        """``max_bytes``: of the whole tree."""
        self._threshold, self._abs, self._rel = threshold, balance_abs, balance_rel
        self._max_usage, self._usage_spread = max_usage, usage_spread
        self.wants_load = min(max_usage, usage_spread) < 1
        self.tree = PrefixTree(max_bytes)
        self._bits: dict[str, int] = {}  # worker id -> its bit in the tree
        self._workers: dict[int, Worker] = {}  # by their bits
        self._pool: tuple[Sequence[Worker], int] = ((), 0)  # the last workers, and their bits

    def choose(self, call: Call, workers: Sequence[Worker]) -> Worker:
        if self.wants_load:
            workers = self._cool(workers)
        if workers is not self._pool[0]:  # the registry gives the same list until a worker changes
            self._pool = workers, self._bits_of(workers)
        at, size = prompt_span(call)
        size -= size % PAGE_BYTES
        path, wanted = self.tree.path(call.body, at, size), self._threshold * size
        chosen = self._holder(path, self._pool[1], wanted)
        if chosen is None:
            chosen = least(workers)
        elif chosen.num_inflight > self._abs:  # else none of its load is too much
            lowest = min([worker.num_inflight for worker in workers])
            limit = max(lowest + self._abs, lowest * self._rel)
            if chosen.num_inflight > limit:
                fit = [worker for worker in workers if worker.num_inflight <= limit]
                chosen = self._holder(path, self._bits_of(fit), wanted) or least(fit)
        self.tree.mark(path, self._bits[chosen.id])
        return chosen

    def _cool(self, workers: Sequence[Worker]) -> Sequence[Worker]:
        """Those of ``workers`` whose KV caches have room, by what they told; all if none has."""
        usage = {one.id: one.load.kv_usage for one in workers if one.load is not None}
        if not usage:
            return workers
        limit = min(self._max_usage, min(usage.values()) + self._usage_spread)
        cool = [one for one in workers if usage.get(one.id, 0.0) <= limit]
        return workers if len(cool) in (0, len(workers)) else cool

    def _holder(self, path: list[Node], able: int, wanted: float) -> Worker | None:
        """Of the workers ``able`` (bits) the one with the longest prefix, if that is more than
        ``wanted`` bytes."""
        depth, holders = 0, 0
        for node in path:
            if not (found := node.workers & able):
                break
            depth, holders = depth + len(node.edge), found
        if depth <= wanted:
            return None
        if holders in self._workers:
            return self._workers[holders]
        return least([worker for bit, worker in self._workers.items() if bit & holders])

    def joined(self, worker: Worker) -> None:
        self._bits_of([worker])

    def left(self, worker: Worker) -> None:
        if bit := self._bits.pop(worker.id, 0):
            del self._workers[bit]
            self.tree.forget(bit)
            self._pool = (), 0

    def _bits_of(self, workers: Sequence[Worker]) -> int:
        """The workers' bits; one that has none gets the lowest that is free."""
        for worker in workers:
            if worker.id not in self._bits:
                taken = sum(self._workers)
                bit = self._bits[worker.id] = ~taken & (taken + 1)
                self._workers[bit] = worker
        return sum([self._bits[worker.id] for worker in workers])
