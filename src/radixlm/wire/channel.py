"""Channels between two roles: zmq between processes, two deques inside one process.

A channel is a pair of one-way streams of records. ``receive`` waits at most ``timeout_s``
(None = for ever, 0 = not at all) and returns all that has come.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import zmq

from radixlm.base.errors import ConfigError
from radixlm.wire.codec import Codec, MalformedMessage
from radixlm.wire.curve import MIN_CHARS, secure

log = logging.getLogger(__name__)

MAX_LOGGED = 10  # dropped messages that are logged one by one; then only powers of two


class Channel(Protocol):
    def send(self, message: Any) -> None: ...

    def receive(self, timeout_s: float | None) -> list[Any]: ...

    def close(self) -> None: ...


class MemoryChannel:
    """One end of an in-process pair; records are handed over as they are."""

    def __init__(
        self,
        inbox: deque[Any],
        outbox: deque[Any],
        wake_me: threading.Condition,
        wake_peer: threading.Condition,
    ) -> None:
        self._inbox, self._outbox = inbox, outbox
        self._wake_me, self._wake_peer = wake_me, wake_peer

    @staticmethod
    def pair() -> tuple[MemoryChannel, MemoryChannel]:
        """The two ends of a channel."""
        there: deque[Any] = deque()
        back: deque[Any] = deque()
        left, right = threading.Condition(), threading.Condition()
        return MemoryChannel(back, there, left, right), MemoryChannel(there, back, right, left)

    def send(self, message: Any) -> None:
        with self._wake_peer:
            self._outbox.append(message)
            self._wake_peer.notify()

    def receive(self, timeout_s: float | None) -> list[Any]:
        with self._wake_me:
            if not self._inbox and timeout_s != 0:
                self._wake_me.wait(timeout_s)
            messages = list(self._inbox)
            self._inbox.clear()
        return messages

    def close(self) -> None:
        """Wake who waits for messages."""
        with self._wake_me:
            self._wake_me.notify_all()


def monitor_of(socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """A socket that receives the ``events`` of another, without a limit: the thread that serves all
    sockets of the process would wait while the queue of a monitor is full."""
    number: object = socket.getsockopt(zmq.FD)
    address = f"inproc://monitor.{number}"
    socket.monitor(address, events)
    monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.connect(address)
    return monitor


class ZmqChannel:
    """One end of a zmq PAIR. ``bind`` on the longer-lived side. Over TCP both ends must know a
    ``secret`` (``wire/curve.py``): messages are encrypted and come from no other peer."""

    def __init__(self, address: str, codec: Codec, bind: bool, secret: str | None = None) -> None:
        is_local = address.startswith(("ipc://", "inproc://"))
        if not is_local and len(secret or "") < MIN_CHARS:
            raise ConfigError(
                f"{address}: other machines reach it, so it needs a secret of at least "
                f"{MIN_CHARS} characters"
            )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        if not is_local:
            secure(self._socket, secret or "", is_server=bind)
        if bind:
            self._socket.bind(address)
        else:
            self._socket.connect(address)
        self._codec = codec
        self.monitor: zmq.Socket[bytes] | None = None  # has messages when the peer has gone
        self.num_dropped = 0  # messages that could not be decoded
        # answers the sender of a message that could not be decoded, if there is one
        self.on_malformed: Callable[[MalformedMessage], None] | None = None

    @property
    def descriptor(self) -> int:
        """File descriptor for an event loop; edge-triggered."""
        return int(self._socket.getsockopt(zmq.FD))

    @property
    def socket(self) -> zmq.Socket[bytes]:
        return self._socket

    def send(self, message: Any) -> None:
        try:
            self._socket.send(self._codec.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            # a PAIR without a peer cannot send; recovery sends the requests again
            log.debug("no peer for %s", type(message).__name__)

    def receive(self, timeout_s: float | None) -> list[Any]:
        if timeout_s != 0:
            wait_ms = None if timeout_s is None else max(1, round(timeout_s * 1000))
            if not self._socket.poll(wait_ms):
                return []
        messages: list[Any] = []
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                messages.append(self._codec.decode(data))
            except MalformedMessage as error:
                self.drop(error)
                if self.on_malformed is not None:
                    self.on_malformed(error)

    def drop(self, error: Exception) -> None:
        """Count a message that could not be decoded, and log it unless there are many."""
        self.num_dropped += 1
        if self.num_dropped <= MAX_LOGGED or self.num_dropped & (self.num_dropped - 1) == 0:
            log.error("dropped a message (%d so far): %.500s", self.num_dropped, error)

    def watch(self) -> zmq.Socket[bytes]:
        """Have the ``monitor`` made, for a poller."""
        self.monitor = monitor_of(self._socket, zmq.EVENT_DISCONNECTED)
        return self.monitor

    def close(self) -> None:
        if self.monitor is not None:
            self._socket.disable_monitor()
            self.monitor.close(0)
        self._socket.close(0)
