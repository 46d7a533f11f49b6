"""Replicas behind one intake: arrivals, routing, transfers of KV and failures in simulated time."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixlm.base.record import Record
from radixlm.intake.replicas import Replicas
from radixlm.scheduler.limits import Limits
from radixlm.wire.replies import TokenDelta
from radixlm.wire.requests import TokenizedRequest, pack_ids
from radixlm.wire.sampling_params import SamplingParams
from simulate.layout import StepTime
from simulate.machine import transfer_s
from simulate.traffic import Arrival
from simulate.unit import Unit
from simulate.worker import Worker

STICKY_BLOCKS = 3  # of a prompt, by which "sticky" finds its replica


class Pool(Record):
    """Replicas of one kind. ``role``: both, prefill or decode."""

    time: StepTime
    replicas: int
    role: str = "both"
    step_tokens: int = 8192
    max_running: int = 256
    page_size: int = 64
    kv_fraction: float = 0.88
    kv_tokens: int | None = None  # of a group, in place of what the GPU's memory holds

    @property
    def gpus(self) -> int:
        return self.replicas * self.time.layout.gpus


class Failures(Record):
    """Nodes of 8 GPUs die at random, ``a_day`` of each 1,000; the replica is back after
    ``restart_s``."""

    a_day: float = 0.0
    restart_s: float = 60.0


class Trip(Record, frozen=False):  # type: ignore[call-arg]
    """What became of a request. Times are of its arrival, first and last token, in seconds."""

    arrival: Arrival
    first_s: float = -1.0
    end_s: float = -1.0
    num_emitted: int = 0
    num_cached: int = 0
    num_sent: int = 0  # how often a replica was given it

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival.at_s

    @property
    def tpot_s(self) -> float:
        """Mean time of a token after the first."""
        return (self.end_s - self.first_s) / max(self.arrival.output - 1, 1)


class _NoLink:
    """The end of a channel to a replica; the cluster carries messages itself."""

    def start(self, handler: Callable[[Any], None]) -> None: ...
    def send(self, message: Any) -> None: ...
    def close(self) -> None: ...


class Side:
    """All groups of the units of one role, and intake's own choice among them."""

    def __init__(self, units: Sequence[Unit], method: str) -> None:
        self.units = list(units)
        self.places = [(unit, worker) for unit in units for worker in unit.workers]
        # sticky: the client names a replica by the first blocks of its prompt
        self.is_sticky = method == "sticky"
        links: Any = [_NoLink() for _ in self.places]
        self.replicas = Replicas(links, "shortest_queue" if self.is_sticky else method)
        for replica in self.replicas:
            replica.is_ready = True
        self.index = {id(worker): i for i, (_, worker) in enumerate(self.places)}
        self.waiting: deque[int] = deque()  # requests that came while all replicas were down


class Cluster:
    """Runs arrivals through the pools until all have ended, or ``until_s``."""

    def __init__(
        self,
        pools: Sequence[Pool],
        failures: Failures | None = None,
        method: str = "shortest_queue",
        seed: int = 0,
        has_cache: bool = True,
    ) -> None:
        self.now_s = 0.0
        self.pools, self.failures, self._has_cache = tuple(pools), failures or Failures(), has_cache
        self._draw = np.random.default_rng(seed)
        self.trips: list[Trip] = []
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self._nic_free_s: dict[int, float] = {}
        self.num_deaths = 0
        self.recovery_s: list[float] = []
        self._pool_of: dict[int, Pool] = {}
        units = [self._make_unit(pool) for pool in pools for _ in range(pool.replicas)]
        roles = [pool.role for pool in pools for _ in range(pool.replicas)]
        first = [u for u, role in zip(units, roles, strict=True) if role != "decode"]
        second = [u for u, role in zip(units, roles, strict=True) if role == "decode"]
        self.first = Side(first, method)
        self.second = Side(second, method) if second else None

    # ---- what there is ---------------------------------------------------------------------

    def _make_unit(self, pool: Pool) -> Unit:
        workers = [self._make_worker(pool) for _ in range(pool.time.layout.groups)]
        unit = Unit(pool.time, workers, self._draw, self._tell)
        self._pool_of[id(unit)] = pool
        return unit

    def _make_worker(self, pool: Pool) -> Worker:
        is_second = pool.role == "decode"
        step_tokens = 1 << 24 if is_second else pool.step_tokens
        limits = Limits(
            max_running=pool.max_running,
            max_queued=None,
            step_tokens=step_tokens,
            max_prefill_tokens=max(step_tokens, 16384),
            context_len=1 << 20,
            page_size=pool.page_size,
            depth=1,
            reserve=0.3,
            mixed=not pool.time.engine.is_prefill_first,
            vocab=1 << 30,
            max_drafts=64,
        )
        tokens = pool.kv_tokens or pool.time.kv_tokens(pool.kv_fraction)
        return Worker(limits, tokens, lambda: self.now_s, is_second, self._has_cache)

    @property
    def units(self) -> list[Unit]:
        return self.first.units + (self.second.units if self.second else [])

    # ---- the run ---------------------------------------------------------------------------

    def run(self, arrivals: Iterable[Arrival], until_s: float = float("inf")) -> None:
        """Take all arrivals, and go on until the last has ended."""
        source = iter(arrivals)
        self._next_arrival(source)
        if self.failures.a_day:
            for unit in self.units:
                self._plan_death(unit)
        while self._events and (self._num_open or self._events[0][2] != self._die):
            at_s, _, call, args = heapq.heappop(self._events)
            if at_s > until_s:
                break
            self.now_s = at_s
            call(*args)

    @property
    def _num_open(self) -> int:
        return self._num_arriving + self._num_live

    _num_arriving = _num_live = 0

    def _at(self, at_s: float, call: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), call, args))

    def _next_arrival(self, source: Any) -> None:
        arrival = next(source, None)
        self._num_arriving = int(arrival is not None)
        if arrival is not None:
            self._at(arrival.at_s, self._arrive, arrival, source)

    def _arrive(self, arrival: Arrival, source: Any) -> None:
        self.trips.append(Trip(arrival))
        self._num_live += 1
        self._next_arrival(source)
        self._send(self.first, len(self.trips) - 1)

    def _send(self, side: Side, number: int) -> None:
        """Give a request to a replica of the side, as intake does."""
        arrival, wanted = self.trips[number].arrival, None
        if side.is_sticky:
            wanted = hash(arrival.blocks[:STICKY_BLOCKS]) % len(side.places)
        replica = side.replicas.assign(str(number), wanted, arrival.prompt)
        if replica is None:
            side.waiting.append(number)
            return
        trip = self.trips[number]
        trip.num_sent += 1
        unit, worker = side.places[replica.index]
        most = trip.arrival.output
        if self.second is not None and side is self.first:
            most = min(trip.num_emitted + 1, most)
        ids = np.append(trip.arrival.ids(), np.zeros(trip.num_emitted, np.int32))
        unit.send(worker, self._request(number, ids, most), self.now_s)
        self._watch(unit)

    def _request(self, number: int, ids: NDArray[np.int32], most: int) -> TokenizedRequest:
        # deltas come only at the end: nobody reads the tokens
        sampling = SamplingParams(
            max_new_tokens=most, temperature=0.0, ignore_eos=True, stream_interval=1 << 30
        )
        emitted = self.trips[number].num_emitted
        return TokenizedRequest(
            str(number), pack_ids(ids), sampling, num_emitted=emitted, arrival_s=self.now_s
        )

    def _watch(self, unit: Unit) -> None:
        if unit.next_s is not None:
            self._at(unit.next_s, self._step, unit, unit.version)

    def _step(self, unit: Unit, version: int) -> None:
        if version == unit.version:
            unit.step(self.now_s)
            self._watch(unit)

    def _tell(
        self,
        unit: Unit,
        worker: Worker,
        now_s: float,
        first: Sequence[str],
        deltas: Sequence[TokenDelta],
    ) -> None:
        for rid in first:
            trip = self.trips[int(rid)]
            if trip.first_s < 0:
                trip.first_s = now_s
        for delta in deltas:
            if delta.finish is not None:
                self._ended(unit, worker, int(delta.rid), delta, now_s)

    def _ended(
        self, unit: Unit, worker: Worker, number: int, delta: TokenDelta, now_s: float
    ) -> None:
        """A request is over on this worker: at its end, or before its KV goes to the other side."""
        trip = self.trips[number]
        trip.num_emitted += len(delta.tokens)
        is_first = self.second is not None and not worker.is_decode_side
        if not worker.is_decode_side:
            trip.num_cached += delta.cached_tokens
        side = self.second if worker.is_decode_side and self.second else self.first
        side.replicas.forget(delta.rid)
        if not is_first or trip.num_emitted >= trip.arrival.output:
            trip.end_s = now_s
            self._num_live -= 1
            return
        assert self.second is not None
        time, layout = unit.time, unit.time.layout
        tokens = trip.arrival.prompt + trip.num_emitted
        seconds = transfer_s(tokens * time.cost.kv_bytes, time.gpu, layout.attn_tp)
        begin_s = max(now_s, self._nic_free_s.get(id(worker), 0.0))
        self._nic_free_s[id(worker)] = begin_s + seconds
        self._at(begin_s + seconds, self._send, self.second, number)

    # ---- failures --------------------------------------------------------------------------

    def _plan_death(self, unit: Unit) -> None:
        nodes = max(unit.time.layout.gpus / 8, 1.0)
        mean_s = 86_400 * 1000 / (self.failures.a_day * nodes)
        self._at(self.now_s + self._draw.exponential(mean_s), self._die, unit)

    def _die(self, unit: Unit) -> None:
        """A node is lost: the replica starts anew, and its requests go elsewhere."""
        self.num_deaths += 1
        side = self.first if unit in self.first.units else self.second
        assert side is not None
        unit.die(self.now_s)
        pool, lost = self._pool_of[id(unit)], []
        for i, worker in enumerate(unit.workers):
            index = side.index.pop(id(worker))
            replica = side.replicas[index]
            replica.is_ready = False
            for request in worker.requests.values():
                self.trips[int(request.rid)].num_emitted = request.num_output
            lost += sorted(side.replicas.orphans(replica), key=int)
            unit.workers[i] = fresh = self._make_worker(pool)
            side.places[index], side.index[id(fresh)] = (unit, fresh), index
        self._at(self.now_s + self.failures.restart_s, self._rise, side, unit)
        for rid in lost:
            self._send(self.first, int(rid))

    def _rise(self, side: Side, unit: Unit) -> None:
        unit.is_up = True
        for worker in unit.workers:
            side.replicas[side.index[id(worker)]].is_ready = True
        waiting, side.waiting = side.waiting, deque()
        for number in waiting:
            self._send(side, number)
        self._plan_death(unit)
