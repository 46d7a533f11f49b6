"""Servers that the gateway has started: one that ends is started again."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any
from unittest.mock import Mock

import pytest

from radixlm.router import server_supervisor
from radixlm.router.options import Options
from radixlm.router.registry import Registry
from radixlm.router.server_supervisor import Supervisor
from radixlm.router.worker import State

URLS = ("http://127.0.0.1:31000", "http://127.0.0.1:31500")


class Bench:
    """A supervisor of two servers, whose processes and clock are made up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.started: list[str] = []
        self.sent: list[tuple[int, int]] = []
        monkeypatch.setattr(server_supervisor.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(os, "killpg", lambda pid, number: self.sent.append((pid, number)))
        self.stop = Mock()
        self.gateway = Mock(is_draining=False)
        self.registry = self.gateway.registry = Registry(Options(), Mock())
        monkeypatch.setattr(self.registry, "spawn", lambda work: work.close())
        self.supervisor = Supervisor()
        for url in URLS:
            self.supervisor.launch(url, lambda url=url: self.start(url))
        self.supervisor.attach(self.gateway, self.stop)
        self.first = self.supervisor.servers[0]
        for one in self.supervisor.servers:
            self.registry.add(server_supervisor.Worker(one.url))

    def start(self, url: str) -> Any:
        self.started.append(url)
        return Mock(pid=len(self.started), is_alive=lambda: True)

    def serve(self) -> None:
        """All servers have joined."""
        for worker in self.registry:
            self.registry.move(worker, State.READY)

    def end(self, status: int, server: Any = None) -> None:
        """The process of a server ends."""
        process = (server or self.first).process
        process.is_alive, process.exitcode = lambda: False, status
        self.supervisor.tick()

    def wait(self) -> float:
        """How long until the next start, in seconds."""
        began_s, num = self.now_s, len(self.started)
        while len(self.started) == num:
            assert self.now_s < began_s + 200
            self.supervisor.tick()
            self.now_s += 0.125  # exact in binary
        return self.now_s - 0.125 - began_s


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_a_server_that_ends_is_started_again_ever_later(bench: Bench) -> None:
    bench.serve()
    waits = []
    for status in (-9, 1, 0, -11, 1, 1, 1, 1):
        bench.end(status)
        waits.append(bench.wait())
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    assert bench.started == [*URLS, *[URLS[0]] * 8]
    assert (1, signal.SIGKILL) in bench.sent, "its children are ended"
    bench.now_s += 60
    bench.end(-9)
    assert bench.wait() == 0, "it has lived long"
    bench.end(-9)
    assert bench.wait() == 1


def test_a_worker_that_was_removed_joins_again(bench: Bench) -> None:
    bench.serve()
    (worker,) = bench.registry.find(URLS[0])
    bench.registry.remove(worker)
    bench.end(-9)
    bench.wait()
    assert [one.state for one in bench.registry.find(URLS[0])] == [State.JOINING]
    assert len(bench.registry) == 2


def test_servers_that_cannot_start_end_the_gateway(bench: Bench) -> None:
    bench.end(2)
    assert not bench.registry.find(URLS[0])
    assert len(bench.started) == 2 and not bench.stop.called
    bench.end(-9, bench.supervisor.servers[0])  # a signal may come from outside
    bench.wait()
    bench.end(2, bench.supervisor.servers[0])
    assert bench.stop.called and bench.supervisor.status == 2


async def test_a_server_is_told_to_restart(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_supervisor, "POLL_S", 0.0)
    bench.serve()
    assert not await bench.supervisor.restart("http://127.0.0.1:1")
    restart = asyncio.ensure_future(bench.supervisor.restart(URLS[1]))
    await asyncio.sleep(0)
    assert bench.sent == [(2, signal.SIGTERM)]
    bench.end(0, bench.supervisor.servers[1])
    assert not restart.done()
    assert bench.wait() == 0
    assert await restart
    assert bench.started == [*URLS, URLS[1]]


def test_a_start_that_fails_is_tried_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.serve()
    bench.now_s += 60
    with monkeypatch.context() as patch:
        patch.setattr(bench, "start", Mock(side_effect=OSError("no room")))
        bench.end(-9)
        for wait_s in (0, 1, 2):
            bench.now_s += wait_s
            bench.supervisor.tick()
        assert bench.start.call_count == 3  # type: ignore[attr-defined]
    assert bench.wait() == 4


def test_nothing_is_started_while_the_gateway_ends(bench: Bench) -> None:
    bench.gateway.is_draining = True
    bench.end(0)
    assert bench.first.due_s is None and len(bench.started) == 2
