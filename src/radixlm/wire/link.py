"""The asyncio end of a channel: messages are handed to a callback on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, Protocol

from radixlm.wire.channel import Channel, ZmqChannel

Handler = Callable[[Any], None]


class Link(Protocol):
    """Sends records to the scheduler; what it answers goes to the handler."""

    def start(self, handler: Handler) -> None: ...

    def send(self, message: Any) -> None: ...

    def close(self) -> None: ...


class ZmqLink:
    """Over a zmq socket whose descriptor the loop watches. The descriptor is edge-triggered:
    after each use of the socket it is drained."""

    def __init__(self, channel: ZmqChannel) -> None:
        self._channel = channel
        self._handler: Handler | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_drain_due = False
        self._is_closed = False

    def start(self, handler: Handler) -> None:
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._channel.descriptor, self._drain)
        self._drain()

    def send(self, message: Any) -> None:
        if self._is_closed:
            return  # calls that end with the process abort their requests late
        self._channel.send(message)
        if self._loop is not None and not self._is_drain_due:
            self._is_drain_due = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._is_drain_due = False
        if self._handler is None or self._is_closed:
            return
        for message in self._channel.receive(0):
            try:
                self._handler(message)
            except Exception as error:  # of a type that fits, with values that do not
                self._channel.drop(error)

    def close(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._channel.descriptor)
        self._is_closed = True
        self._channel.close()


class ThreadLink:
    """Over a blocking channel of this process, read by a thread (the offline engine)."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._is_closed = False

    def start(self, handler: Handler) -> None:
        loop = asyncio.get_running_loop()

        def deliver(messages: list[Any]) -> None:
            for message in messages:
                handler(message)

        def read() -> None:
            while not self._is_closed:
                messages = self._channel.receive(1.0)
                if messages:
                    with contextlib.suppress(RuntimeError):  # the loop is closed
                        loop.call_soon_threadsafe(deliver, messages)

        threading.Thread(target=read, name="link", daemon=True).start()

    def send(self, message: Any) -> None:
        self._channel.send(message)

    def close(self) -> None:
        self._is_closed = True
        self._channel.close()
