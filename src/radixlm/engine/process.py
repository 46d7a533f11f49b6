"""EngineProcess: the engine's process as the server sees it. It can be started before its options
are known, so that it imports torch while the server reads them.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import json
import os
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from weakref import WeakSet

import psutil

from radixlm.engine.rank_processes import COMMAND, OPENMP_ENVIRONMENT

_prestarted: list[EngineProcess] = []
_started: WeakSet[EngineProcess] = WeakSet()
# added to the engine's /proc/PID/oom_score_adj: where memory runs out, thousandths of it by which
# the engine counts as larger. The kernel then ends the engine, whose requests go on in the next
# one, and not the server that holds them
OOM_SCORE = 200


class EngineProcess:
    """One engine process, awaited in an event loop."""

    def __init__(
        self, command: Sequence[str] = COMMAND, *, descriptors: Sequence[int] = ()
    ) -> None:
        """Start it with ``descriptors`` open; OSError if the system has no descriptors, processes
        or memory for it."""
        environment = {**OPENMP_ENVIRONMENT, **os.environ}
        # a process group of its own: Ctrl-C in a terminal is for the server, which ends its engine
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            env=environment,
            process_group=0,
            pass_fds=descriptors,
        )
        self.pid = self._popen.pid
        _make_first_victim(self.pid)
        _started.add(self)
        self.send_signal, self.kill = self._popen.send_signal, self._popen.kill
        self._ended: Future[int] = Future()
        self._ended.set_running_or_notify_cancel()  # so that nobody who waits can cancel it
        try:
            # a waiting thread is the one way to notice the end that all systems have
            threading.Thread(target=self._watch, name="engine process", daemon=True).start()
        except RuntimeError as error:  # no more threads: say so while a restart can be tried again
            self._popen.kill()
            self._popen.communicate()  # closes its input and waits for its end
            raise OSError(errno.EAGAIN, f"{error}") from error

    def _watch(self) -> None:
        self._ended.set_result(self._popen.wait())

    def send_config(self, config: dict[str, Any]) -> None:
        """Send the startup config as JSON on the process's standard input; once only."""
        assert self._popen.stdin is not None
        if self._popen.stdin.closed:  # it was dropped
            return
        with contextlib.suppress(BrokenPipeError), self._popen.stdin as stdin:  # it may have ended
            stdin.write(json.dumps(config).encode())

    @property
    def returncode(self) -> int | None:
        """The exit status, minus the number of the signal that ended it; None while it runs."""
        return self._popen.poll()

    def drop(self, wait_s: float = 0.0) -> int:
        """Kill the process unless it ends within the time; its exit status."""
        with contextlib.suppress(TimeoutError):
            return self._ended.result(wait_s)
        self.kill()
        if self._popen.stdin is not None:
            self._popen.stdin.close()
        return self._ended.result()

    async def wait(self) -> int:
        """Wait for the end of the process; its exit status."""
        return await asyncio.wrap_future(self._ended)


def _make_first_victim(pid: int) -> None:
    """Have the kernel end the process, or what it forks, before this one if memory runs out."""
    with contextlib.suppress(OSError, ValueError):  # not Linux, or it has ended
        mine = int(Path("/proc/self/oom_score_adj").read_text())
        score = min(1000, mine + OOM_SCORE)
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(score))


def prestart_engines(count: int) -> None:
    """Start ``count`` engine processes for ``take_engine_process``; the rest end with this
    process. Fewer, if the system has no room for them: the supervisor tries again."""
    if not _prestarted:
        atexit.register(kill_prestarted)
    with contextlib.suppress(OSError):
        for _ in range(count):
            _prestarted.append(EngineProcess())


def take_engine_process() -> EngineProcess:
    """An engine process without a startup config: a prestarted one, or a new one."""
    return _prestarted.pop() if _prestarted else EngineProcess()


def kill_prestarted() -> None:
    """End the engine processes that nobody has taken."""
    while _prestarted:
        _prestarted.pop().drop()


def running_pids() -> list[int]:
    """Of the engine processes that this program has started and that run, and of those that they
    have started."""
    pids = []
    for process in _started:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.returncode is None:
                children = psutil.Process(process.pid).children(recursive=True)
                pids += [process.pid, *(child.pid for child in children)]
    return pids
