"""Discovery by a file and by DNS."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from radixlm.base.errors import ConfigError
from radixlm.router.discovery import lists
from radixlm.router.discovery.lists import WorkerFile, workers_of
from radixlm.router.discovery.names import LOOKS, Names
from radixlm.router.discovery.source import Source
from radixlm.router.worker import Worker
from tests.router.discovery.fakes import FakeRegistry, gateway_of

A, B, C = "http://10.0.0.1:1", "http://10.0.0.2:1", "http://10.0.0.3:1"


@pytest.fixture
async def registry(monkeypatch: pytest.MonkeyPatch) -> FakeRegistry:
    monkeypatch.setattr(lists, "SETTLE_S", 0.0)
    return FakeRegistry()


def _source(registry: FakeRegistry, name: str = "file") -> Source:
    return Source(name, gateway_of(registry))


async def test_a_file_is_read_when_it_changes(registry: FakeRegistry, tmp_path: Path) -> None:
    path = tmp_path / "workers.txt"
    path.write_text(f"# workers\n{A}/\n\n{B} worker_type=prefill bootstrap_port=8998 cost=2.5  # b")
    file = WorkerFile(path, _source(registry))
    file.read()
    assert set(registry.workers) == {A, B}
    two = registry.workers[B]
    assert (two.worker_type, two.bootstrap_port, two.cost) == ("prefill", 8998, 2.5)
    one = registry.workers[A]
    path.write_text(f"{A}\n{C}\n")
    await file.look()
    assert set(registry.workers) == {A, C} and registry.workers[A] is one


async def test_a_file_that_is_being_written_is_not_read(
    registry: FakeRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "workers.txt"
    path.write_text(f"{A}\n{B}\n")
    file = WorkerFile(path, _source(registry))
    file.read()
    parts = ["", "http://10.0", f"{C}\n"]
    path.write_text(parts.pop(0))

    async def write(seconds: float) -> None:
        if parts:
            path.write_text(parts.pop(0))

    monkeypatch.setattr(lists.asyncio, "sleep", write)
    for _ in range(2):
        await file.look()
        assert set(registry.workers) == {A, B}
    await file.look()
    assert set(registry.workers) == {C}


async def test_what_is_told_of_a_worker_may_change(registry: FakeRegistry) -> None:
    source = _source(registry)
    source.sync({A: {"cost": 2.0, "model_id": "x"}, B: {}})
    one, two = registry.workers[A], registry.workers[B]
    two.priority = 9  # by an operator
    changed = {"worker_type": "prefill", "bootstrap_port": 8998, "model_id": "y"}
    source.sync({A: changed, B: {}})
    assert registry.workers == {A: one, B: two} and two.priority == 9
    assert (one.cost, one.worker_type, one.bootstrap_port) == (1.0, "prefill", 8998)
    assert (one.model_id, one.is_named) == ("y", True)


async def test_what_is_wrong_is_logged_and_the_workers_stay(
    registry: FakeRegistry, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "workers.txt"
    path.write_text(A)
    file = WorkerFile(path, _source(registry))
    file.read()
    path.write_text(f"{A}\nnonsense\n")
    for _ in range(3):
        await file.look()
    assert caplog.text.count("line 2") == 1
    path.unlink()
    for _ in range(3):
        await file.look()
    assert set(registry.workers) == {A} and len(caplog.records) == 2
    path.write_text(B)
    await file.look()
    assert set(registry.workers) == {B}


async def test_a_file_that_is_not_there_at_the_start(
    registry: FakeRegistry, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="--discovery-file"):
        WorkerFile(tmp_path / "none", _source(registry)).read()


async def test_a_worker_that_is_busy_is_drained_first(registry: FakeRegistry) -> None:
    gateway = gateway_of(registry)
    source, drainer = Source("file", gateway), gateway.drainer
    source.sync({A: {}, B: {}})
    for worker in registry.workers.values():
        worker.num_inflight = 1
    one, two = registry.workers[A], registry.workers[B]
    source.sync({})
    await asyncio.sleep(0)
    assert drainer.drained == [one, two] or drainer.drained == [two, one]
    assert set(registry.workers) == {A, B}
    source.sync({A: {}})  # it is found again
    assert drainer.cancelled == [one]
    drainer.ends.set()
    await asyncio.wait_for(asyncio.gather(*gateway.tasks), 10)
    assert registry.workers == {A: one}
    source.sync({})
    drainer.ends.set()
    await asyncio.wait_for(asyncio.gather(*gateway.tasks), 10)
    assert not registry.workers


@pytest.mark.parametrize("line", ["x", f"{A} cost=much", f"{A} color=red", f"{A} model_id="])
def test_wrong_lines_are_named(line: str) -> None:
    with pytest.raises(ConfigError, match="line 2"):
        workers_of(f"\n{line}", "f")


async def test_a_worker_that_was_there_stays(registry: FakeRegistry, tmp_path: Path) -> None:
    registry.add(Worker(A))
    path = tmp_path / "workers.txt"
    path.write_text(f"{A}\n{B}\n")
    file = WorkerFile(path, _source(registry))
    file.read()
    path.write_text("")
    await file.look()
    assert set(registry.workers) == {A}


async def test_names(registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, list[str] | Exception] = {"w": ["10.0.0.1", "10.0.0.2"], "v": ["fd00::1"]}

    async def getaddrinfo(host: str, port: int, **_: Any) -> Any:
        found = answers[host]
        if isinstance(found, Exception):
            raise found
        return [(socket.AF_INET, 1, 6, "", (address, port)) for address in found]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    answers["u"] = ["10.0.0.9"]
    names = Names(["w:1", "https://v:443", "u:1"], _source(registry, "dns"))
    await names.look()
    kept = {"https://[fd00::1]:443", "http://10.0.0.9:1"}
    assert set(registry.workers) == {A, B, *kept}
    answers["w"] = ["10.0.0.2", "10.0.0.3"]
    for _ in range(LOOKS - 1):
        await names.look()
        assert set(registry.workers) == {A, B, C, *kept}  # the answer may be a part
    await names.look()
    assert set(registry.workers) == {B, C, *kept}
    answers["u"] = OSError("no server")
    for _ in range(2 * LOOKS):
        await names.look()
    assert set(registry.workers) == {B, C, *kept}


@pytest.mark.parametrize("text", ["host", "host:", ":1", "ftp://host:1", "host:port"])
def test_wrong_names_are_told(text: str) -> None:
    with pytest.raises(ConfigError, match="--discovery-dns"):
        Names([text], None)  # type: ignore[arg-type]


async def test_a_numeric_address_needs_no_server(registry: FakeRegistry) -> None:
    names = Names(["127.0.0.1:1", "[::1]:2"], _source(registry, "dns"))
    await asyncio.wait_for(names.look(), 10)
    assert set(registry.workers) == {"http://127.0.0.1:1", "http://[::1]:2"}
