"""The two ends of a channel on an event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from radixlm.wire.link import ThreadLink, ZmqLink


class Pipe:
    """A channel whose descriptor is a pipe: it wakes the loop only when told to."""

    def __init__(self) -> None:
        self.descriptor, self._bell = os.pipe()
        self.waiting: list[Any] = []
        self.sent: list[Any] = []
        self.dropped: list[str] = []
        self.num_reads = 0

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def receive(self, timeout_s: float) -> list[Any]:
        self.num_reads += 1
        messages, self.waiting = self.waiting, []
        return messages

    def drop(self, error: Exception) -> None:
        self.dropped.append(str(error))

    def close(self) -> None:
        os.close(self.descriptor)
        os.close(self._bell)

    def ring(self) -> None:
        os.write(self._bell, b".")


@contextmanager
def opened() -> Iterator[tuple[Pipe, Any, list[Any]]]:
    pipe, got = Pipe(), list[Any]()
    channel: Any = pipe
    link = ZmqLink(channel)
    try:
        yield pipe, link, got
    finally:
        link.close()


async def test_messages_that_came_before_the_start_are_read() -> None:
    with opened() as (pipe, link, got):
        pipe.waiting = [1]
        link.send("early")
        link.start(got.append)
        assert got == [1] and pipe.sent == ["early"]


async def test_a_closed_link_uses_its_channel_no_more() -> None:
    with opened() as (pipe, link, got):
        link.start(got.append)
        link.send("before")
    num_reads = pipe.num_reads
    link.send("after")
    await asyncio.sleep(0)
    assert pipe.sent == ["before"] and pipe.num_reads == num_reads


async def test_every_use_of_the_socket_is_followed_by_a_read() -> None:
    """The descriptor tells only once of a message that a send has seen."""
    with opened() as (pipe, link, got):
        link.start(got.append)
        for number in range(3):
            before = pipe.num_reads
            pipe.waiting = [number]
            link.send("a")
            link.send("b")
            await asyncio.sleep(0)
            assert got == list(range(number + 1))
            assert pipe.num_reads == before + 1, "once for all sends of a turn"


async def test_a_message_that_a_handler_refuses_does_not_end_the_others() -> None:
    with opened() as (pipe, link, got):

        def handle(message: Any) -> None:
            if message == 2:
                raise ValueError("no such thing")
            got.append(message)

        link.start(handle)
        pipe.waiting = [1, 2, 3]
        pipe.ring()
        while not pipe.dropped:
            await asyncio.sleep(0)
        assert got == [1, 3] and pipe.dropped == ["no such thing"]


class Blocking:
    """A channel that is read by a thread."""

    def __init__(self) -> None:
        self.messages: list[list[Any]] = []
        self.may_read = threading.Semaphore(0)
        self.is_closed = False

    def receive(self, timeout_s: float) -> list[Any]:
        self.may_read.acquire()
        return self.messages.pop(0) if self.messages else []

    def close(self) -> None:
        self.is_closed = True


async def test_the_thread_of_a_link_ends_with_it() -> None:
    channel, got, before = Blocking(), list[Any](), set(threading.enumerate())
    given: Any = channel
    link = ThreadLink(given)
    link.start(got.append)
    (thread,) = set(threading.enumerate()) - before
    channel.messages = [[], [1, 2], [3]]
    for _ in range(3):
        channel.may_read.release()
    while len(got) < 3:
        await asyncio.sleep(0)
    assert got == [1, 2, 3] and thread.is_alive() and thread.daemon
    link.close()
    assert channel.is_closed
    channel.may_read.release()
    await asyncio.to_thread(thread.join, 60)
    assert not thread.is_alive()
