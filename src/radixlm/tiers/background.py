"""A daemon thread for work that nobody waits for, or waits for with a limit."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

from radixlm.base.cores import num_cores

log = logging.getLogger(__name__)

LOW_PRIORITY = 10
"""Niceness of work behind the steps: beside busy threads about a tenth of a core."""
_EXPANDERS: Final = 4  # threads, at most
_SHARE: Final = 0.005  # of the process's cores, for long work while other threads are busy
_QUIET: Final = 0.1  # of a core: threads that use less are idle
_MAX_REST_S: Final = 0.5


def make_expanders() -> ThreadPoolExecutor:
    """Threads of a tier that expand compressed pages side by side, started when they are needed."""
    return ThreadPoolExecutor(min(_EXPANDERS, num_cores()), "radixlm-tier-expand")


def be_nice(niceness: int) -> None:
    """Give the calling thread a niceness of its own, where the system has that (Linux)."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


class Background:
    """One thread, started with the first work, which is done in order. ``max_waiting``: pieces of
    work that may wait; more is refused."""

    def __init__(self, name: str, nice: int = 0, max_waiting: int = 0) -> None:
        self._name, self._nice = name, nice
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(max_waiting)
        self._thread: threading.Thread | None = None
        self._is_closed, self._is_closing = False, threading.Event()
        self._mark = (0.0, 0.0, 0.0)  # when ``rest`` was called: the clock, CPU of all, own CPU

    def submit(self, work: Callable[[], None]) -> bool:
        """Do ``work`` later; False if too much waits, or after ``close``."""
        if self._is_closed:
            return False
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        with suppress(queue.Full):
            self._queue.put_nowait(work)
            return True
        return False

    def drain(self, limit_s: float) -> bool:
        """Wait until what was submitted so far is done; False after ``limit_s``."""
        done, until_s = threading.Event(), time.monotonic() + limit_s
        while self._thread is not None and not self.submit(done.set):
            if self._is_closed or time.monotonic() >= until_s:
                return False
            done.wait(0.01)
        return self._thread is None or done.wait(max(0.0, until_s - time.monotonic()))

    def rest(self) -> bool:
        """Whether to go on: False after ``close``. To be called by long work between its parts: a
        pause while the process is busy, so that this thread gets ``_SHARE`` of its cores. Niceness
        does not give that: a step waits for the slowest thread of its team, and a real-time process
        has no niceness."""
        now = time.monotonic(), time.process_time(), time.thread_time()
        passed_s, all_s, own_s = (b - a for a, b in zip(self._mark, now, strict=True))
        self._mark = now
        if all_s - own_s > _QUIET * passed_s:
            share = _SHARE * num_cores()
            self._is_closing.wait(min(_MAX_REST_S, own_s / share))
        return not self._is_closing.is_set()

    def close(self, limit_s: float) -> None:
        """End the thread when what waits is done; after ``limit_s`` it is left behind."""
        self._is_closing.set()
        self.drain(limit_s)
        self._is_closed = True
        if self._thread is not None:
            with suppress(queue.Full):
                self._queue.put_nowait(None)
            self._thread.join(limit_s)

    def _run(self) -> None:
        be_nice(self._nice)
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception:
                log.exception("%s", self._name)
