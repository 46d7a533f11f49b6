"""Tenants: their weights and ceilings, and whose request is next.

Fair shares are deficits of tokens, as in "Locality-aware Fair Scheduling in LLM Serving" (DLPM and
D2LPM, arXiv:2501.14312). A round gives each tenant a quantum; who has used it up waits until all
that wait have. A second deficit, of tenant and worker, ends a tenant's stay at one warm worker.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Generic, Literal, Protocol, TypeVar

import msgspec

from radixlm.base.errors import ConfigError, reason
from radixlm.base.record import Record, field
from radixlm.router.call import Call
from radixlm.router.worker import Worker

log = logging.getLogger(__name__)

Priority = Literal["bulk", "default", "interactive", "system"]
PRIORITIES: tuple[Priority, ...] = ("bulk", "default", "interactive", "system")
PRIORITY_HEADER = b"x-smg-priority"
OUTPUT_WEIGHT = 2  # an output token costs as much as two of an uncached prompt
QUANTUM = 4096  # tokens a round, times the weight
WORKER_QUANTUM = 4 * QUANTUM  # tokens before a tenant's next worker has its turn
MAX_TENANTS = 16_384  # remembered; beyond it those without requests are forgotten
MAX_NAME_CHARS = 128
MAX_COMPARED = 8  # waiting requests of a tenant whose cached prefixes are compared

Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class Limits(Record, forbid_unknown_fields=True):
    """Of one tenant. ``max_concurrent``: above it requests wait; above the rates and
    ``max_queued`` they are refused with 429. ``tokens_per_minute`` counts uncached tokens of
    prompts, and those of outputs twice. None: no ceiling."""

    weight: Positive = 1.0
    max_concurrent: Count | None = None
    max_queued: Count | None = None
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    max_priority: Priority = "interactive"


class TenantFile(Record, forbid_unknown_fields=True):
    """The file of --tenants: ``default`` holds for tenants that it does not name."""

    default: Limits = Limits()
    tenants: dict[str, Limits] = field(default_factory=dict)


def read_tenants(path: str) -> TenantFile:
    """Read the YAML; ConfigError names the file and the key."""
    try:
        return msgspec.yaml.decode(Path(path).read_bytes() or b"{}", type=TenantFile)
    except (OSError, msgspec.MsgspecError) as error:
        works = "tenants: {acme: {weight: 2, requests_per_minute: 600}}"
        raise ConfigError(f"--tenants {path}: {reason(error)}; for example: {works}") from None


class Bucket:
    """Units that flow in at ``rate`` a second, at most ``burst``. It may be overdrawn, since what
    a request costs is known at its end."""

    __slots__ = ("_level", "_now_s", "burst", "rate")

    def __init__(self, rate: float, burst: float, now_s: float) -> None:
        self.rate, self.burst = rate, burst
        self._level, self._now_s = burst, now_s

    def wait_s(self, now_s: float) -> float:
        """Seconds until one unit is there; 0 if it is."""
        self._level = min(self.burst, self._level + (now_s - self._now_s) * self.rate)
        self._now_s = now_s
        missing = min(1.0, self.burst) - self._level
        # a rounding error is no reason to wait
        return missing / self.rate if missing > 1e-6 else 0.0

    def take(self, amount: float) -> None:
        """Take ``amount``; a negative one gives back."""
        self._level = min(self.burst, self._level - amount)


class Tenant:
    """One tenant. ``deficit``: tokens that it may still use in this round."""

    def __init__(self, name: str, limits: Limits, now_s: float, turn: int) -> None:
        """``turn``: the present round."""
        self.name = name
        self.deficit = QUANTUM * limits.weight
        self.turn = turn
        self.num_inflight = self.num_waiting = 0
        self.mean_output = 128.0  # tokens, of recent answers
        self.by_worker: dict[str, float] = {}  # worker id -> tokens left of its quantum there
        self.set_limits(limits, now_s)

    def set_limits(self, limits: Limits, now_s: float) -> None:
        """Take limits over, with full buckets: ten seconds' worth."""
        self.limits = limits
        self.requests, self.tokens = (
            Bucket(rate / 60, max(1.0, rate / 6), now_s) if rate else None
            for rate in (limits.requests_per_minute, limits.tokens_per_minute)
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing of it waits or runs."""
        return not self.num_inflight and not self.num_waiting

    def cost(self, call: Call) -> float:
        """What a request is expected to cost, in tokens of prompt."""
        return call.num_prompt_tokens + OUTPUT_WEIGHT * min(self.mean_output, call.max_tokens)

    def charge(self, tokens: float, deficit: float) -> None:
        """Take ``tokens`` from the ceiling and ``deficit`` from the round; negative ones give
        back."""
        self.deficit -= deficit
        if self.tokens is not None:
            self.tokens.take(tokens)

    def catch_up(self, turn: int) -> None:
        """Add the quanta of the rounds that passed, at most one of them in advance."""
        quantum = QUANTUM * self.limits.weight
        gained = self.deficit + quantum * (turn - self.turn)
        self.deficit = max(self.deficit, min(gained, quantum))
        self.turn = turn

    def candidates(self, workers: Sequence[Worker]) -> Sequence[Worker]:
        """The workers where it has not used up its quantum; all in a new round."""
        left = self.by_worker
        found = [one for one in workers if left.get(one.id, 1.0) > 0]
        if found:
            return found
        rounds = math.floor(min(-left[one.id] for one in workers) / WORKER_QUANTUM) + 1
        # workers that are gone are forgotten here
        gained = rounds * WORKER_QUANTUM
        self.by_worker = {one.id: left[one.id] + gained for one in workers}
        return [one for one in workers if self.by_worker[one.id] > 0]

    def sent(self, worker: Worker, cost: float) -> None:
        """A request of ``cost`` tokens went to ``worker``."""
        self.by_worker[worker.id] = self.by_worker.get(worker.id, WORKER_QUANTUM) - cost


class Tenants:
    """All tenants by name, and the number of the round."""

    def __init__(self, file: TenantFile, header: str = "x-tenant") -> None:
        """``header``: whose value names the tenant."""
        self.file, self._header = file, header.lower().encode("latin-1")
        self._tenants: OrderedDict[str, Tenant] = OrderedDict()  # the last used at the end
        self.turn = 0

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def name_of(self, call: Call) -> str:
        """The tenant of a call: whose key it is if the file names that, else the header, else the
        key's owner, else the client's address."""
        if call.principal and call.principal in self.file.tenants:
            return call.principal
        value = call.header(self._header)
        name = value.decode("latin-1").strip()[:MAX_NAME_CHARS] if value else ""
        return name or call.principal or f"address {call.client or 'unknown'}"

    def get(self, name: str, now_s: float) -> Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            limits = self.file.tenants.get(name, self.file.default)
            tenant = self._tenants[name] = Tenant(name, limits, now_s, self.turn)
            self._forget()
        self._tenants.move_to_end(name)
        return tenant

    def reload(self, file: TenantFile, now_s: float) -> None:
        """Take new limits over for all tenants whose limits changed."""
        self.file = file
        for tenant in self:
            limits = file.tenants.get(tenant.name, file.default)
            if limits != tenant.limits:
                tenant.set_limits(limits, now_s)

    def _forget(self) -> None:
        """Drop idle tenants above the limit, the longest unused first."""
        if len(self._tenants) > MAX_TENANTS:
            idle = [one.name for one in self if one.is_idle][: MAX_TENANTS // 8]
            for name in idle:
                del self._tenants[name]

    def priority(self, call: Call, tenant: Tenant) -> int:
        """The class of a call as an index of PRIORITIES: the header's, at most the tenant's. What
        is not known is "default"."""
        value = (call.header(PRIORITY_HEADER) or b"default").strip().lower().decode("latin-1")
        asked = PRIORITIES.index(value) if value in PRIORITIES else PRIORITIES.index("default")
        most = "system" if call.is_admin else tenant.limits.max_priority
        return min(asked, PRIORITIES.index(most))


class Waiting(Protocol):
    """A request that waits."""

    call: Call
    tenant: Tenant


W = TypeVar("W", bound=Waiting)


class FairQueue(Generic[W]):
    """Waiting requests of one class. Tenants with a deficit take turns; one that had nothing here
    is next. Inside a tenant the longest cached prefix is first, then the oldest. With one tenant it
    is a plain FIFO."""

    def __init__(self, tenants: Tenants) -> None:
        """``tenants``: who counts the rounds."""
        self._tenants = tenants
        self._waiting: dict[Tenant, OrderedDict[W, None]] = {}
        self._ring: OrderedDict[Tenant, None] = OrderedDict()  # with deficit, in order of turns
        self._spent: OrderedDict[Tenant, None] = OrderedDict()  # without
        self.prefix_tokens: Callable[[Call], int] | None = None  # cached tokens of a prompt
        self._num_picked = 0

    @property
    def tenants(self) -> Collection[Tenant]:
        """Those with requests here."""
        return self._waiting.keys()

    def push(self, waiter: W) -> None:
        """A request waits."""
        tenant = waiter.tenant
        queue = self._waiting.get(tenant)
        if queue is None:
            queue = self._waiting[tenant] = OrderedDict()
            tenant.catch_up(self._tenants.turn)
            self._ring[tenant] = None
            self._ring.move_to_end(tenant, last=False)
        queue[waiter] = None

    def remove(self, waiter: W) -> None:
        """A request waits no more."""
        queue = self._waiting[waiter.tenant]
        del queue[waiter]
        if not queue:
            del self._waiting[waiter.tenant]
            self._ring.pop(waiter.tenant, None)
            self._spent.pop(waiter.tenant, None)

    def newest(self, tenant: Tenant) -> W | None:
        """The request of a tenant that came last."""
        queue = self._waiting.get(tenant)
        return next(reversed(queue)) if queue else None

    def next(self, may_run: Callable[[Tenant], bool]) -> W | None:
        """The request that is next among tenants that may run; it stays in the queue until
        ``remove``. None if no tenant may."""
        while True:
            spent: list[Tenant] = []
            found = None
            for tenant in self._ring:
                if tenant.deficit <= 0:
                    spent.append(tenant)
                elif may_run(tenant):
                    found = tenant
                    break
            for tenant in spent:
                del self._ring[tenant]
                self._spent[tenant] = None
            if found is not None:
                self._ring.move_to_end(found)
                return self._first(self._waiting[found])
            if not self._new_round(may_run):
                return None

    def _new_round(self, may_run: Callable[[Tenant], bool]) -> bool:
        """Go on to the round in which a tenant that may run has a deficit again; whether there is
        one."""
        able = [one for one in self._spent if may_run(one)]
        if not able:
            return False
        for one in able:  # rounds may have passed in the queue of another class
            one.catch_up(self._tenants.turn)
        debt = min(-one.deficit / (QUANTUM * one.limits.weight) for one in able)
        self._tenants.turn += max(0, math.floor(debt) + 1)
        for one in list(self._spent):
            one.catch_up(self._tenants.turn)
            if one.deficit > 0:
                del self._spent[one]
                self._ring[one] = None
        return True

    def _first(self, queue: OrderedDict[W, None]) -> W:
        """Of the oldest requests the one with the longest cached prefix; now and then the oldest,
        so that none is passed over for ever."""
        self._num_picked += 1
        is_turn = self._num_picked % MAX_COMPARED == 0
        if self.prefix_tokens is None or len(queue) == 1 or is_turn:
            return next(iter(queue))
        oldest = [waiter for _, waiter in zip(range(MAX_COMPARED), queue, strict=False)]
        found = self.prefix_tokens
        return max(oldest, key=lambda waiter: found(waiter.call))
