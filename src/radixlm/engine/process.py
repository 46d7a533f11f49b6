"""The engine process as its keeper holds it. It may be started before its orders are known, so
that it imports what it needs while the server reads its options."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

# OpenMP reads these when it is loaded: a short spin hands over between two kernels, then threads
# sleep, so that an idle server uses no core and busy neighbours are not slowed by spinning
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "20000"}
COMMAND = (sys.executable, "-m", "radixlm.engine.worker")

_waiting: list[EngineProcess] = []


class EngineProcess:
    """One process, awaited in an event loop."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        environment = {**WAITING, **os.environ}
        # a group of its own: Ctrl-C in a terminal is for the server, which ends its engine
        self._popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, env=environment, process_group=0
        )
        self.pid = self._popen.pid
        self.send_signal, self.kill = self._popen.send_signal, self._popen.kill

    def give(self, order: dict[str, Any]) -> None:
        """Tell the process, as JSON on its standard input, what it is to be. Given once."""
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._popen.stdin as stdin:  # it may have died
            stdin.write(json.dumps(order).encode())

    @property
    def returncode(self) -> int | None:
        """The exit status, minus the number of the signal that ended it; None while it runs."""
        return self._popen.poll()

    async def wait(self) -> int:
        """Until the process has ended: its status."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def watch() -> None:
            self._popen.wait()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(ended.set)

        # of the system's ways to hear of an end, a thread that waits is the one that all have
        threading.Thread(target=watch, name="engine process", daemon=True).start()
        await ended.wait()
        return self._popen.wait()


def prestart_engines(count: int) -> None:
    """Start ``count`` engine processes that ``take_engine_process`` will hand out; what nobody has
    taken
    ends with this process."""
    if not _waiting:
        atexit.register(_end_waiting)
    _waiting.extend(EngineProcess() for _ in range(count))


def take_engine_process() -> EngineProcess:
    """An engine process without orders: one started early, or a new one."""
    return _waiting.pop() if _waiting else EngineProcess()


def _end_waiting() -> None:
    while _waiting:
        _waiting.pop().kill()
