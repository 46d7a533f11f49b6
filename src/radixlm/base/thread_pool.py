"""FairThreadPool: threads for one kind of blocking work, shared fairly between clients.

Work that may block for long (a fetch, a disk, a decoder) has a pool of its own kind, so that it
never takes the threads of other work. The default pool of asyncio would be shared by all.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

from radixlm.base.errors import Overloaded

T = TypeVar("T")
Key = tuple[str, ...]


class FairThreadPool:
    """A bounded pool that an event loop uses. Calls have a key: the client, and possibly what of
    it they are about. Calls beyond a key's limits wait; free threads go round the keys that wait.
    """

    def __init__(
        self, name: str, num_threads: int, limits: tuple[int, ...], max_waiting: int = 1024
    ) -> None:
        """``name``: what the calls do, for error messages and thread names. ``limits``: calls
        that run at once with the same client, with the same client and second part, and so on.
        ``max_waiting``: calls of one client that may wait."""
        self._name, self._num_threads = name, num_threads
        self._limits, self._max_waiting = limits, max_waiting
        self._executor: ThreadPoolExecutor | None = None
        self._running: Counter[Key] = Counter()  # by each beginning of the keys
        self._num_waiting: Counter[str] = Counter()  # by client
        self._waiting: OrderedDict[Key, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(self, key: Key, function: Callable[..., T], *args: Any) -> T:
        """Call ``function`` in a thread; ``key`` has a part for each limit. Overloaded if too many
        calls of the client wait."""
        assert len(key) == len(self._limits)
        loop = asyncio.get_running_loop()
        await self._acquire(key, loop)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._num_threads, f"{self._name} ")
        try:
            work: Future[T] = self._executor.submit(copy_context().run, function, *args)
        except BaseException:
            self._release(key)
            raise

        def ended(_: Any) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._release, key)

        # a caller that is cancelled leaves its thread behind: it counts until the call ends
        work.add_done_callback(ended)
        return await asyncio.wrap_future(work)

    async def _acquire(self, key: Key, loop: asyncio.AbstractEventLoop) -> None:
        if key not in self._waiting and self._has_place(key):
            self._count(key, 1)
            return
        if self._num_waiting[key[0]] >= self._max_waiting:
            raise Overloaded(
                f"{self._max_waiting} {self._name} of this client wait already; try again later"
            )
        turn = loop.create_future()
        self._waiting.setdefault(key, deque()).append(turn)
        self._num_waiting[key[0]] += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn came at the same time
                self._release(key)
            else:
                self._forget(key, turn)
            raise

    def _has_place(self, key: Key) -> bool:
        if self._running[()] >= self._num_threads:
            return False
        parts = enumerate(self._limits, 1)
        return all(self._running[key[:length]] < limit for length, limit in parts)

    def _count(self, key: Key, change: int) -> None:
        for length in range(len(key) + 1):
            self._running[key[:length]] += change
            if not self._running[key[:length]]:
                del self._running[key[:length]]

    def _release(self, key: Key) -> None:
        self._count(key, -1)
        while (name := next(filter(self._has_place, self._waiting), None)) is not None:
            turn = self._waiting[name][0]
            self._waiting.move_to_end(name)
            self._forget(name, turn)
            self._count(name, 1)
            turn.set_result(None)

    def _forget(self, key: Key, turn: asyncio.Future[None]) -> None:
        """Take a call out of those that wait."""
        queue = self._waiting[key]
        queue.remove(turn)
        if not queue:
            del self._waiting[key]
        self._num_waiting[key[0]] -= 1
        if not self._num_waiting[key[0]]:
            del self._num_waiting[key[0]]
