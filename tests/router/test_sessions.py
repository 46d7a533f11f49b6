"""A session lives in one worker, which gets all of its requests, also of a pair."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from radixlm.router import sessions
from radixlm.router.worker import State
from tests.router.client import Response, ask
from tests.router.conftest import StartWorkers
from tests.router.front import Front
from tests.router.test_pd import PdFront, bodies

NAME = b'"s1"'
OPENED = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(NAME)}\r\n\r\n"


async def opened(front: Front) -> None:
    """Open a session s1 at one of the workers."""
    mock = ("x-mock", orjson.dumps({"raw": OPENED + NAME.decode()}).decode())
    answer = await ask(front.url, "POST", "/open_session", {"capacity_of_str_len": 9}, [mock])
    assert answer.body == NAME


async def turn(front: Front, **fields: Any) -> Response:
    return await ask(
        front.url, "POST", "/generate", {"text": "a", "session_params": {"id": "s1"}, **fields}
    )


async def test_all_requests_of_a_session_go_to_its_worker(start_workers: StartWorkers) -> None:
    workers = await start_workers(3)
    async with Front(workers) as front:
        sessions.attach(front.gateway)
        await opened(front)
        (holder,) = [worker for worker in workers if worker.seen]
        for stream in (False, True):
            assert [(await turn(front, stream=stream)).status for _ in range(4)] == [200] * 4
        batch = {"session_params": [{"id": "s1"}, {"id": "s1"}], "text": ["a", "b"]}
        assert (await turn(front, **batch)).status == 200
        assert len(holder.seen) == 10
        closed = await ask(front.url, "POST", "/close_session", {"session_id": "s1"})
        assert closed.status == 200 and len(holder.seen) == 11


@pytest.mark.parametrize("named", [{}, {"session_id": "mine"}])
async def test_another_gateway_finds_a_session(
    start_workers: StartWorkers, named: dict[str, str]
) -> None:
    """One that was started later, or serves the same workers; the id alone tells the worker."""
    workers = await start_workers(4)
    async with Front(workers) as front, Front(workers[::-1]) as other:
        for one in (front, other):
            sessions.attach(one.gateway)
        for _ in range(6):
            body = {"capacity_of_str_len": 9, **named}
            opened = (await ask(front.url, "POST", "/open_session", body)).json
            name = opened["echo"]["session_id"]  # as the worker was told
            assert name == named.get("session_id", name)
            params = {"text": "a", "session_params": {"id": name}}
            answer = await ask(other.url, "POST", "/generate", params)
            assert answer.header(b"x-worker-id") == opened["worker_id"].encode()
            closed = await ask(other.url, "POST", "/close_session", {"session_id": name})
            assert closed.json["worker_id"] == opened["worker_id"]
    assert named or len([worker for worker in workers if worker.seen]) > 1, "they are spread"


async def test_a_session_is_opened_at_a_worker_that_is_there(start_workers: StartWorkers) -> None:
    workers = await start_workers(2)
    async with Front(workers) as front:
        sessions.attach(front.gateway)
        front.gateway.registry.move(front.workers[0], State.UNHEALTHY)
        for number in range(8):
            body = {"capacity_of_str_len": 9, "session_id": f"s{number}"}
            assert (await ask(front.url, "POST", "/open_session", body)).status == 200
    assert len(workers[1].seen) == 8


async def test_pairs_leave_a_session_to_its_decode_worker(start_workers: StartWorkers) -> None:
    prefill, one, two = await start_workers(3)
    async with PdFront([prefill], [one, two]) as front:
        sessions.attach(front.gateway)
        await opened(front)
        holder = one if one.seen else two
        assert [(await turn(front)).status for _ in range(3)] == [200] * 3
    assert not prefill.seen and len(holder.seen) == 4
    assert all("bootstrap_room" not in body for body in bodies(holder))


async def test_nobody_stands_in_for_a_lost_worker(start_workers: StartWorkers) -> None:
    workers = await start_workers(2)
    async with Front(workers, disable_retries=True) as front:
        sessions.attach(front.gateway)
        await opened(front)
        (number,) = [n for n, worker in enumerate(workers) if worker.seen]
        front.gateway.registry.move(front.workers[number], State.UNHEALTHY)
        assert (await turn(front)).status == 503 and not workers[1 - number].seen


async def test_a_session_is_that_of_its_key(
    start_workers: StartWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Front(await start_workers(1)) as front:
        sessions.attach(front.gateway)
        await opened(front)
        held = front.gateway.sessions._held
        monkeypatch.setitem(held, "s1", (held["s1"][0], "another"))
        answer = await turn(front)
        assert answer.status == 400 and "no session 's1'" in answer.body.decode()
