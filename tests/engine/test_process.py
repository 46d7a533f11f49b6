"""An engine process that starts before its configuration is known."""

from __future__ import annotations

import errno
import sys
import threading
from pathlib import Path

import psutil
import pytest

from radixlm.engine import process
from radixlm.engine.process import (
    EngineProcess,
    prestart_engines,
    running_pids,
    take_engine_process,
)

ECHO = "import json, sys; sys.exit(json.load(sys.stdin)['end'])"


@pytest.fixture(autouse=True)
def _echo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        EngineProcess.__init__, "__defaults__", ((sys.executable, "-S", "-c", ECHO),)
    )
    monkeypatch.setattr(process, "_prestarted", [])


async def test_the_configuration_comes_later() -> None:
    prestart_engines(2)
    early = list(process._prestarted)
    for end in (3, 4):
        taken = take_engine_process()
        assert taken in early and taken.returncode is None
        taken.send_config({"end": end})
        assert await taken.wait() == end == taken.returncode
    new = take_engine_process()
    assert new not in early
    new.send_config({"end": 5})
    assert await new.wait() == 5


async def test_threads_wait_passively_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    found = "'GOMP_SPINCOUNT'] == '7' and os.environ['OMP_WAIT_POLICY'] == 'PASSIVE'"
    told = EngineProcess((sys.executable, "-S", "-c", f"import os; assert os.environ[{found}"))
    told.send_config({})
    assert await told.wait() == 0


async def test_a_configuration_for_a_dead_process_is_ignored() -> None:
    dead = EngineProcess()
    dead.kill()
    assert await dead.wait() < 0
    dead.send_config({"end": 0})


async def test_running_processes_are_listed() -> None:
    process = EngineProcess()
    assert process.pid in running_pids()
    process.drop()
    assert process.pid not in running_pids()


async def test_an_unused_process_ends() -> None:
    prestart_engines(1)
    (left,) = process._prestarted
    process.kill_prestarted()
    assert not process._prestarted
    assert await left.wait() < 0
    left.send_config({})


async def test_a_process_that_cannot_be_watched_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def no_thread(thread: threading.Thread) -> None:
        started.append(next(p.pid for p in psutil.Process().children() if p.pid not in before))
        raise RuntimeError("can't start new thread")

    before = {p.pid for p in psutil.Process().children()}
    monkeypatch.setattr(process.threading.Thread, "start", no_thread)
    with pytest.raises(OSError, match="can't start new thread") as caught:
        EngineProcess()
    assert caught.value.errno == errno.EAGAIN
    assert started and not psutil.pid_exists(started[0])


async def test_without_room_no_process_is_prestarted(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(process.subprocess, "Popen", full)
        prestart_engines(2)
    assert process._prestarted == []


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's choice is Linux's")
async def test_without_memory_the_kernel_ends_the_engine_and_not_the_server() -> None:
    """What the engine forks has the same score."""
    path = Path("/proc/self/oom_score_adj")
    mine = int(path.read_text())
    score = "int(open('/proc/self/oom_score_adj').read())"
    code = f"import os, sys; sys.stdin.read(); pid = os.fork(); found = {score} == {mine} + 200; "
    code += "os._exit(not found) if not pid else sys.exit(os.waitpid(pid, 0)[1] or not found)"
    child = EngineProcess((sys.executable, "-S", "-c", code))
    child.send_config({})
    assert await child.wait() == 0 and int(path.read_text()) == mine


async def test_an_engine_starts_where_scores_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(path: Path, text: str) -> int:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "write_text", refuse)
    child = EngineProcess()
    child.send_config({"end": 7})
    assert await child.wait() == 7
