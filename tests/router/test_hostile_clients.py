"""Hostile clients: what could be read in two ways is refused; nobody gets another's answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random

import orjson
import pytest

from radixlm.entrypoints.http.root_path import VERSIONED
from radixlm.router.answer import json_answer
from radixlm.router.call import Call
from radixlm.router.client_stream import ClientStream
from radixlm.router.data_routes import DATA_ROUTES
from radixlm.router.http_server import HttpServer, Limits
from tests.router.client import Connection, exchange
from tests.router.conftest import StartWorkers
from tests.router.front import Front
from tests.router.hostile import (
    conversation,
    garbled,
    path_of,
    readings,
    split_answers,
    split_strictly,
)
from tests.router.mock_answers import Seen
from tests.router.mock_worker import MockWorker

HONEST = b"POST /v1/chat/completions?honest HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b"


@pytest.fixture(autouse=True)
def _short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixlm.router.http_server.LINGER_S", 0.001)


async def send_in_pieces(url: str, data: bytes, draw: random.Random, seen: list[Seen]) -> bytes:
    """All that comes back for ``data``, sent in one or several pieces: until the connection ends,
    or nothing comes any more and all that the worker has ``seen`` is answered."""
    answer = b""
    cuts = sorted(draw.randrange(len(data)) for _ in range(draw.choice((0, 0, 1, 3))))
    async with Connection(url) as connection:
        try:
            for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
                if connection.writer.transport.is_closing():
                    break
                connection.writer.write(data[start:end])
                await asyncio.sleep(0)
            for _ in range(200):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.03):
                        while part := await connection.reader.read(1 << 16):
                            answer += part
                    break
                if answer.count(b"HTTP/1.1 200") >= len(seen):
                    break
        except ConnectionError:
            pass
    return answer


def with_version(target: bytes) -> bytes:
    """The target that the gateway sends: OpenAI's routes have /v1."""
    path = target.partition(b"?")[0].decode("latin-1")
    return b"/v1" + target if path in VERSIONED else target


async def attack(front: Front, worker: MockWorker, seed: int) -> tuple[int, int]:
    """One hostile conversation; the numbers of its requests that were served and refused."""
    data = conversation(seed)
    worker.seen.clear()
    answers = split_answers(await send_in_pieces(front.url, data, random.Random(seed), worker.seen))
    served = [(seen.target.encode("latin-1"), seen.body) for seen in worker.seen]
    read = [
        (with_version(path_of(target)), body)
        for method, target, body in readings(data)
        if method == b"POST"
    ]
    read = [one for one in read if one[0].partition(b"?")[0].decode("latin-1") in DATA_ROUTES]
    assert served == read[: len(served)], (seed, data, served, read)
    statuses = [status for status, _ in answers]
    bodies = [orjson.loads(body) for status, body in answers if status == 200 and body]
    assert len(bodies) == len(served), (seed, statuses, served)
    assert not {500, 502, 503, 504} & set(statuses), (seed, statuses)
    numbers = [int(body["id"].partition("-")[2]) for body in bodies]
    assert numbers == sorted(numbers)
    return len(served), len(answers) - len(served)


async def honest(front: Front, number: int) -> None:
    """A request that is well formed gets its own answer."""
    body = b'{"n":%d}' % number
    data = HONEST % (len(body), body)
    answer = await exchange(front.url, data.replace(b"Host", b"Connection: close\r\nHost", 1), 5)
    ((status, content),) = split_answers(answer)
    assert status == 200 and orjson.loads(content)["echo"] == {"n": number}


class Pipe:
    """A transport without a socket."""

    def __init__(self) -> None:
        self.sent, self.is_over = b"", False

    def write(self, data: bytes) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return self.is_over

    def close(self) -> None:
        self.is_over = True

    abort = close

    def get_extra_info(self, name: str) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def served(parts: list[bytes]) -> tuple[list[tuple[str, str, str, bytes]], bytes]:
    """The calls that a server makes of ``parts``, and its answers."""
    calls: list[tuple[str, str, str, bytes]] = []

    async def serve(call: Call, client: ClientStream) -> None:
        calls.append((call.method, call.path, call.query, call.body))
        client.answer(json_answer({"n": len(calls)}))

    server, pipe = HttpServer(serve, Limits()), Pipe()
    connection = server.make()
    connection.connection_made(pipe)  # type: ignore[arg-type]
    for part in parts:
        if not pipe.is_over:
            connection.data_received(part)
    for _ in range(8):
        await asyncio.sleep(0)
    connection.connection_lost(None)
    return calls, pipe.sent


async def test_it_does_not_matter_how_requests_are_cut_into_packets() -> None:
    """Whole, byte by byte, and in random pieces: the same calls and the same answers."""
    num_calls = 0
    for seed in range(250):
        data, draw = conversation(seed), random.Random(seed)
        data = garbled(draw, data) if seed % 2 else data
        if len(data) > 10_000:
            continue
        cuts = sorted(draw.randrange(len(data)) for _ in range(5))
        pieces = [data[i:j] for i, j in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        whole = await served([data])
        num_calls += len(whole[0])
        assert await served([bytes([byte]) for byte in data]) == whole, (seed, data)
        assert await served([piece for piece in pieces if piece]) == whole, (seed, data)
    assert num_calls > 100


@pytest.mark.parametrize("offer", [b"", b"Upgrade: h2c\r\nConnection: Upgrade\r\n"])
async def test_large_bodies_have_a_limit_together(offer: bytes) -> None:
    async def serve(call: Call, client: ClientStream) -> None:
        client.answer(json_answer({"n": len(call.body)}))

    server = HttpServer(serve, Limits(max_held_bytes=5 << 20))
    pipes = [Pipe() for _ in range(3)]
    connections = [server.make() for _ in pipes]
    head = b"POST /x HTTP/1.1\r\nHost: a\r\n" + offer + b"Content-Length: 2097152\r\n\r\n"
    half = b"x" * (1 << 20)
    for connection, pipe in zip(connections, pipes, strict=True):
        connection.connection_made(pipe)  # type: ignore[arg-type]
        connection.data_received(head + half + half[1:])
    assert b" 503 " in pipes[2].sent
    assert not pipes[0].sent and not pipes[1].sent
    connections[0].data_received(b"x")
    for _ in range(8):
        await asyncio.sleep(0)
    assert b'{"n":2097152}' in pipes[0].sent
    for connection in connections:
        connection.connection_lost(None)
    assert server.num_held_bytes == 0


async def test_thousands_of_offers_to_upgrade_in_one_packet() -> None:
    """They are requests like others; no depth of calls grows with them."""
    one = b"POST /a HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n"
    data = (one + b"Content-Length: 1\r\n\r\n{" + one + b"\r\n") * 2000
    calls, _ = await served([data])
    assert len(calls) > 1 and calls[:2] == [("POST", "/a", "", b"{"), ("POST", "/a", "", b"")]


async def run(start_workers: StartWorkers, seeds: range, caplog: pytest.LogCaptureFixture) -> None:
    (worker,) = await start_workers(1)
    async with Front([worker]) as front:
        num_served = num_refused = 0
        for seed in seeds:
            served, refused = await attack(front, worker, seed)
            num_served, num_refused = num_served + served, num_refused + refused
            await honest(front, seed)
            if seed % 50 == 0:
                for raw in worker.raw:
                    split_strictly(raw)
        assert worker.num_malformed == 0 and num_served and num_refused
        assert front.is_idle
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_hostile_requests(
    start_workers: StartWorkers, caplog: pytest.LogCaptureFixture
) -> None:
    """As h11 reads them, or not at all; the worker sees only strict requests; answers are in order
    and the next client gets its own."""
    await run(start_workers, range(400), caplog)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
async def test_ten_thousand_hostile_requests(
    start_workers: StartWorkers, part: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The long form."""
    await run(start_workers, range(500 * (part + 1), 500 * (part + 2)), caplog)
