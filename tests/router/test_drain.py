"""Drains and rolling restarts of mock workers: no stream is lost, and none is told twice."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from radixlm.router import drain, rolling
from radixlm.router.worker import State, Worker, WorkerType
from tests.router.client import Response, ask
from tests.router.conftest import StartWorkers
from tests.router.front import Front
from tests.router.mock_worker import MockWorker

LIMIT_S = 20.0
NUM_EVENTS = 40
Fronts = Callable[..., Awaitable[Front]]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "RETURN_POLL_S", 0.01)
    monkeypatch.setattr(drain, "RETRY_S", 0.01)
    monkeypatch.setattr(rolling, "POLL_S", 0.01)
    monkeypatch.setattr(rolling, "NOTICE_S", 0.05)


@pytest.fixture
async def front_of() -> AsyncIterator[Fronts]:
    """A gateway with drains in front of workers."""
    fronts: list[Front] = []

    async def make(workers: list[MockWorker], **options: Any) -> Front:
        front = Front([], **options)
        drain.attach(front.gateway)
        rolling.attach(front.gateway)
        front.workers = [front.join(Worker(worker.url)) for worker in workers]
        fronts.append(await front.__aenter__())
        return front

    yield make
    for front in fronts:
        await front.__aexit__()


async def until(condition: Callable[[], object]) -> None:
    """Wait until something is true, at most LIMIT_S."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.005)


def texts(answers: list[Response]) -> set[tuple[int, bool, str, int]]:
    """What a client sees of each."""
    return {(one.status, one.is_complete, one.text, len(one.events)) for one in answers}


async def undisturbed(front: Front) -> Response:
    return await front.chat(stream=True, max_tokens=NUM_EVENTS)


def streams(front: Front, number: int) -> list[asyncio.Task[Response]]:
    chat = (front.chat(stream=True, max_tokens=NUM_EVENTS) for _ in range(number))
    return [asyncio.create_task(one) for one in chat]


async def test_a_drained_worker_hands_its_streams_over(
    start_workers: StartWorkers, front_of: Fronts
) -> None:
    first, second = await start_workers(2, gap_s=0.01)
    front = await front_of([first, second])
    expected = texts([await undisturbed(front)])
    tasks = streams(front, 8)
    worker = front.workers[0]
    await until(lambda: len(worker.streams) == 4)
    route = f"/workers/{worker.id}/drain"
    answer = await ask(front.url, "POST", route, {"deadline_s": 0.05, "timeout_s": 10})
    assert answer.status == 200
    assert answer.json | {"seconds": 0} == {
        "status": "drained", "worker_id": worker.id, "url": first.url, "moved": 4, "left": 0,
        "seconds": 0,
    }  # fmt: skip
    assert worker.state is State.DRAINING and not first.num_inflight
    assert texts(await asyncio.gather(*tasks)) == expected
    assert second.num_resumed == 4
    seen = len(first.seen)
    await front.chat()
    assert len(first.seen) == seen  # it gets nothing new
    assert (await ask(front.url, "DELETE", route)).json == {"status": "ready"}
    assert worker.state is State.READY


@pytest.mark.parametrize("fields", [{"move": False}, {"deadline_s": 60}])
async def test_streams_stay_where_they_may_end(
    start_workers: StartWorkers, front_of: Fronts, fields: dict[str, Any]
) -> None:
    workers = await start_workers(2, gap_s=0.005)
    front = await front_of(workers, drain_deadline_secs=0.0)
    tasks = streams(front, 4)
    worker = front.workers[0]
    await until(lambda: len(worker.streams) == 2)
    answer = await ask(front.url, "POST", f"/workers/{worker.id}/drain", fields)
    assert (answer.json["moved"], answer.json["left"]) == (0, 0)
    assert all(one.is_complete for one in await asyncio.gather(*tasks))
    assert not workers[1].num_resumed


async def test_the_last_worker_keeps_its_streams(
    start_workers: StartWorkers, front_of: Fronts
) -> None:
    front = await front_of(await start_workers(1, gap_s=0.01))
    (task,) = streams(front, 1)
    worker = front.workers[0]
    await until(lambda: worker.streams)
    body = {"deadline_s": 0, "timeout_s": 0.1}
    answer = await ask(front.url, "POST", f"/workers/{worker.id}/drain", body)
    assert (answer.json["status"], answer.json["left"]) == ("draining", 1)
    assert (await task).is_complete


async def test_a_worker_that_shuts_down_is_seen_at_once_and_taken_back(
    start_workers: StartWorkers, front_of: Fronts
) -> None:
    first, second = await start_workers(2, gap_s=0.01, holds_ready=True)
    front = await front_of([first, second])
    expected = texts([await undisturbed(front)])
    tasks = streams(front, 6)
    worker = front.workers[0]
    await until(lambda: len(worker.streams) == 3)
    first.leaving.set()  # SIGTERM
    await until(lambda: worker.state is State.DRAINING and not worker.num_inflight)
    assert not all(task.done() for task in tasks)
    await first.kill()
    assert texts(await asyncio.gather(*tasks)) == expected
    first.leaving.clear()
    await first.start()
    await until(lambda: worker.state is State.READY)
    seen = len(first.seen)
    for _ in range(2):
        await front.chat()
    assert len(first.seen) > seen


async def test_a_broken_connection_alone_is_no_restart(
    start_workers: StartWorkers, front_of: Fronts
) -> None:
    first, second = await start_workers(2, holds_ready=True)
    first.info = {"uptime_s": 3600.0}
    front = await front_of([first, second])
    worker = front.workers[0]
    await until(lambda: first.connections)
    route = f"/workers/{worker.id}/drain"
    assert (await ask(front.url, "POST", route)).json["status"] == "drained"
    for connection in list(first.connections):
        connection.cut(reset=True)
    await until(lambda: "uptime_s" in worker.facts)  # it was looked at
    assert worker.state is State.DRAINING
    await first.kill()
    first.info = {"uptime_s": 0.0}
    await first.start()
    await until(lambda: worker.state is State.READY)


async def test_a_worker_that_dies_without_traffic_is_told_of(
    start_workers: StartWorkers, front_of: Fronts
) -> None:
    first, second = await start_workers(2, holds_ready=True)
    front = await front_of([first, second])
    await until(lambda: first.connections)
    await first.kill()
    await until(lambda: front.outcomes(first))
    assert front.outcomes(first)[0] == "unreachable"
    assert not front.outcomes(second)


@pytest.mark.parametrize(
    "field, value", [("deadline_s", -1), ("deadline_s", "30"), ("timeout_s", True), ("move", 1)]
)
async def test_fields_are_checked(front_of: Fronts, field: str, value: object) -> None:
    front = await front_of([])
    answer = await ask(front.url, "POST", "/workers/x/drain", {field: value})
    assert answer.status == 400 and answer.json["error"]["param"] == field


async def test_a_worker_that_joins_cannot_be_drained(front_of: Fronts) -> None:
    front = await front_of([])
    worker = front.gateway.registry.add(Worker("http://127.0.0.1:1"))
    answer = await ask(front.url, "POST", f"/workers/{worker.id}/drain", {})
    assert answer.status == 400 and "DELETE" in answer.json["error"]["message"]
    assert worker.state is State.JOINING


# rolling restarts


class Restarts:
    """A command that asks this process to restart the mock worker at $WORKER_PORT."""

    def __init__(self, workers: list[MockWorker]) -> None:
        self.workers = {worker.port: worker for worker in workers}
        self.order: list[int] = []

    async def serve(self) -> str:
        self.server = await asyncio.start_server(self._restart, "127.0.0.1", 0)
        port = self.server.sockets[0].getsockname()[1]
        program = "import os,socket;s=socket.create_connection(('127.0.0.1',%d),20);"
        program += "s.sendall(os.environ['WORKER_PORT'].encode()+b'\\n');s.recv(1)"
        return f'python -S -c "{program % port}"'

    async def _restart(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.restart(int(await reader.readline()))
        writer.close()

    async def restart(self, port: int) -> None:
        worker = self.workers[port]
        assert not worker.num_inflight, "it was restarted amid an answer"
        self.order.append(worker.port)
        worker.leaving.set()
        await worker.kill()
        await asyncio.sleep(0.03)
        worker.leaving.clear()
        await worker.start()


@pytest.mark.parametrize("holds_ready", [True, False])
async def test_a_rolling_restart_loses_nothing(
    start_workers: StartWorkers, front_of: Fronts, holds_ready: bool
) -> None:
    workers = await start_workers(4, gap_s=0.02, holds_ready=holds_ready)
    restarts = Restarts(workers)
    command = await restarts.serve()
    front = await front_of(workers, rolling=command, drain_deadline_secs=0.0)
    expected = texts([await undisturbed(front)])
    tasks = streams(front, 64)
    await until(lambda: sum(len(one.streams) for one in front.workers) == 64)
    assert (await ask(front.url, "POST", "/rolling_restart")).status == 202
    assert (await ask(front.url, "POST", "/rolling_restart")).status == 409

    while (report := (await ask(front.url, "GET", "/rolling_restart")).json)["todo"]:
        assert report["status"] == "running", report
        tasks += streams(front, 1)
        await asyncio.sleep(0.02)
    await until(lambda: all(one.state is State.READY for one in front.workers))
    assert report["done"] == [one.url for one in front.workers]
    assert sorted(restarts.order) == sorted(restarts.workers)
    assert texts(await asyncio.gather(*tasks)) == expected
    assert sum(one.num_resumed for one in workers) >= 16
    restarts.server.close()


async def test_a_hangup_starts_a_rolling_restart(
    start_workers: StartWorkers, front_of: Fronts
) -> None:
    front = await front_of(await start_workers(2), rolling="true")
    signal.raise_signal(signal.SIGHUP)
    async with asyncio.timeout(LIMIT_S):
        while (await ask(front.url, "GET", "/rolling_restart")).json["status"] != "done":
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "command, reason", [("exit 3", "ended with status 3"), ("sleep 9", "did not end within 1 s")]
)
async def test_a_failed_command_stops_the_roll(
    start_workers: StartWorkers, front_of: Fronts, command: str, reason: str
) -> None:
    workers = await start_workers(2)
    front = await front_of(workers, rolling=command, worker_startup_timeout_secs=1)
    assert (await ask(front.url, "POST", "/rolling_restart")).status == 202
    route = "/rolling_restart"
    async with asyncio.timeout(LIMIT_S):
        while (report := (await ask(front.url, "GET", route)).json)["status"] == "running":
            await asyncio.sleep(0.01)
    assert report["status"] == "failed" and reason in report["reason"]
    assert report["todo"] == [one.url for one in front.workers]
    await until(lambda: all(one.state is State.READY for one in front.workers))


async def test_a_command_that_cannot_start_stops_the_roll(
    start_workers: StartWorkers, front_of: Fronts, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = AsyncMock(side_effect=OSError("no more processes"))
    monkeypatch.setattr(asyncio, "create_subprocess_shell", refused)
    front = await front_of(await start_workers(2), rolling="true")
    await ask(front.url, "POST", "/rolling_restart")
    async with asyncio.timeout(LIMIT_S):
        while (await ask(front.url, "GET", "/rolling_restart")).json["status"] != "failed":
            await asyncio.sleep(0.01)
    await until(lambda: all(one.state is State.READY for one in front.workers))


async def test_a_command_that_restarts_nothing_is_done_when_the_worker_answers(
    start_workers: StartWorkers, front_of: Fronts
) -> None:
    front = await front_of(await start_workers(2), rolling="true")
    await ask(front.url, "POST", "/rolling_restart")
    async with asyncio.timeout(LIMIT_S):
        while (await ask(front.url, "GET", "/rolling_restart")).json["status"] != "done":
            await asyncio.sleep(0.01)
    assert all(one.state is State.READY for one in front.workers)


async def test_servers_of_the_gateway_roll_without_a_command(
    start_workers: StartWorkers, front_of: Fronts
) -> None:
    workers = await start_workers(2)
    front = await front_of(workers)
    restarts = Restarts(workers)

    async def restart(url: str) -> bool:
        await restarts.restart(int(url.rpartition(":")[2]))
        return True

    front.gateway.servers = SimpleNamespace(restart=restart)
    assert (await ask(front.url, "POST", "/rolling_restart")).status == 202
    async with asyncio.timeout(LIMIT_S):
        while (await ask(front.url, "GET", "/rolling_restart")).json["status"] != "done":
            await asyncio.sleep(0.01)
    assert sorted(restarts.order) == sorted(restarts.workers)


async def test_a_pair_rolls_while_its_other_half_computes_alone(
    start_workers: StartWorkers, front_of: Fronts
) -> None:
    front = await front_of(await start_workers(2), rolling="true")
    kinds: tuple[WorkerType, WorkerType] = ("prefill", "decode")
    for worker, kind in zip(front.workers, kinds, strict=True):
        worker.worker_type = kind
        front.gateway.registry.changed(worker)
    assert (await ask(front.url, "POST", "/rolling_restart")).status == 202
    async with asyncio.timeout(LIMIT_S):
        while (await ask(front.url, "GET", "/rolling_restart")).json["status"] != "done":
            await asyncio.sleep(0.01)


async def test_what_cannot_roll_is_refused(start_workers: StartWorkers, front_of: Fronts) -> None:
    alone = await front_of(await start_workers(1), rolling="true")
    answer = await ask(alone.url, "POST", "/rolling_restart")
    assert answer.status == 409 and "the only one of its kind" in answer.json["error"]["message"]
    plain = await front_of(await start_workers(2))
    answer = await ask(plain.url, "POST", "/rolling_restart")
    assert answer.status == 409 and "--rolling" in answer.json["error"]["message"]
