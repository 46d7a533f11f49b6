"""Every row of `ATTACKS` against one real server: refused with a 4xx within two seconds, or
answered without what it must not have. The server answers the next request, and its memory does not
grow."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from radixlm.engine.model_info import ASSETS, DEFAULT_MODEL
from tests.chaos.hostile_requests import ATTACKS, Attack
from tests.end_to_end.server import RunningServer
from tests.fakes.http_server import scripted_server

pytestmark = pytest.mark.skipif(
    not (ASSETS / DEFAULT_MODEL / "config.json").is_file(), reason="the bundled model is not here"
)
LIMIT_S = 2.0
WORK_S = 0.04  # time of `slowness` on the machine where the limit was set


def slowness() -> float:
    """How much slower this machine is at the moment."""
    began_s = time.thread_time()
    table: dict[int, int] = {}
    for number in range(300_000):
        table[number % 997] = table.get(number % 997, 0) + number
    return (time.thread_time() - began_s) / WORK_S


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer("--max-total-tokens", "4096") as running:
        yield running


def strike(server: RunningServer, attack: Attack) -> tuple[httpx.Response, float]:
    """The answer and its seconds. On a busy machine the seconds are the server's CPU
    time. A request that is never answered runs into the client's limit."""
    body = attack.make()
    began_s, worked_s = time.monotonic(), cpu_s(server)
    try:
        answer = server.client.request(
            attack.method, attack.path, content=body, headers=attack.headers
        )
    except httpx.WriteError:  # refused before all was sent; the socket was closed
        answer = httpx.Response(413)
    took_s = time.monotonic() - began_s
    return answer, min(took_s, cpu_s(server) - worked_s)


def processes(server: RunningServer) -> list[psutil.Process]:
    family = psutil.Process(server.process.pid)
    return [family, *family.children(recursive=True)]


def cpu_s(server: RunningServer) -> float:
    total_s = 0.0
    for process in processes(server):
        with suppress(psutil.NoSuchProcess):  # a trial of a grammar has ended meanwhile
            times = process.cpu_times()
            total_s += times.user + times.system
    return total_s


def rss_bytes(server: RunningServer) -> int:
    total = 0
    for process in processes(server):
        with suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


def answers(server: RunningServer) -> bool:
    params = {"max_new_tokens": 2, "temperature": 0}
    return server.post("/generate", text="a", sampling_params=params).status_code == 200


def test_the_table_is_long_enough() -> None:
    names = [attack.name for attack in ATTACKS]
    assert len(names) == len(set(names)) and len(names) >= 32


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_refused_at_once(server: RunningServer, attack: Attack) -> None:
    answer, took_s = strike(server, attack)
    status, text = answer.status_code, answer.text
    assert answer.headers.get("X-RadixLM-Ignored", "") == attack.ignored
    if attack.is_answered:
        assert status == 200, (status, text[:500])
    else:
        assert 400 <= status < 500, (status, text[:500])
    if attack.ignored:  # what it asks for is not in the answer
        meta = answer.json()["meta_info"]
        assert meta["completion_tokens"] <= 4 and not any("logprob" in key for key in meta)
    if attack.foreign_model:
        assert answer.json()["model"] == DEFAULT_MODEL and attack.foreign_model not in text
    assert took_s < LIMIT_S or took_s < LIMIT_S * slowness(), took_s
    assert len(text) < 5000
    assert answers(server)


async def test_strict_flags_refuse_what_is_ignored(toy_folder: Path) -> None:
    harmless = [attack for attack in ATTACKS if attack.is_answered]
    assert len(harmless) == 3
    strict = {"unknown_fields": "refuse", "strict_model_name": True}
    async with scripted_server(toy_folder, {}, **strict) as made:
        for attack in harmless:
            body = attack.make()
            assert isinstance(body, bytes)
            got = await made.client.post(attack.path, content=body, headers=attack.headers)
            assert got.status_code == (400 if attack.ignored else 404), got.text
            assert (attack.ignored or attack.foreign_model) in got.json()["error"]["message"]
            assert "X-RadixLM-Ignored" not in got.headers
            assert not made.engine.intake.requests


def test_memory_stays(server: RunningServer) -> None:
    """Memory grows in the first round only. Both rounds are in this test, because the tests above
    may use the server of another worker."""
    for attack in ATTACKS:
        strike(server, attack)
    growths: list[float] = []
    # a leak grows in every round; memory kept by another thread of the pool appears once
    while len(growths) < 4 and (not growths or growths[-1] > 0.02):
        before = rss_bytes(server)
        slowest = max((strike(server, attack)[1], attack.name) for attack in ATTACKS)
        assert answers(server)
        growths.append(rss_bytes(server) / before - 1)
        print(f"\n{len(ATTACKS)} attacks: slowest {slowest[1]!r} {slowest[0]:.2f} s")
    assert growths[-1] <= 0.02, growths


def test_half_a_header_blocks_no_other_client(server: RunningServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        for _ in range(100):
            held = stack.enter_context(socket.create_connection((host, int(port))))
            held.sendall(b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
        began_s = time.monotonic()
        assert answers(server)
        assert time.monotonic() - began_s < 45  # half a header may take up to a minute


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\nX: " + b"a" * (4 << 20), b" 400 "),
        (b"GET /" + b"a" * (4 << 20), b" 400 "),
        (b"POST /generate HTTP/1.1\r\n" + b"X: a\r\n" * 100_000, b" 400 "),
        (b"POST /generate HTTP/1.1\r\nContent-Length: 104857600\r\n\r\n{", b" 413 "),
    ],
    ids=["a header", "an address", "headers", "a body"],
)
def test_bodies_without_end_are_refused(server: RunningServer, head: bytes, status: bytes) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as held:
        try:
            held.sendall(head)
            answer = held.recv(40)
        except (ConnectionResetError, BrokenPipeError):  # refused before all was sent
            answer = status
    assert status in answer
    assert answers(server)
