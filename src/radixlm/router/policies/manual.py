"""manual: a session stays with the worker that it was given."""

from __future__ import annotations

import random
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal

from radixlm.router.call import Call
from radixlm.router.policies.base import Policy, least
from radixlm.router.policies.ring import routing_key
from radixlm.router.worker import Worker

Assignment = Literal["random", "min_load", "min_group"]
MAX_CANDIDATES = 2
MAX_KEYS = 1_000_000  # about 300 MB
MAX_KEY_BYTES = 64  # of a longer one its hash is kept


class Session:
    """``candidates``: ids of the workers of a key; the first that is available is taken."""

    __slots__ = ("candidates", "used_s")

    def __init__(self) -> None:
        self.candidates: list[str] = []
        self.used_s = 0.0


class Manual(Policy):
    """By a kept table of routing keys. Nothing moves when workers are added; a key whose workers
    are all away gets one more. ``branches``: how calls were decided, ``num_keys``: keys known."""

    name = "manual"
    reads_key = True

    def __init__(self, assignment: Assignment, max_idle_s: float) -> None:
        """``assignment``: of new keys. Keys idle for ``max_idle_s`` are dropped."""
        self._assignment, self._max_idle_s = assignment, max_idle_s
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()  # longest idle first
        self._num_keys: Counter[str] = Counter()  # worker id -> keys
        self.branches: Counter[str] = Counter()

    @property
    def num_keys(self) -> int:
        return len(self._sessions)

    def choose(self, call: Call, workers: Sequence[Worker]) -> Worker:
        key = routing_key(call)
        if key is None:
            self.branches["no_routing_id"] += 1
            return self._assign(workers)
        if len(key) > MAX_KEY_BYTES:
            key = blake2b(key).digest()
        session = self._sessions.get(key)
        if is_new := session is None:
            session = self._sessions[key] = Session()
        session.used_s = time.monotonic()
        self._sessions.move_to_end(key)
        able = {worker.id: worker for worker in workers}
        for candidate in session.candidates:
            if candidate in able:
                self.branches["occupied_hit"] += 1
                return able[candidate]
        self.branches["vacant" if is_new else "occupied_miss"] += 1
        worker = self._assign(workers)
        session.candidates.append(worker.id)
        self._num_keys[worker.id] += 1
        if len(session.candidates) > MAX_CANDIDATES:
            self._give_back(session.candidates.pop(0))
        if len(self._sessions) > MAX_KEYS:
            self._drop_oldest()
        return worker

    def left(self, worker: Worker) -> None:
        self._num_keys.pop(worker.id, None)

    def tick(self, now_s: float) -> None:
        while self._sessions and now_s - self._oldest().used_s > self._max_idle_s:
            self._drop_oldest()

    def _oldest(self) -> Session:
        return next(iter(self._sessions.values()))

    def _drop_oldest(self) -> None:
        _, session = self._sessions.popitem(last=False)
        for candidate in session.candidates:
            self._give_back(candidate)

    def _give_back(self, worker_id: str) -> None:
        """A worker, which may be gone, has one key less."""
        if worker_id in self._num_keys:
            self._num_keys[worker_id] -= 1

    def _assign(self, workers: Sequence[Worker]) -> Worker:
        match self._assignment:
            case "min_load":
                return least(workers)
            case "min_group":
                return least(workers, lambda worker: self._num_keys[worker.id])
        return random.choice(workers)
