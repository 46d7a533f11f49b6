"""The decisions of the engine supervisor; the engines here are small processes that each fail in
one way."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from radixlm.base.errors import ConfigError
from radixlm.config.server_config import ServerConfig
from radixlm.engine import supervisor as module
from radixlm.engine.launch import ThreadEngine
from radixlm.engine.process import EngineProcess
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
        self.over = asyncio.Event()
        config = ServerConfig.from_kwargs(model_path="x", **options)
        self.supervisor = EngineSupervisor(config, frozenset())
        monkeypatch.setattr(self.supervisor, "_spawn", self._spawn)
        self.num_started = 0

    def _spawn(self) -> None:
        self.num_started += 1
        self.supervisor.process = EngineProcess((sys.executable, "-S", "-c", self.code))
        self.supervisor.process.send_config({})

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        self.over.set()

    async def run(self) -> str:
        watcher = EngineListener(self.lost.append, self._give_up, lambda: self.beat_s)
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


def test_an_engine_inside_a_program_has_no_replicas() -> None:
    config = ServerConfig.from_kwargs(model_path="x", dp_size=2)
    info: Any = None
    with pytest.raises(ConfigError, match="--dp-size 2"):
        ThreadEngine(config, info, None)


async def test_the_configuration_has_no_secrets_and_shares_the_cores(tmp_path: Path) -> None:
    given = {"model_path": "x", "dp_size": 3, "api_key": "sesame", "cpu_threads": 8}
    config = ServerConfig.from_kwargs(**given)
    options = module._sendable(config, frozenset())
    assert options["cpu_threads"] == 2 and "api_key" not in options
    assert module._sendable(config, frozenset({"cpu_threads"}))["cpu_threads"] == 8
