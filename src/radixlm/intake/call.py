"""Call: what one body of a client asks for. Its sequences are sent to the engine in slices, so that
a large body does not keep the requests of others waiting."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar

ROUTING_HEADER = b"x-smg-routing-key"
_numbers = itertools.count(1)
_current: ContextVar[Call | None] = ContextVar("call", default=None)


class Call:
    """``client``: who sent the body, as far as clients can be told apart. ``key``: of the body,
    unique among those of this process. Use inside one event loop."""

    __slots__ = (
        "_is_scheduled",
        "_num_sent",
        "_waiting",
        "client",
        "headers",
        "key",
        "labels",
        "num_bytes",
        "num_logprobs",
        "rids",
        "route",
    )

    def __init__(self, client: str | None = None, key: str | None = None) -> None:
        self.client = client
        self.key = key or f"{os.getpid():x}-{next(_numbers):x}"
        self.labels: dict[str, str] = {}  # that its customer set, for the metrics
        self.rids: list[str] = []  # of its requests with rows (``live_feed/rows.py``)
        self.headers: Mapping[bytes, bytes] = {}  # of its HTTP request
        self.route = ""  # path of the HTTP route that it came by
        self.num_bytes = 0  # of its body
        self.num_logprobs = 0  # entries that its requests may return, together
        self._num_sent = 0  # sequences that the engine has
        self._waiting: deque[tuple[int, int, asyncio.Future[None]]] = deque()
        self._is_scheduled = False

    @property
    def routing_key(self) -> str | None:
        """What the header x-smg-routing-key says, which routers read too."""
        value = self.headers.get(ROUTING_HEADER)
        return value.decode("latin-1") if value else None

    @asynccontextmanager
    async def turn(self, count: int, slice_size: int) -> AsyncIterator[None]:
        """Wait until ``count`` more sequences may be sent: at most ``slice_size`` are with the
        engine at a time, or one request's if it alone has more. They have ended on exit."""
        if self._waiting or not self._has_room(count, slice_size):
            await self._wait(count, slice_size)
        else:
            self._num_sent += count
        try:
            yield
        finally:
            self._num_sent -= count
            self._schedule()

    async def _wait(self, count: int, slice_size: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, slice_size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._num_sent -= count
            self._schedule()
            raise

    def _has_room(self, count: int, slice_size: int) -> bool:
        return not self._num_sent or self._num_sent + count <= slice_size

    def _schedule(self) -> None:
        if self._waiting and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """Let the next request go: one each turn of the event loop, as it is tokenized there."""
        self._is_scheduled = False
        while self._waiting and self._waiting[0][2].done():  # its client has left
            self._waiting.popleft()
        if self._waiting and self._has_room(*self._waiting[0][:2]):
            count, _, turn = self._waiting.popleft()
            self._num_sent += count
            turn.set_result(None)
            self._schedule()


def current_call() -> Call | None:
    """The call that the running task works for; None outside of one, as offline."""
    return _current.get()


def begin_call(client: str | None, key: str | None = None) -> Call:
    """Begin a call in the running task and those that it starts. ``key``: of calls that take turns
    with others as one."""
    call = Call(client, key)
    _current.set(call)
    return call
