"""The decisions of the engine supervisor; the engines here are small processes that each fail in
one way."""

from __future__ import annotations

import asyncio
import errno
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from radixlm.config.server_config import ServerConfig
from radixlm.engine import supervisor as module
from radixlm.engine.process import EngineProcess
from radixlm.engine.restart_reserve import NUM_DESCRIPTORS
from radixlm.engine.supervisor import EngineListener, EngineSupervisor

SLEEP = "import time; time.sleep(600)"


class Case:
    """A supervisor whose engine is `code`, and its events."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: str, **options: Any) -> None:
        monkeypatch.setattr(module, "CHECK_S", 0.01)
        monkeypatch.setattr(module, "LAST_MESSAGE_S", 0.05)
        self.code = code
        self.beat_s = 0.0
        self.lost: list[str | None] = []
        self.reason: str | None = None
        self.reasons: list[str] = []
        self.over = asyncio.Event()
        config = ServerConfig.from_kwargs(model_path="x", **options)
        self.supervisor = EngineSupervisor(config, frozenset())
        monkeypatch.setattr(self.supervisor, "_spawn", self._spawn)
        self.num_started = 0

    def _spawn(self) -> None:
        self.num_started += 1
        self.supervisor.process = EngineProcess((sys.executable, "-S", "-c", self.code))
        self.supervisor.process.send_config({})

    def note_lost(self, rid: str | None, why: str) -> None:
        self.lost.append(rid)
        self.reasons.append(why)

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        self.over.set()

    async def run(self) -> str:
        watcher = EngineListener(self.note_lost, self._give_up, lambda: self.beat_s)
        await self.supervisor.start(watcher)
        try:
            await asyncio.wait_for(self.over.wait(), 60)
        finally:
            await self.supervisor.stop()
        assert self.reason is not None
        assert not self.supervisor.folder.exists()
        return self.reason


async def test_a_load_that_hangs_ends_with_the_flag(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case(monkeypatch, SLEEP, load_timeout_s=0.05)
    reason = await case.run()
    assert "0.05 s" in reason and "--load-timeout-s" in reason
    assert case.num_started == 1, "a second load would hang as the first"
    assert "has not loaded" in caplog.text


async def test_a_load_that_hangs_after_a_death_counts_as_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(monkeypatch, SLEEP, load_timeout_s=0.05, max_engine_restarts=2)
    case.supervisor._has_served = True
    reason = await case.run()
    assert "died 3 times" in reason and "--max-engine-restarts is 2" in reason
    assert case.num_started == 3 and len(case.lost) == 3


@pytest.mark.parametrize(
    ("code", "num_started", "says"),
    [
        ("raise SystemExit(2)", 1, "refused to start"),
        ("raise SystemExit(3)", 1, "exit code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 4, "memory runs out"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGABRT)", 4, "SIGABRT"),
    ],
)
async def test_restarts_are_limited(
    monkeypatch: pytest.MonkeyPatch, code: str, num_started: int, says: str
) -> None:
    case = Case(monkeypatch, code)
    assert says in await case.run()
    assert case.num_started == num_started


class Spawns:
    """Replaces ``_spawn``: each call fails with the next of ``errors``, then processes start."""

    def __init__(self, case: Case, *errors: Exception) -> None:
        self.case, self.errors = case, list(errors)
        self.descriptors: list[int] = []  # that were reserved while the process was started

    def __call__(self) -> None:
        self.descriptors.append(len(self.case.supervisor._reserve._descriptors))
        if self.errors:
            raise self.errors.pop(0)
        self.case._spawn()


def _failing(
    case: Case, monkeypatch: pytest.MonkeyPatch, *errors: Exception
) -> tuple[Spawns, list[float]]:
    """Make starts fail; the pauses after them, which take no time."""
    spawns, pauses_s = Spawns(case, *errors), []
    monkeypatch.setattr(case.supervisor, "_spawn", spawns)

    async def pause(waiting: Any, timeout_s: float) -> None:
        waiting.close()
        pauses_s.append(timeout_s)

    monkeypatch.setattr(module.asyncio, "wait_for", pause)
    return spawns, pauses_s


NO_DESCRIPTORS = OSError(errno.EMFILE, "Too many open files")
NO_PROCESSES = OSError(errno.EAGAIN, "Resource temporarily unavailable")


async def test_starts_that_fail_are_tried_again_after_pauses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case(monkeypatch, "raise SystemExit(2)", max_engine_restarts=3)
    spawns, pauses_s = _failing(case, monkeypatch, NO_DESCRIPTORS, NO_PROCESSES, MemoryError())
    watcher = EngineListener(case.note_lost, case._give_up, lambda: 0.0)
    await case.supervisor.start(watcher)
    async with asyncio.timeout(60):  # ``wait_for`` may be the pauses' replacement
        await case.over.wait()
    assert "refused to start" in str(case.reason), "the fourth start gave a process"
    assert pauses_s[:3] == [1.0, 2.0, 4.0] and case.num_started == 1
    assert len(case.supervisor._deaths) == 3 and case.lost == []
    assert spawns.descriptors == [0] * 4, "the reserve is free while a process is started"
    assert len(case.supervisor._reserve._descriptors) == NUM_DESCRIPTORS
    assert caplog.text.count("no process could be started") == 3
    for text in ("Too many open files", "temporarily unavailable", "MemoryError"):
        assert text in caplog.text
    await case.supervisor.stop()
    assert case.supervisor._reserve._descriptors == []


async def test_a_restart_that_refuses_to_start_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Options and checkpoint were good: a disk may be gone for a while."""
    case = Case(monkeypatch, "raise SystemExit(2)", max_engine_restarts=3)
    case.supervisor._has_served = True
    _, pauses_s = _failing(case, monkeypatch)
    watcher = EngineListener(case.note_lost, case._give_up, lambda: 0.0)
    await case.supervisor.start(watcher)
    async with asyncio.timeout(60):  # ``wait_for`` may be the pauses' replacement
        await case.over.wait()
    reason = str(case.reason)
    assert "died 4 times" in reason and "refused to start again; its log says why" in reason
    assert pauses_s[:3] == [1.0, 2.0, 4.0] and case.num_started == 4
    assert case.lost == [] and case.supervisor.num_restarts == 4
    await case.supervisor.stop()


async def test_a_restart_that_cannot_be_started_ends_the_server_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    case = Case(monkeypatch, killed, max_engine_restarts=2)
    watcher = EngineListener(case.note_lost, case._give_up, lambda: 0.0)
    await case.supervisor.start(watcher)
    _failing(case, monkeypatch, *[NO_DESCRIPTORS] * 9)
    async with asyncio.timeout(60):  # ``wait_for`` may be the pauses' replacement
        await case.over.wait()
    assert "died 3 times" in str(case.reason) and "Too many open files" in str(case.reason)
    assert case.num_started == 1 and len(case.lost) == 1
    monkeypatch.undo()
    await case.supervisor.stop()


async def test_a_supervisor_that_fails_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case(monkeypatch, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")

    def fail(rid: str | None, why: str) -> None:
        raise ValueError("a listener's mistake")

    await case.supervisor.start(EngineListener(fail, case._give_up, lambda: 0.0))
    async with asyncio.timeout(60):  # ``wait_for`` may be the pauses' replacement
        await case.over.wait()
    assert "its supervisor ended (ValueError: a listener's mistake)" in str(case.reason)
    assert "Traceback" in caplog.text
    await case.supervisor.stop()


async def test_a_supervisor_that_is_cancelled_ends_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(monkeypatch, SLEEP)
    await case.supervisor.start(EngineListener(case.note_lost, case._give_up, lambda: 0.0))
    assert case.supervisor._task is not None
    case.supervisor._task.cancel()
    async with asyncio.timeout(60):  # ``wait_for`` may be the pauses' replacement
        await case.over.wait()
    assert "its supervisor ended (it was cancelled)" in str(case.reason)
    await case.supervisor.stop()


async def test_a_restart_may_load_five_times_as_long_as_the_first_and_30_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LOAD_MARGIN_S", 0.05)
    # long enough for Python itself: only the first process is meant to be seen as loaded
    case = Case(monkeypatch, SLEEP, max_engine_restarts=1, load_timeout_s=1800)
    assert case.supervisor._load_limit_s() == 1800
    beats_s = iter([0.0, time.monotonic()])

    def beat_s() -> float:
        """The first process loads and is then killed; the second hangs while it loads."""
        beat_s = next(beats_s, 0.0)
        if beat_s:
            assert case.supervisor.process is not None
            case.supervisor.process.kill()
        return beat_s

    await case.supervisor.start(EngineListener(case.note_lost, case._give_up, beat_s))
    async with asyncio.timeout(60):  # ``wait_for`` may be the pauses' replacement
        await case.over.wait()
    first_s = case.supervisor._longest_load_s
    assert 0 < first_s < 30
    assert case.supervisor._load_limit_s() == 5 * first_s + 0.05
    assert "died 2 times" in str(case.reason) and case.num_started == 2
    await case.supervisor.stop()


async def test_a_short_load_timeout_holds_for_restarts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Case(monkeypatch, SLEEP, load_timeout_s=20).supervisor
    supervisor._longest_load_s = 10.0
    assert supervisor._load_limit_s() == 20
    await supervisor.stop()


async def test_a_death_is_counted_against_a_request_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next process may die before it writes its own log of quarantined requests."""
    case = Case(monkeypatch, "import os, signal; os.kill(os.getpid(), signal.SIGABRT)")
    case.supervisor.inflight_log_path.write_bytes(b"suspect".ljust(1024, b"\0"))
    await case.run()
    assert case.lost == ["suspect", None, None, None]


async def test_a_log_that_cannot_be_deleted_blames_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk of the temporary folder has become read-only."""
    case = Case(monkeypatch, "import os, signal; os.kill(os.getpid(), signal.SIGABRT)")
    path = case.supervisor.inflight_log_path
    path.write_bytes(b"suspect".ljust(1024, b"\0"))
    unlink = Path.unlink

    def refused(self: Path, missing_ok: bool = False) -> None:
        if self == path:
            raise OSError(errno.EROFS, "Read-only file system")
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    assert "died 4 times" in await case.run()
    assert case.lost == ["suspect", None, None, None]


async def test_deaths_outside_the_window_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Case(monkeypatch, SLEEP, max_engine_restarts=1, restart_window_s=100).supervisor
    deaths_s = iter((0.0, 101.0, 202.0, 250.0))
    with monkeypatch.context() as patch:
        patch.setattr(module.time, "monotonic", lambda: next(deaths_s))
        found = [supervisor._may_restart() for _ in range(4)]
    assert found == [True, True, True, False]
    await supervisor.stop()


async def test_a_first_sigkill_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Case(monkeypatch, SLEEP).supervisor
    killed = -signal.SIGKILL
    assert supervisor._poison_rid(killed, "r") is None
    assert supervisor._poison_rid(killed, "r") == "r"
    assert supervisor._poison_rid(-signal.SIGSEGV, "s") == "s"
    await supervisor.stop()


async def test_a_silent_engine_is_killed_and_a_beating_one_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case(monkeypatch, SLEEP, watchdog_timeout=0.05, max_engine_restarts=0)
    case.beat_s = time.monotonic()
    reason = await case.run()
    assert "died 1 times" in reason and "no heartbeat from the engine" in caplog.text


@pytest.mark.parametrize(("num_late", "is_killed"), [(2, False), (3, True)])
async def test_a_server_that_stood_still_does_not_blame_its_engine(
    monkeypatch: pytest.MonkeyPatch, num_late: int, is_killed: bool
) -> None:
    """After a pause of its own the server reads old heartbeats before the fresh ones."""
    case = Case(monkeypatch, SLEEP, watchdog_timeout=300, max_engine_restarts=0)
    now_s = time.monotonic()
    late, fresh = [now_s - 301] * num_late, [now_s] * 3
    beats_s = iter([now_s, *late, *fresh])
    has_read_all = asyncio.Event()

    def beat_s() -> float:
        try:
            return next(beats_s)
        except StopIteration:
            has_read_all.set()
            return now_s

    await case.supervisor.start(EngineListener(case.note_lost, case._give_up, beat_s))
    waits = [asyncio.ensure_future(event.wait()) for event in (has_read_all, case.over)]
    async with asyncio.timeout(60):
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    assert case.over.is_set() == is_killed
    await case.supervisor.stop()


async def test_the_configuration_has_secrets_of_stores_only_and_shares_the_cores() -> None:
    store = {"hicache_storage_backend_extra_config": '{"directory": "/kv"}'}
    given = {"model_path": "x", "dp_size": 3, "api_key": "sesame", "cpu_threads": 8, **store}
    config = ServerConfig.from_kwargs(**given)
    options = module._sendable(config, frozenset())
    assert options["cpu_threads"] == 2 and "api_key" not in options
    assert store.items() <= options.items()
    assert module._sendable(config, frozenset({"cpu_threads"}))["cpu_threads"] == 8


@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        ({"dp_size": 3}, [0, 1, 2]),
        ({"dp_size": 3, "base_gpu_id": 1, "gpu_id_step": 2}, [1, 3, 5]),
        ({"dp_size": 2, "tp_size": 2, "pp_size": 2, "base_gpu_id": 1}, [1, 5]),
    ],
)
def test_each_replica_has_gpus_of_its_own(options: dict[str, Any], gpus: list[int]) -> None:
    config = ServerConfig.from_kwargs(model_path="x", **options)
    sent = [module._sendable(config, frozenset(), i) for i in range(config.parallel.dp_size)]
    assert [one["base_gpu_id"] for one in sent] == gpus
