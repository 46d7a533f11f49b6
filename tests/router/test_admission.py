"""Admission in simulated time: limits hold, nobody waits for ever, shares are fair."""

from __future__ import annotations

import asyncio
import os
import random
import re
import timeit
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixlm.base.errors import ConfigError
from radixlm.router import limits as limits_part
from radixlm.router.admission import (
    FREE,
    UNLIMITED,
    Admission,
    QueueConfig,
    Refused,
)
from radixlm.router.call import Call
from radixlm.router.limits import attach, cached_tokens
from radixlm.router.metrics import RouterMetrics
from radixlm.router.options import Options
from radixlm.router.registry import Registry
from radixlm.router.tenants import (
    MAX_COMPARED,
    QUANTUM,
    WORKER_QUANTUM,
    Limits,
    Tenant,
    TenantFile,
    Tenants,
    read_tenants,
)
from radixlm.router.worker import State, Worker
from tests.router.virtual_loop import simulate


def make_call(tenant: str = "", priority: str = "", tokens: int = 100, output: int = 100) -> Call:
    headers = [(b"x-tenant", tenant.encode())] if tenant else []
    if priority:
        headers.append((b"x-smg-priority", priority.encode()))
    body = orjson.dumps({"input_ids": [1] * tokens, "max_tokens": output})
    return Call("POST", "/generate", "", headers, body, "10.0.0.1")


def fair(limit: int = 1, queue_size: int = 1000, **file: Limits) -> Admission:
    default = file.pop("default", Limits())
    config = QueueConfig(max_concurrent=limit, queue_size=queue_size, is_fair=True)
    return Admission(config, Tenants(TenantFile(default, file)))


async def run(admission: Admission, call: Call, seconds: float, done: list[Call]) -> None:
    ticket = await admission.enter(call)
    await asyncio.sleep(seconds)
    done.append(call)
    ticket.leave()


def test_without_limits_there_is_one_free_ticket_for_all() -> None:
    admission, call = Admission(QueueConfig()), make_call()

    async def enter() -> float:
        assert await admission.enter(call) is FREE

        def once() -> None:
            try:
                admission.enter(call).send(None)
            except StopIteration as stop:
                stop.value.leave()

        return min(timeit.repeat(once, number=1000, repeat=5)) / 1000

    assert simulate(enter()) < 20e-6  # about 1 us; a busy machine may be slow


@given(
    limit=st.integers(1, 4),
    queue_size=st.integers(0, 6),
    is_fair=st.booleans(),
    rate=st.none() | st.floats(0.5, 20),
    arrivals=st.lists(
        st.tuples(
            st.floats(0, 3),  # when
            st.floats(0, 4),  # how long it runs
            st.sampled_from("abc"),
            st.sampled_from(["bulk", "default", "interactive", "nonsense"]),
            st.none() | st.floats(0, 3),  # when the client leaves
        ),
        max_size=30,
    ),
)
def test_never_more_at_once_than_allowed_and_each_request_ends_once(
    limit: int, queue_size: int, is_fair: bool, rate: float | None, arrivals: list[tuple]
) -> None:
    config = QueueConfig(limit, rate, queue_size, timeout_s=2.0, is_fair=is_fair)
    limits = Limits(max_concurrent=2)
    admission = Admission(config, Tenants(TenantFile(limits)))
    running: Counter[str] = Counter()
    begun: list[float] = []
    ends: Counter[str] = Counter()

    async def one(when: float, seconds: float, tenant: str, priority: str) -> None:
        await asyncio.sleep(when)
        loop = asyncio.get_running_loop()
        arrived = loop.time()
        try:
            ticket = await admission.enter(make_call(tenant, priority))
        except Refused as refused:
            assert refused.retry_after_s and refused.status in (408, 429)
            assert loop.time() - arrived <= config.timeout_s + 1e-3
            ends["refused"] += 1
            return
        begun.append(loop.time())
        running[tenant] += 1
        assert running.total() <= admission.num_inflight <= limit
        assert admission.num_waiting <= queue_size
        assert not is_fair or running[tenant] <= 2
        try:
            await asyncio.sleep(seconds)
            ticket.used(prompt_tokens=10, output_tokens=7)
            ends["done"] += 1
        finally:
            running[tenant] -= 1
            ticket.leave()
            ticket.leave()

    async def leaving(when: float, *rest: object, after: float | None) -> None:
        try:
            async with asyncio.timeout(None if after is None else when + after):
                await one(when, *rest)  # type: ignore[arg-type]
        except TimeoutError:
            ends["left"] += 1

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for *call, after in arrivals:
                group.create_task(leaving(*call, after=after))

    simulate(main())
    assert ends.total() == len(arrivals)
    assert admission.num_inflight == admission.num_waiting == 0
    assert all(tenant.is_idle for tenant in admission.tenants)
    if rate is not None:
        burst = max(1.0, float(limit))
        for first, when in enumerate(begun):  # any interval holds at most burst + rate x length
            for last in range(first, len(begun)):
                assert last - first + 1 <= burst + rate * (begun[last] - when) + 1e-3


def test_fifo_keeps_the_order_of_arrival() -> None:
    admission = Admission(QueueConfig(max_concurrent=1))
    calls, done = [make_call(tenant) for tenant in "aaabbb"], []

    async def main() -> None:
        await asyncio.gather(*(run(admission, call, 1, done) for call in calls))

    simulate(main())
    assert done == calls


def test_a_full_queue_and_a_long_wait_are_told_apart() -> None:
    admission = Admission(QueueConfig(max_concurrent=1, queue_size=1, timeout_s=5))

    async def main() -> list[object]:
        calls = (run(admission, make_call(), 20, []) for _ in range(3))
        return await asyncio.gather(*calls, return_exceptions=True)

    first, second, third = simulate(main())
    assert first is None
    assert isinstance(second, Refused) and second.status == 408
    assert "waited 5 s (--queue-timeout-secs)" in str(second)
    assert isinstance(third, Refused) and third.status == 429
    assert "the queue is full: 1 requests wait (--queue-size); 1 run" in str(third)


def test_a_client_that_leaves_at_the_moment_of_its_grant_gives_the_slot_back() -> None:
    admission = Admission(QueueConfig(max_concurrent=1))

    async def main() -> None:
        first = await admission.enter(make_call())
        second = asyncio.create_task(admission.enter(make_call()))
        await asyncio.sleep(0)
        first.leave()  # grants the second
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        assert admission.num_inflight == 0
        (await admission.enter(make_call())).leave()

    simulate(main())


def test_a_request_has_its_own_timeout_in_the_queue_and_the_rest_of_it_at_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = FakeGateway(max_concurrent_requests=1)
    attach(gateway)  # type: ignore[arg-type]
    call = Call("POST", "/generate", "", [], b'{"timeout": 3, "text": "a"}')

    async def main() -> None:
        (await gateway.admission.enter(make_call())).sent(Worker("http://w"))
        began = asyncio.get_running_loop().time()
        with pytest.raises(Refused, match=r"waited 3 s \(timeout\) with 1 requests; 1 run"):
            await gateway.admission.enter(call)
        assert asyncio.get_running_loop().time() - began == pytest.approx(3)

    simulate(main())
    for work in gateway.on_start:
        work()
    (splice,) = gateway.dispatcher.splices
    worker = Worker("http://w")
    for waited_s, rest in ((0.0, {}), (2.0, {"timeout": 1.0}), (4.0, {"timeout": 0.01})):
        clock = SimpleNamespace(monotonic=lambda s=waited_s: call.arrival_s + s)
        monkeypatch.setattr(limits_part, "time", clock)
        assert splice(call, worker) == rest
    for body in (b"{}", b'{"timeout": null}', b'{"timeout": true}', b'{"timeout": -1}', b"timeout"):
        late = Call("POST", "/generate", "", [], body)
        late.arrival_s -= 5
        assert splice(late, worker) == {}


@pytest.mark.parametrize("weight", [1, 3])
def test_tokens_are_shared_by_weight_however_many_requests_a_tenant_sends(weight: int) -> None:
    admission = fair(4, 2000, big=Limits(), small=Limits(weight=weight))
    tokens: Counter[str] = Counter()

    async def one(tenant: str, size: int) -> None:
        ticket = await admission.enter(make_call(tenant, tokens=size, output=0))
        await asyncio.sleep(size / 1000)
        tokens[tenant] += size
        ticket.leave()

    async def main() -> None:
        big = [asyncio.create_task(one("big", 2000)) for _ in range(500)]
        small = [asyncio.create_task(one("small", 200)) for _ in range(1200)]
        await asyncio.sleep(60)  # both still have requests that wait
        for task in big + small:
            task.cancel()
        await asyncio.gather(*big, *small, return_exceptions=True)

    simulate(main())
    # bounded by a round of each and what was running
    assert abs(tokens["small"] / weight - tokens["big"]) <= 2 * QUANTUM + 4 * 2000
    assert tokens.total() > 220_000  # and no slot was idle


def test_what_runs_while_nobody_waits_is_no_debt() -> None:
    admission, done = fair(limit=1), []

    async def main() -> None:
        for _ in range(100):
            await run(admission, make_call("early", tokens=1000), 0.1, done)
        done.clear()
        await asyncio.gather(*(run(admission, make_call(name), 1, done) for name in "xab"))
        calls = (run(admission, make_call(name), 1, done) for name in ("x", "early", "late"))
        await asyncio.gather(*calls)

    simulate(main())
    assert {call.tenant for call in done[3:6]} == {"x", "early", "late"}
    assert admission.tenants.get("early", 0.0).deficit > 0


def test_who_comes_back_after_a_pause_gets_no_credit_for_it() -> None:
    tenant = Tenant("a", Limits(), 0.0, turn=0)
    tenant.charge(0, 10 * QUANTUM)
    tenant.catch_up(3)
    assert tenant.deficit == -6 * QUANTUM
    tenant.catch_up(1000)
    assert tenant.deficit == QUANTUM


def test_a_tenant_is_sent_on_when_its_quantum_at_a_worker_is_used_up() -> None:
    tenant = Tenant("a", Limits(), 0.0, turn=0)
    workers = [Worker(f"http://w{number}") for number in range(3)]
    sent: Counter[str] = Counter()
    for _ in range(300):  # the policy always prefers the first that it may choose
        worker = tenant.candidates(workers)[0]
        tenant.sent(worker, 1000)
        sent[worker.url] += 1000
    assert max(sent.values()) - min(sent.values()) <= WORKER_QUANTUM + 1000
    assert len(sent) == 3


def test_a_worker_with_a_free_slot_is_chosen_before_a_full_one() -> None:
    admission = fair(limit=10)
    full, free = Worker("http://full"), Worker("http://free")
    full.facts = free.facts = {"max_running_requests": 2}
    full.num_inflight = 2

    async def main() -> None:
        ticket = await admission.enter(make_call("a"))
        assert ticket.candidates([full, free]) == [free]
        free.num_inflight = 2
        assert ticket.candidates([full, free]) == [full, free]

    simulate(main())


def test_a_full_queue_refuses_the_tenant_that_fills_it() -> None:
    admission = fair(limit=1, queue_size=4)
    done: list[Call] = []

    async def main() -> list[object]:
        tasks = [run(admission, make_call("big"), 1, done) for _ in range(5)]
        tasks.append(run(admission, make_call("small"), 1, done))
        return await asyncio.gather(*tasks, return_exceptions=True)

    *_, last_of_big, small = simulate(main())
    assert small is None
    assert isinstance(last_of_big, Refused) and last_of_big.status == 429
    assert "4 of them of tenant 'big'" in str(last_of_big)


def test_classes_go_first_up_to_the_tenants_ceiling_and_bulk_still_runs() -> None:
    admission = fair(meek=Limits(max_priority="default"))
    done: list[Call] = []
    calls = [make_call("a", "bulk"), make_call("a"), make_call("a", "BULK")]
    calls += [make_call("meek", "system"), *(make_call("b", "interactive") for _ in range(20))]

    async def main() -> None:
        await asyncio.gather(*(run(admission, call, 1, done) for call in calls))

    simulate(main())
    order = [(call.tenant, call.header(b"x-smg-priority")) for call in done]
    assert order[0] == ("a", b"bulk")  # nothing else was there
    assert order[1:7] == [("b", b"interactive")] * 6
    # one of eight grants goes to who waits longest
    assert order[7] == ("a", None)
    assert order[15] == ("a", b"BULK")
    assert order[23] == ("meek", b"system")


def test_the_reserve_is_for_tenants_below_their_share() -> None:
    admission = fair(limit=32)

    async def main() -> None:
        await admission.enter(make_call("small"))
        tasks = [asyncio.create_task(admission.enter(make_call("big"))) for _ in range(100)]
        await asyncio.sleep(0)
        assert admission.num_inflight == 30  # two slots are kept
        async with asyncio.timeout(0):
            await admission.enter(make_call("small"))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    simulate(main())


def test_rates_of_a_tenant_name_tenant_limit_and_when_to_come_back() -> None:
    admission = fair(limit=100, acme=Limits(requests_per_minute=60, tokens_per_minute=6000))

    async def main() -> None:
        for _ in range(10):
            (await admission.enter(make_call("acme", tokens=1, output=0))).leave()
        with pytest.raises(
            Refused, match=r"tenant 'acme' is above .* 60 requests_per_min"
        ) as found:
            await admission.enter(make_call("acme"))
        assert found.value.status == 429 and found.value.retry_after_s == pytest.approx(1)
        await asyncio.sleep(1)
        ticket = await admission.enter(make_call("acme", tokens=1, output=0))
        ticket.used(prompt_tokens=5000, cached_tokens=1000, output_tokens=500)
        ticket.leave()
        await asyncio.sleep(1)
        with pytest.raises(Refused, match="6000 tokens_per_minute") as found:
            await admission.enter(make_call("acme"))
        # 1,000 were there, 5,000 were used; 100 come back a second
        assert found.value.retry_after_s == pytest.approx(39, abs=1)
        (await admission.enter(make_call("other"))).leave()

    simulate(main())


def test_more_capacity_lets_waiting_requests_run() -> None:
    admission = fair(limit=1)
    done: list[Call] = []

    async def main() -> None:
        tasks = [asyncio.create_task(run(admission, make_call("a"), 1, done)) for _ in range(3)]
        await asyncio.sleep(0.5)
        admission.resize(3)
        await asyncio.sleep(1.1)
        assert len(done) == 3
        await asyncio.gather(*tasks)

    simulate(main())


def test_inside_a_tenant_the_longest_cached_prefix_is_first() -> None:
    admission, done = fair(), []
    admission.rank_by_prefix(lambda call: call.num_prompt_tokens)
    calls = [make_call("a", tokens=size) for size in (5, 10, 30, 20)]

    async def main() -> None:
        await asyncio.gather(*(run(admission, call, 1, done) for call in calls))

    simulate(main())
    assert [call.num_prompt_tokens for call in done] == [5, 30, 20, 10]


def test_nobody_is_passed_over_for_ever_for_a_shorter_prefix() -> None:
    admission, done = fair(), []
    admission.rank_by_prefix(lambda call: call.num_prompt_tokens)
    cold = make_call("a", tokens=1)

    async def main() -> None:
        calls = [make_call("a", tokens=50), cold, *(make_call("a", tokens=50) for _ in range(30))]
        await asyncio.gather(*(run(admission, call, 1, done) for call in calls))

    simulate(main())
    assert done.index(cold) <= MAX_COMPARED + 1


def test_cached_tokens_are_those_of_the_worker_that_holds_most() -> None:
    holdings = SimpleNamespace(of=lambda prompt: {"a": 3, "b": 7} if prompt == "warm" else {})
    gateway: Any = SimpleNamespace(tokens=SimpleNamespace(holdings=holdings))
    call: Any = make_call()
    found = []
    for call.prompt in (None, "cold", "warm"):
        found.append(cached_tokens(gateway, call))
    assert found == [0, 0, 7]


def test_the_name_of_a_tenant() -> None:
    tenants = Tenants(TenantFile(tenants={"acme": Limits()}))
    call = make_call()
    assert tenants.name_of(call) == "address 10.0.0.1"
    call.principal = "someone"
    assert tenants.name_of(call) == "someone"
    call = make_call("claimed")
    assert tenants.name_of(call) == "claimed"
    call.principal = "acme"  # the file names the owner of the key: the header cannot change it
    assert tenants.name_of(call) == "acme"


def test_the_file_of_tenants(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text("default: {weight: 0.5}\ntenants:\n  acme: {weight: 2, max_concurrent: 8}\n")
    file = read_tenants(str(path))
    tenants = Tenants(file)
    acme, other = tenants.get("acme", 0.0), tenants.get("other", 0.0)
    assert (acme.limits.weight, acme.limits.max_concurrent) == (2, 8)
    assert other.limits.weight == 0.5
    path.write_text("tenants: {acme: {weight: 3, requests_per_minute: 60}}\n")
    tenants.reload(read_tenants(str(path)), 5.0)
    assert acme.limits.weight == 3 and acme.requests is not None
    assert other.limits == Limits()
    for text in ("tenants: {a: {weight: -1}}", "tenants: {a: {wieght: 1}}", "x: [", "[]"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"(?s)--tenants .*requests_per_minute: 600"):
            read_tenants(str(path))
    path.write_text("")
    assert read_tenants(str(path)) == TenantFile()


def test_tenants_that_are_idle_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixlm.router.tenants.MAX_TENANTS", 16)
    tenants = Tenants(TenantFile())
    tenants.get("busy", 0.0).num_inflight = 1
    for number in range(100):
        tenants.get(f"t{number}", 0.0)
    names = [tenant.name for tenant in tenants]
    assert len(names) <= 17 and "busy" in names and "t99" in names


class FakeGateway:
    """What ``attach`` needs."""

    def __init__(self, **options: object) -> None:
        self.options = Options(**options)  # type: ignore[arg-type]
        self.admission: Admission | None = None
        self.metrics = RouterMetrics(())  # type: ignore[arg-type]
        self.registry = Registry(self.options, None)  # type: ignore[arg-type]
        self.periodic: list = []
        self.on_start: list = []
        self.dispatcher = SimpleNamespace(splices=[])

    def every(self, seconds: float, work: object) -> None:
        self.periodic.append(work)


def test_without_options_nothing_is_limited() -> None:
    gateway = FakeGateway()
    attach(gateway)  # type: ignore[arg-type]
    assert simulate(gateway.admission.enter(make_call())) is FREE


def test_workers_tell_how_many_requests_run_at_once() -> None:
    gateway = FakeGateway(fair_share=True)
    attach(gateway)  # type: ignore[arg-type]
    admission = gateway.admission
    assert admission is not None and admission.capacity == UNLIMITED

    async def main() -> None:
        for number, facts in enumerate(({"max_running_requests": 8, "dp_size": 2}, {"x": 1})):
            worker = Worker(f"http://w{number}")
            worker.facts = facts
            gateway.registry._workers[worker.id] = worker
            gateway.registry.move(worker, State.READY)
            assert admission.capacity == (16, UNLIMITED)[number]
        worker.facts = {"max_running_requests": 4}
        gateway.registry.changed(worker)
        assert admission.capacity == 20
        gateway.registry.move(worker, State.DRAINING)
        assert admission.capacity == 16
        for one in gateway.registry:
            gateway.registry.move(one, State.DRAINING)
        assert admission.capacity == 16  # with none, what waits goes on to wait

    simulate(main())


def test_the_file_of_tenants_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text("tenants: {acme: {weight: 2}}")
    gateway = FakeGateway(tenants=str(path), max_concurrent_requests=4)
    attach(gateway)  # type: ignore[arg-type]
    (reload,) = gateway.periodic
    tenants = gateway.admission.tenants
    assert tenants.get("acme", 0.0).limits.weight == 2

    async def write(text: str, when: int) -> None:
        path.write_text(text)
        os.utime(path, (when, when))
        reload()

    simulate(write("tenants: {acme: {weight: 5}}", 1))
    assert tenants.get("acme", 0.0).limits.weight == 5
    simulate(write("tenants: {acme: {wight: 7}}", 2))  # an error keeps what is known
    assert tenants.get("acme", 0.0).limits.weight == 5


def test_what_happens_in_the_queue_is_counted() -> None:
    gateway = FakeGateway(max_concurrent_requests=1, queue_size=2, queue_timeout_secs=5)
    attach(gateway)  # type: ignore[arg-type]

    async def main() -> None:
        calls = (run(gateway.admission, make_call(), 4, []) for _ in range(4))
        await asyncio.gather(*calls, return_exceptions=True)

    simulate(main())
    text = gateway.metrics.exposition().decode()
    assert 'rate_limit_total{result="allowed"} 2' in text
    assert 'rate_limit_total{result="rejected"} 2' in text
    assert "radix_router_waiting_requests" in text
    for result in ("entered", "timeout", "full"):
        assert re.search(rf'radix_router_queue\w*_count{{result="{result}"}} 1', text), text


def p95_of_small(factor: float, *, is_fair: bool) -> float:
    """95th percentile of the seconds from arrival to end of tenant "small", which sends 5 requests
    of one second a second to 32 slots; "big" sends ``factor`` times as many."""
    config = QueueConfig(max_concurrent=32, queue_size=100, timeout_s=10, is_fair=is_fair)
    admission, draw = Admission(config), random.Random(7)
    seconds: list[float] = []

    async def one(tenant: str, when: float) -> None:
        await asyncio.sleep(when)
        try:
            await run(admission, make_call(tenant), 1.0, [])
        except Refused:
            assert tenant == "big" or not is_fair
            return
        if tenant == "small":
            seconds.append(asyncio.get_running_loop().time() - 1000 - when)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for tenant, rate in (("small", 5), ("big", 5 * factor)):
                when = 0.0
                while (when := when + draw.expovariate(rate)) < 60:
                    group.create_task(one(tenant, when))

    simulate(main())
    return sorted(seconds)[int(0.95 * len(seconds))]


def test_ten_times_the_load_of_another_tenant_moves_a_p95_by_a_tenth_at_most() -> None:
    assert p95_of_small(10, is_fair=True) <= 1.1 * p95_of_small(1, is_fair=True)
    assert p95_of_small(10, is_fair=False) > 2  # what it would be


async def test_negative_budgets_give_nothing_back() -> None:
    admission = fair(limit=8)
    for _ in range(3):
        (await admission.enter(make_call("a", output=-(10**15)))).leave()
    tenant = next(iter(admission.tenants))
    assert tenant.deficit <= QUANTUM
    tenant.charge(cost := tenant.cost(make_call("a", output=-(10**15))), cost)
    assert cost > 0 and tenant.deficit < QUANTUM


def test_tenants_that_are_gone_have_no_share_and_take_no_memory() -> None:
    admission = fair(limit=64)

    async def main() -> None:
        for number in range(100):
            (await admission.enter(make_call(f"tenant {number}"))).leave()
            await asyncio.sleep(1)

    simulate(main())
    assert admission._active_weight == len(admission._active) <= 11
