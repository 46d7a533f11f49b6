"""Consistent hashing (Karger 1997): few keys move when a worker comes or goes."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from radixlm.router.call import Call
from radixlm.router.policies.base import NoChoice, Policy, least
from radixlm.router.policies.cache_aware import prompt_span
from radixlm.router.worker import Worker

POINTS = 160  # of each worker on the ring: shares differ by about 8 %
TOKEN_BYTES = 4  # about


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest())


class Ring:
    """Workers by name on a circle of 64-bit hashes."""

    def __init__(self) -> None:
        self.members: list[Worker] = []
        self._points: list[tuple[int, str]] = []

    def add(self, worker: Worker) -> None:
        if worker not in self.members:
            self.members.append(worker)
            names = (f"{worker.name}#{i}".encode() for i in range(POINTS))
            self._points = sorted(self._points + [(_hash(name), worker.id) for name in names])

    def remove(self, worker: Worker) -> None:
        """Take it away."""
        self.members = [one for one in self.members if one is not worker]
        self._points = [point for point in self._points if point[1] != worker.id]

    def walk(self, key: bytes, workers: Sequence[Worker]) -> Iterator[Worker]:
        """Those of ``workers`` on the ring, each once, in the order in which ``key`` meets them."""
        left = {worker.id: worker for worker in workers}
        start = bisect_right(self._points, (_hash(key), ""))
        for index in range(len(self._points)):
            if not left:
                return
            worker = left.pop(self._points[(start + index) % len(self._points)][1], None)
            if worker is not None:
                yield worker


class Ringed(Policy):
    """What policies with a ring share."""

    def __init__(self) -> None:
        self._ring = Ring()

    def joined(self, worker: Worker) -> None:
        self._ring.add(worker)

    def left(self, worker: Worker) -> None:
        self._ring.remove(worker)


def routing_key(call: Call) -> bytes | None:
    """The key that a client gives its session: a header, or a field of /generate."""
    if key := call.header(b"x-smg-routing-key"):
        return key
    if b'"routing_key"' in call.body and isinstance(key := call.fields.get("routing_key"), str):
        return key.encode()
    return None


class ConsistentHashing(Ringed):
    """By ``x-smg-target-worker`` (index of a worker of the pool), else by the ring from
    ``x-smg-routing-key`` or a header that stays with a client, else at random."""

    name = "consistent_hashing"
    reads_key = True

    def __init__(self, sticky_headers: Sequence[bytes]) -> None:
        """``sticky_headers``: the first that a call has is its key."""
        super().__init__()
        self._sticky = sticky_headers

    def choose(self, call: Call, workers: Sequence[Worker]) -> Worker:
        if (target := call.header(b"x-smg-target-worker")) is not None:
            return self._target(target, workers)
        key = routing_key(call)
        for name in self._sticky:
            key = key or call.header(name)
        if not key:
            return random.choice(workers)
        return next(self._ring.walk(key, workers), None) or random.choice(workers)

    def _target(self, target: bytes, workers: Sequence[Worker]) -> Worker:
        members = self._ring.members
        if not target.isdigit() or len(target) > 9 or int(target) >= len(members):
            told = target.decode("latin-1")[:32]
            raise NoChoice(f"x-smg-target-worker: {told!r} is none of 0 to {len(members) - 1}")
        worker = members[int(target)]
        if worker not in workers:
            raise NoChoice(f"x-smg-target-worker: worker {int(target)} takes no requests now")
        return worker


class PrefixHash(Ringed):
    """By the ring from the first tokens of the prompt (bytes / 4), on to the next worker while one
    has more than a factor times the mean of requests in flight."""

    name = "prefix_hash"

    def __init__(self, num_tokens: int, load_factor: float) -> None:
        super().__init__()
        self._num_bytes, self._load_factor = TOKEN_BYTES * num_tokens, load_factor

    def choose(self, call: Call, workers: Sequence[Worker]) -> Worker:
        at, size = prompt_span(call)
        prefix = call.body[at : at + min(size, self._num_bytes)]
        mean = (sum([worker.num_inflight for worker in workers]) + 1) / len(workers)
        for worker in self._ring.walk(prefix, workers):
            if worker.num_inflight <= self._load_factor * mean:
                return worker
        return least(workers)
