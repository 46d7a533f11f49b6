"""Calls that may hang or fail: each kind of call has a thread and a deadline; a breaker stops
asking a store that fails."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from radixlm.base.errors import TransferError

T = TypeVar("T")
MAX_FAILURES: Final = 5
WINDOW_S: Final = 10.0


class StillBusy(TransferError):
    """A call that passed its deadline has not ended yet."""


class Lane:
    """One daemon thread for one kind of call. A call that passes its deadline is left behind, with
    the buffers that it was given; until it ends, others are refused."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._lock, self._last = threading.Lock(), Future[Any]()
        self._last.set_result(None)
        self._thread: threading.Thread | None = None

    def call(self, work: Callable[[], T], deadline_s: float) -> T:
        """The result of ``work``, or what it raised; TimeoutError, StillBusy."""
        end_s = time.monotonic() + deadline_s
        if not self._lock.acquire(timeout=deadline_s):
            raise StillBusy(f"{self._name}: other callers wait")
        try:
            if not self._last.done():
                raise StillBusy(f"{self._name}: an earlier call has not ended")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._last = future = Future[T]()
            self._queue.put((future, work))
            return future.result(max(0.0, end_s - time.monotonic()))
        finally:
            self._lock.release()

    def close(self, limit_s: float) -> None:
        """End the thread, if its call ends within the limit."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(limit_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            future, work = item
            try:
                future.set_result(work())
            except BaseException as error:  # the caller's, whatever a library raises
                future.set_exception(error)
            del item, future, work  # buffers


class Breaker:
    """Open for WINDOW_S after ``max_failures`` within WINDOW_S; then one call tries whether the
    store is back, and closes it or keeps it open twice as long, but at most ``max_pause_s``. What
    fails again within that time goes on with the longer pause."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        max_failures: int = MAX_FAILURES,
        max_pause_s: float = WINDOW_S,
    ) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._failures: deque[float] = deque(maxlen=max_failures)
        self._max_failures, self._max_pause_s = max_failures, max_pause_s
        self._pause_s, self._open_until, self._closed_s = WINDOW_S, 0.0, float("-inf")

    @property
    def is_open(self) -> bool:
        return self._clock() < self._open_until

    def allows(self) -> bool:
        """Whether a call may be made; the first one after an opening is the trial."""
        with self._lock:
            if self.is_open:
                return False
            if self._open_until:
                self._open_until = self._clock() + self._pause_s
            return True

    def note(self, is_good: bool) -> None:
        """How a call ended."""
        with self._lock:
            now = self._clock()
            if is_good:
                if self._open_until:
                    self._failures.clear()
                    self._closed_s = now
                self._open_until = 0.0
                return
            self._failures.append(now)
            is_full = len(self._failures) == self._max_failures
            if self._open_until or (is_full and now - self._failures[0] <= WINDOW_S):
                is_new = not self._open_until and now - self._closed_s > self._max_pause_s
                self._pause_s = WINDOW_S if is_new else min(2 * self._pause_s, self._max_pause_s)
                self._open_until = now + self._pause_s
