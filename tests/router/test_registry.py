"""Registry: joining, pools, models, ranks; what listeners are told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from radixlm.base.errors import InvalidRequest, TransferError
from radixlm.router.call import Call
from radixlm.router.options import Options
from radixlm.router.policies.pools import Pools
from radixlm.router.registry import Registry, worker_of
from radixlm.router.worker import State, Worker
from radixlm.router.workers_api import shown
from tests.router.fakes import Servers, joined, until

A, B, C = "http://a:1", "http://b:2", "http://c:3"


def _registry(servers: Servers, **options: object) -> Registry:
    return Registry(Options(**options), servers.fetch)  # type: ignore[arg-type]


async def test_a_worker_joins_with_its_facts() -> None:
    servers = Servers()
    servers.up(A, served_model_name="qwen", tp_size=2)
    registry, told = _registry(servers, api_key="k"), []
    registry.listen(lambda event, worker: told.append((event, worker.state)))
    worker = registry.add(Worker(A + "/"))
    assert worker.state is State.JOINING and registry.pool("qwen") == []
    await joined(registry, worker)
    assert (worker.model_id, worker.facts["tp_size"], worker.url) == ("qwen", 2, A)
    assert registry.pool("qwen") == registry.pool("another") == registry.pool(None) == [worker]
    assert registry.models() == ["qwen"] and told == [("joined", State.READY)]
    assert {key for *_, key in servers.asked} == {"k"}
    assert registry.add(Worker(A)) is worker and len(registry) == 1
    registry.remove(worker)
    assert told[1:] == [("left", State.GONE)] and registry.pool(None) == []


async def test_old_servers_and_foreign_ones_join() -> None:
    servers = Servers()
    servers.answers[A, "/health"] = {}
    servers.answers[A, "/get_server_info"] = {"model_path": "old"}
    servers.answers[B, "/health"] = {}
    servers.answers[B, "/v1/models"] = {"data": [{"id": "vllm-model"}]}
    servers.answers[C, "/health"] = b"<html>"
    registry = _registry(servers)
    workers = [registry.add(Worker(url)) for url in (A, B, C)]
    await joined(registry, *workers)
    assert [one.model_id for one in workers] == ["old", "vllm-model", "unknown"]


async def test_a_late_server_joins_and_a_request_may_wait_for_it() -> None:
    servers = Servers()
    registry = _registry(servers)
    worker = registry.add(Worker(A))
    waiting = asyncio.create_task(registry.available(None, timeout_s=5))
    await until(lambda: bool(registry.problem(worker)))
    assert "refused" in registry.problem(worker)
    servers.up(A)
    assert await waiting == [worker]
    registry.remove(worker)
    assert await registry.available(None, timeout_s=5) == []


async def test_a_server_that_never_answers_is_given_up() -> None:
    registry = _registry(Servers(), worker_startup_timeout_secs=0)
    worker = registry.add(Worker(A))
    await until(lambda: worker.state is State.GONE)
    assert "refused" in registry.failed[worker.id][1] and len(registry) == 0


async def test_without_health_checks_a_worker_is_ready_at_once() -> None:
    registry = _registry(Servers(), disable_health_check=True)
    worker = registry.add(Worker(A))
    await joined(registry, worker)
    assert worker.is_available and worker.model_id == "unknown"


async def test_each_rank_is_a_worker() -> None:
    servers = Servers()
    servers.up(A, dp_size=3)
    registry = _registry(servers, dp_aware=True)
    first = registry.add(Worker(A))
    await joined(registry, first)
    assert [one.name for one in registry.pool(None)] == [f"{A}@0", f"{A}@1", f"{A}@2"]
    assert registry.find(A) == list(registry) and registry.find(f"{A}@1")[0].dp_rank == 1
    assert registry.add(Worker(f"{A}@2")) in registry and len(registry) == 3


@pytest.mark.parametrize(
    "facts",
    [
        {"served_model_name": ["a"], "dp_size": "2"},
        {"served_model_name": 7, "dp_size": 10**9, "model_path": {}},
        {"dp_size": -1, "max_running_requests": "many"},
    ],
)
async def test_odd_facts_do_no_harm(facts: dict[str, object]) -> None:
    servers = Servers()
    servers.up(A, **facts)
    servers.answers[A, "/model_info"] = ["no object"]
    servers.answers[A, "/v1/models"] = {"data": [{"id": 3}, "x", None, {"id": "good"}]}
    registry = _registry(servers, dp_aware=True)
    worker = registry.add(Worker(A))
    await joined(registry, worker)
    assert registry.pool("good") == registry.pool("x") == [worker]
    assert shown(worker)["model_id"] and registry.models()


async def test_work_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise KeyError("odd")

    _registry(Servers()).spawn(fail())
    await until(lambda: "work for a worker failed" in caplog.text)


async def test_several_models_each_have_their_workers() -> None:
    servers = Servers()
    servers.up(A, served_model_name="x")
    servers.up(B, served_model_name="y")
    servers.answers[B, "/v1/models"] = {"data": [{"id": "y"}, {"id": "adapter"}]}
    registry = _registry(servers, enable_igw=True)
    a, b = registry.add(Worker(A)), registry.add(Worker(B))
    await joined(registry, a, b)
    assert registry.pool("x") == [a] and registry.pool("adapter") == registry.pool("y:other") == [b]
    assert registry.pool("z") == [] and not registry.knows("z") and registry.knows("x")
    registry.move(a, State.UNHEALTHY)
    assert registry.pool("x") == [] and registry.knows("x") and registry.models() == ["y"]


async def test_models_are_told_apart_without_the_flag_too() -> None:
    servers = Servers()
    servers.up(A, served_model_name="x")
    servers.up(B, served_model_name="y")
    servers.answers[C, "/health"] = {}  # tells no model
    registry = _registry(servers)
    a, c = registry.add(Worker(A)), registry.add(Worker(C))
    await joined(registry, a, c)
    assert not registry.is_mixed
    b = registry.add(Worker(B))
    await joined(registry, b)
    assert registry.is_mixed and registry.knows("z")
    assert registry.pool("x") == [a, c] and registry.pool("y") == [b, c]
    assert registry.pool("z") == registry.pool(None) == [a, c, b]


async def test_a_server_that_comes_back_with_another_model_serves_that_one() -> None:
    servers = Servers()
    servers.up(A, served_model_name="x", dp_size=2)
    servers.up(B, served_model_name="x")
    registry = _registry(servers, enable_igw=True, dp_aware=True, policy="prefix_hash")
    pools = Pools(registry.options)
    registry.listen(pools.on_worker)
    a, b = registry.add(Worker(A)), registry.add(Worker(B, model_id="mine"))
    await joined(registry, a, b)
    for url in (A, B):
        servers.up(url, served_model_name="y", dp_size=2)
    await registry.learn(a)
    await registry.learn(b)
    ranks = registry.find(A)
    assert [one.model_id for one in (*ranks, b)] == ["y", "y", "mine"]
    assert registry.pool("x") == [] and registry.pool("y") == [a, b, ranks[1]]
    call = Call("POST", "/generate", "", [], b'{"text": "hello"}')
    assert pools.of(a).choose(call, ranks) in ranks  # the new model's policy knows them
    for path in ("/server_info", "/model_info", "/v1/models"):
        servers.answers[A, path] = 500
    await registry.learn(a)
    assert a.model_id == "y"


@pytest.mark.parametrize("answer", [503, TransferError("no whole answer in time")])
@pytest.mark.parametrize("path", ["/server_info", "/model_info", "/v1/models"])
async def test_facts_that_a_busy_server_does_not_tell_stand(path: str, answer: Any) -> None:
    servers = Servers()
    servers.up(A, served_model_name="x", resume_digest="d")
    servers.answers[A, "/v1/models"] = {"data": [{"id": "x"}, {"id": "adapter"}]}
    registry = _registry(servers, enable_igw=True)
    worker = registry.add(Worker(A))
    await joined(registry, worker)
    before = worker.facts
    servers.answers[A, path] = answer
    await registry.learn(worker)
    assert worker.facts == before and registry.pool("adapter") == [worker]
    del servers.answers[A, path]  # 404: it has no such route any more
    await registry.learn(worker)
    assert worker.facts != before


async def test_a_server_that_does_not_tell_its_facts_yet_is_asked_again() -> None:
    servers = Servers()
    servers.up(A, served_model_name="x")
    servers.answers[A, "/v1/models"] = TransferError("no whole answer in time")
    registry = _registry(servers)
    worker = registry.add(Worker(A))
    await until(lambda: bool(registry.problem(worker)))
    assert worker.state is State.JOINING
    servers.answers[A, "/v1/models"] = {"data": [{"id": "x"}, {"id": "adapter"}]}
    await joined(registry, worker)
    assert worker.facts["models"] == ["x", "adapter"]


async def test_types_have_pools_of_their_own() -> None:
    servers = Servers()
    servers.up(A)
    servers.up(B)
    registry = _registry(servers)
    a = registry.add(Worker(A, worker_type="prefill", bootstrap_port=9))
    b = registry.add(Worker(B, worker_type="decode"))
    await joined(registry, a, b)
    assert (registry.pool(None, "prefill"), registry.pool(None, "decode")) == ([a], [b])
    assert registry.pool(None) == []


@pytest.mark.parametrize("url", ["nope", "http://a..b:1", f"http://{'a' * 64}:1", "http://a:1@²"])
async def test_a_bad_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="http") as error:
        _registry(Servers()).add(Worker(url))
    assert error.value.param == "url"


async def test_a_listener_that_fails_keeps_nobody_from_being_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    servers, told = Servers(), []
    servers.up(A, dp_size=2)
    registry = _registry(servers, dp_aware=True)
    registry.listen(lambda event, worker: worker.facts["none"])
    registry.listen(lambda event, worker: told.append(worker.name))
    await joined(registry, registry.add(Worker(A)))
    assert told == [f"{A}@0", f"{A}@1"] and "a listener failed" in caplog.text


async def test_a_worker_removed_while_it_joins_leaves_nothing() -> None:
    registry = _registry(Servers())
    worker = registry.add(Worker(A))
    await asyncio.sleep(0)  # it is being asked
    registry.remove(worker)
    await until(lambda: not registry._tasks)
    assert not registry._problems and not registry.failed


async def test_long_names_of_models_are_not_kept() -> None:
    registry = _registry(Servers())
    for number in range(9):
        assert registry.pool(f"{number}" * 2000) == []
    assert not registry._pools and registry.pool("short") == [] and registry._pools


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "url"),
        ({"url": 3}, "url"),
        ({"url": A, "priority": "x"}, "priority"),
        ({"url": A, "cost": True}, "cost"),
        ({"url": A, "labels": {"a": 1}}, "labels"),
        ({"url": A, "worker_type": "odd"}, "worker_type"),
        ({"url": A, "bootstrap_port": 1.5}, "bootstrap_port"),
        ({"url": A, "api_key": "k\r\nx: y"}, "api_key"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        worker_of(fields)
    assert error.value.param == param


async def test_the_health_check_may_have_a_port_of_its_own() -> None:
    servers = Servers()
    servers.up(A)
    servers.answers["http://a:9", "/health"] = {}
    registry = _registry(servers, health_check_port=9)
    await joined(registry, registry.add(Worker(A)))
    assert ("http://a:9", "GET", "/health", None) in servers.asked
