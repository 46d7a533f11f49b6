"""Admission: how many requests run at once, and which of those that wait is next."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from radixlm.base.errors import RequestError
from radixlm.base.record import Record
from radixlm.router.call import Call
from radixlm.router.tenants import (
    OUTPUT_WEIGHT,
    PRIORITIES,
    Bucket,
    FairQueue,
    Limits,
    Tenant,
    TenantFile,
    Tenants,
)
from radixlm.router.worker import Worker

if TYPE_CHECKING:
    from radixlm.router.metrics import RouterMetrics

ACTIVE_S = 10.0  # a tenant without requests for this long has no share
OLDEST_EVERY = 8  # of so many grants one goes to the oldest request, of whatever class
MAX_RETRY_AFTER_S = 60.0
UNLIMITED = 1 << 60


class Refused(RequestError):
    """A request that may not run now. 429: the queue is full, or a ceiling of the tenant; 408: it
    waited too long."""

    def __init__(self, status: int, code: str, message: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.status, self.code = status, code


class QueueConfig(Record):
    """``max_concurrent``: requests that run at once, above which they wait; None: no limit.
    ``rate_per_s``: requests that begin a second, above which they wait. ``queue_size``: how many
    may wait, ``timeout_s``: how long. ``is_fair``: tenants share, else FIFO."""

    max_concurrent: int | None = None
    rate_per_s: float | None = None
    queue_size: int = 100
    timeout_s: float = 60.0
    is_fair: bool = False


class Ticket:
    """The right of one request to run, until ``leave``."""

    __slots__ = ("_admission", "_call", "_cost", "_is_alone", "_is_left", "_used", "tenant")

    def __init__(
        self, admission: Admission, call: Call, tenant: Tenant, cost: float, is_alone: bool
    ) -> None:
        """``cost``: expected, in tokens; 0 where tenants are not told apart."""
        self._is_alone = is_alone
        self._admission, self._call, self.tenant = admission, call, tenant
        self._cost, self._used = cost, cost
        self._is_left = False

    def candidates(self, workers: Sequence[Worker]) -> Sequence[Worker]:
        """Those of ``workers`` where the tenant's turn is, and that have a free slot if one has;
        at least one."""
        if not self._cost:
            return workers
        free = [one for one in workers if one.num_inflight < (slots_of(one) or UNLIMITED)]
        return self.tenant.candidates(free or workers)

    def sent(self, worker: Worker) -> None:
        """The request went to ``worker``."""
        if self._cost:
            self.tenant.sent(worker, self._cost)

    def used(
        self,
        *,
        prompt_tokens: int | None = None,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """What the answer tells that it cost; what it does not tell stays as expected."""
        if not self._cost:
            return
        tenant = self.tenant
        prompt = self._call.num_prompt_tokens if prompt_tokens is None else prompt_tokens
        output = min(tenant.mean_output, self._call.max_tokens)
        if output_tokens is not None:
            output = output_tokens
            tenant.mean_output += (output - tenant.mean_output) / 16
        self._used = max(1.0, prompt - (cached_tokens or 0) + OUTPUT_WEIGHT * output)

    def leave(self) -> None:
        """The request has ended; a second call does nothing."""
        if not self._is_left:
            self._is_left = True
            extra = self._used - self._cost
            self._admission.left(self.tenant, extra, 0.0 if self._is_alone else extra)


class FreeTicket(Ticket):
    """Where nothing is limited."""

    __slots__ = ()

    def __init__(self) -> None: ...

    def candidates(self, workers: Sequence[Worker]) -> Sequence[Worker]:
        return workers

    def sent(self, worker: Worker) -> None:
        """Nothing to count."""

    def used(self, **_: int | None) -> None:
        """Nothing to count."""

    def leave(self) -> None:
        """Nothing to give back."""


FREE = FreeTicket()


class Waiter:
    """A request in the queue."""

    __slots__ = ("call", "future", "level", "since_s", "tenant", "verdict")

    def __init__(self, call: Call, tenant: Tenant, level: int, since_s: float) -> None:
        """``level``: its class, an index of PRIORITIES."""
        self.call, self.tenant, self.level, self.since_s = call, tenant, level, since_s
        self.future: asyncio.Future[None] | None = None
        self.verdict: Ticket | Refused | None = None


class Admission:
    """A semaphore with a queue. At most ``capacity`` tickets are out at any time."""

    def __init__(self, config: QueueConfig, tenants: Tenants | None = None) -> None:
        """``tenants``: with their limits; needed where ``config.is_fair``."""
        self.config = config
        self.tenants = tenants or Tenants(TenantFile())
        self.capacity = config.max_concurrent or UNLIMITED
        self.is_open = not (config.max_concurrent or config.rate_per_s or config.is_fair)
        self._everyone = Tenant("everyone", Limits(), 0.0, 0)
        self._everyone.deficit = math.inf
        self._rate: Bucket | None = None
        self._queues = [FairQueue[Waiter](self.tenants) for _ in PRIORITIES]
        self._all: OrderedDict[Waiter, None] = OrderedDict()  # in order of arrival
        # tenant -> when it was active last, and its weight then, of which the sum is kept
        self._active: OrderedDict[Tenant, tuple[float, float]] = OrderedDict()
        self._active_weight = 0.0
        self._num_granted = 0
        self._pace_s, self._left_s = 0.0, 0.0  # mean time between two ends; the last of them
        self._timer: asyncio.TimerHandle | None = None
        self.num_inflight = 0
        self.metrics: RouterMetrics | None = None

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._all)

    def waiting_tenants(self) -> set[Tenant]:
        """Those with requests in the queue."""
        return {tenant for queue in self._queues for tenant in queue.tenants}

    def rank_by_prefix(self, prefix_tokens: Callable[[Call], int]) -> None:
        """Order a tenant's requests by how much of their prompts is cached."""
        for queue in self._queues:
            queue.prefix_tokens = prefix_tokens

    def resize(self, capacity: int | None) -> None:
        """Set the number of requests that run at once; None: no limit. Requests that run go on."""
        self.capacity = capacity or UNLIMITED
        if self._all:
            self._pump(asyncio.get_running_loop().time())

    async def enter(self, call: Call) -> Ticket:
        """Wait until ``call`` may run; Refused if it may not. The ticket must ``leave``."""
        if self.is_open:
            return FREE
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        tenant, level = self._everyone, 0
        if self.config.is_fair:
            tenant = self._tenant(call, now_s)
            level = self.tenants.priority(call, tenant)
        if not self._all and self._may_begin(now_s) and self._may_run(tenant):
            return self._ticket(call, tenant, now_s, is_alone=True)
        waiter = Waiter(call, tenant, level, now_s)
        self._push(waiter)
        self._pump(now_s)
        if waiter.verdict is None:
            self._make_room(waiter)
        if waiter.verdict is None:
            waiter.future = loop.create_future()
            own_s = timeout_s(call)
            timer = own_s and loop.call_later(own_s, self._late, waiter, own_s, "timeout")
            try:
                await waiter.future
            except asyncio.CancelledError:
                self._gone(waiter)
                raise
            finally:
                if timer:
                    timer.cancel()
        if isinstance(waiter.verdict, Ticket):
            return waiter.verdict
        assert waiter.verdict is not None
        raise waiter.verdict

    def left(self, tenant: Tenant, tokens: float, deficit: float) -> None:
        """A ticket came back. ``tokens``, ``deficit``: what it cost beyond what was charged."""
        self.num_inflight -= 1
        tenant.num_inflight -= 1
        tenant.charge(tokens, deficit)
        before_s, self._left_s = self._left_s, asyncio.get_running_loop().time()
        if self._all:
            interval_s = min(MAX_RETRY_AFTER_S, self._left_s - before_s) if before_s else 0.0
            self._pace_s += (interval_s - self._pace_s) / 16
            self._pump(self._left_s)

    # arriving

    def _tenant(self, call: Call, now_s: float) -> Tenant:
        """The tenant of a call; Refused by its ceilings."""
        call.tenant = self.tenants.name_of(call)
        tenant = self.tenants.get(call.tenant, now_s)
        self._check(tenant, now_s)
        self._touch(tenant, now_s)
        return tenant

    def _push(self, waiter: Waiter) -> None:
        waiter.tenant.num_waiting += 1
        self._all[waiter] = None
        self._queues[waiter.level].push(waiter)

    def _check(self, tenant: Tenant, now_s: float) -> None:
        """Refused if the tenant is above a rate or has too many waiting."""
        limits = tenant.limits
        places = (
            ("requests_per_minute", tenant.requests, limits.requests_per_minute),
            ("tokens_per_minute", tenant.tokens, limits.tokens_per_minute),
        )
        for name, bucket, limit in places:
            wait_s = bucket.wait_s(now_s) if bucket is not None else 0.0
            if wait_s:
                message = f"tenant {tenant.name!r} is above its limit of {limit:g} {name}"
                raise self._refusal(429, "rate_limit_exceeded", message, wait_s)
        if limits.max_queued is not None and tenant.num_waiting >= limits.max_queued:
            message = (
                f"{tenant.num_waiting} requests of tenant {tenant.name!r} wait, its limit is "
                f"{limits.max_queued} (max_queued)"
            )
            raise self._refusal(429, "queue_full", message, self._retry_after(tenant.num_waiting))
        if tenant.requests is not None:
            tenant.requests.take(1)

    def _make_room(self, waiter: Waiter) -> None:
        """Refuse one request if too many wait: the newest of the tenant with the most."""
        if len(self._all) <= self.config.queue_size:
            return
        last, largest = waiter, waiter.tenant
        if self.config.is_fair:
            tenants = self.waiting_tenants()
            largest = max(tenants, key=lambda one: one.num_waiting / one.limits.weight)
        if largest.num_waiting > waiter.tenant.num_waiting:
            found = (queue.newest(largest) for queue in self._queues)
            last = next(one for one in found if one is not None)
        number, name = largest.num_waiting, last.tenant.name
        whose = f", {number} of them of tenant {name!r}" if self.config.is_fair else ""
        message = (
            f"the queue is full: {self.config.queue_size} requests wait{whose} (--queue-size); "
            f"{self.num_inflight} run"
        )
        retry_after_s = self._retry_after(self.config.queue_size)
        self._refuse(last, self._refusal(429, "queue_full", message, retry_after_s))

    def _refusal(self, status: int, code: str, message: str, retry_after_s: float) -> Refused:
        if self.metrics is not None:
            self.metrics.rate_limited(is_allowed=False)
        return Refused(status, code, message, retry_after_s)

    def _retry_after(self, position: int) -> float:
        """Seconds until ``position`` requests have ended, as they ended lately."""
        return min(MAX_RETRY_AFTER_S, max(1.0, math.ceil(position * self._pace_s)))

    # waiting

    def _may_begin(self, now_s: float) -> bool:
        """Whether a slot is free and the rate allows one more."""
        if self.config.rate_per_s and self._rate is None:
            rate = self.config.rate_per_s
            burst = max(1.0, float(self.config.max_concurrent or rate))
            self._rate = Bucket(rate, burst, now_s)
        is_late = self._rate is not None and self._rate.wait_s(now_s) > 0
        return self.num_inflight < self.capacity and not is_late

    def _pump(self, now_s: float) -> None:
        """Grant what may run now."""
        self._forget_inactive(now_s)
        while self._all and self._may_begin(now_s):
            waiter = self._next()
            if waiter is None:
                break
            self._grant(waiter, now_s)
        self._arm(now_s)

    def _next(self) -> Waiter | None:
        """Who runs next: of the highest class, and now and then who waits longest."""
        oldest = next(iter(self._all))
        is_turn = self._num_granted % OLDEST_EVERY == OLDEST_EVERY - 1
        for level, queue in reversed(list(enumerate(self._queues))):
            if is_turn and queue.tenants and oldest.level < level and self._may_run(oldest.tenant):
                return oldest
            waiter = queue.next(self._may_run)
            if waiter is not None:
                return waiter
        return None

    def _may_run(self, tenant: Tenant) -> bool:
        """Whether a tenant is below its ceiling, and leaves the reserve to tenants that are below
        their share, so that these need not wait for the end of another's request."""
        limit = tenant.limits.max_concurrent
        if limit is not None and tenant.num_inflight >= limit:
            return False
        if len(self._active) < 2 or self.capacity >= UNLIMITED:
            return True
        share = max(1.0, self.capacity * tenant.limits.weight / self._active_weight)
        free = self.capacity - self.num_inflight
        return tenant.num_inflight < share or free > self.capacity // 16

    def _grant(self, waiter: Waiter, now_s: float) -> None:
        self._drop(waiter)
        self._decide(waiter, self._ticket(waiter.call, waiter.tenant, now_s))

    def _ticket(self, call: Call, tenant: Tenant, now_s: float, is_alone: bool = False) -> Ticket:
        """Let a request run. ``is_alone``: nobody waits, so it takes nothing from others."""
        cost = 0.0
        self._num_granted += 1
        self.num_inflight += 1
        tenant.num_inflight += 1
        if self._rate is not None:
            self._rate.take(1)
        if self.config.is_fair:
            cost = tenant.cost(call)
            tenant.charge(cost, 0.0 if is_alone else cost)
            self._touch(tenant, now_s)
        if self.metrics is not None:
            self.metrics.rate_limited(is_allowed=True)
        return Ticket(self, call, tenant, cost, is_alone)

    def _refuse(self, waiter: Waiter, refusal: Refused) -> None:
        self._drop(waiter)
        self._decide(waiter, refusal)

    def _decide(self, waiter: Waiter, verdict: Ticket | Refused) -> None:
        waiter.verdict = verdict
        refused = "timeout" if getattr(verdict, "status", 0) == 408 else "full"
        self._count(waiter, "entered" if isinstance(verdict, Ticket) else refused)
        if waiter.future is not None and not waiter.future.done():
            waiter.future.set_result(None)

    def _drop(self, waiter: Waiter) -> None:
        del self._all[waiter]
        waiter.tenant.num_waiting -= 1
        self._queues[waiter.level].remove(waiter)

    def _gone(self, waiter: Waiter) -> None:
        """The client left while it waited, or at the moment of the grant."""
        if isinstance(waiter.verdict, Ticket):
            waiter.verdict.leave()
        elif waiter.verdict is None:
            self._drop(waiter)
            self._count(waiter, "left")

    def _count(self, waiter: Waiter, result: str) -> None:
        if self.metrics is not None:
            seconds = asyncio.get_running_loop().time() - waiter.since_s
            self.metrics.queued(seconds, result)

    def _touch(self, tenant: Tenant, now_s: float) -> None:
        """The tenant is active and has a share."""
        _, before = self._active.get(tenant, (0.0, 0.0))
        self._active[tenant] = now_s, tenant.limits.weight
        self._active_weight += tenant.limits.weight - before
        self._active.move_to_end(tenant)
        self._forget_inactive(now_s)

    def _forget_inactive(self, now_s: float) -> None:
        while self._active:
            tenant, (since_s, weight) = next(iter(self._active.items()))
            if now_s - since_s < ACTIVE_S:
                return
            if tenant.is_idle:
                del self._active[tenant]
                self._active_weight -= weight
            else:
                self._active[tenant] = now_s, weight
                self._active.move_to_end(tenant)

    def _arm(self, now_s: float) -> None:
        """Set the timer for what comes first: the rate allows one more, or the oldest request has
        waited too long."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._all:
            return
        when_s = next(iter(self._all)).since_s + self.config.timeout_s
        wait_s = self._rate.wait_s(now_s) if self._rate is not None else 0.0
        if wait_s:
            when_s = min(when_s, now_s + wait_s)
        self._timer = asyncio.get_running_loop().call_at(when_s, self._wake)

    def _wake(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._timer = None
        while self._all:
            oldest = next(iter(self._all))
            if now_s < oldest.since_s + self.config.timeout_s:
                break
            self._late(oldest, self.config.timeout_s, "--queue-timeout-secs")
        self._pump(now_s)

    def _late(self, waiter: Waiter, limit_s: float, name: str) -> None:
        """Refuse a request that has waited too long. ``name``: what set the limit."""
        if waiter.verdict is not None:
            return
        message = f"waited {limit_s:g} s ({name}) with {len(self._all)} requests; "
        message += f"{self.num_inflight} run"
        if self.config.is_fair:
            tenant = waiter.tenant
            message += f", {tenant.num_inflight} of them of tenant {tenant.name!r}"
        retry_after_s = self._retry_after(len(self._all))
        self._refuse(waiter, self._refusal(408, "queue_timeout", message, retry_after_s))


def timeout_s(call: Call) -> float | None:
    """Seconds that a client gives its request: the field ``timeout``."""
    if b'"timeout"' not in call.body:
        return None
    value = call.fields.get("timeout")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and value > 0 else None  # type: ignore[arg-type,operator]


def slots_of(worker: Worker) -> int:
    """Requests that a worker runs at once, above which it has a queue; 0: it does not tell. A queue
    is better kept here, where it is fair."""
    told = worker.facts.get("max_running_requests")
    ranks = worker.facts.get("dp_size") if worker.dp_rank is None else 1
    if not isinstance(told, int) or told < 1:
        return 0
    return told * (ranks if isinstance(ranks, int) else 1)
