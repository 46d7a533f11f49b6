"""Messages of any size over a socket whose packets are limited by its buffer (SEQPACKET)."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import zmq

PIECE_BYTES = 1 << 16
MORE, LAST = b"\1", b"\0"


def pieces(data: bytes) -> Iterator[bytes]:
    """The packets of a message: a byte that says whether more follow, and a part of the data."""
    for start in range(0, max(1, len(data)), PIECE_BYTES):
        end = start + PIECE_BYTES
        yield (MORE if end < len(data) else LAST) + data[start:end]


def read_pieces(receive: Callable[[int], bytes]) -> bytes | None:
    """The next message, put together; None at the end of the stream. ``receive``: a socket's
    ``recv``."""
    parts: list[bytes] = []
    while packet := receive(1 + PIECE_BYTES):
        parts.append(packet[1:])
        if packet[:1] == LAST:
            return b"".join(parts)
    return None


class Outbox:
    """Sends over ``link`` without ever waiting for who reads there."""

    def __init__(self, link: socket.socket) -> None:
        self.link, self._unsent = link, deque[bytes]()

    @property
    def events(self) -> int:
        """What to poll the link for."""
        return zmq.POLLIN | (zmq.POLLOUT if self._unsent else 0)

    def send(self, messages: Iterable[bytes] = ()) -> None:
        """Send messages as far as there is room; the rest goes with the next call."""
        self._unsent.extend(messages)
        try:
            while self._unsent:
                self.link.send(self._unsent[0], socket.MSG_DONTWAIT)
                self._unsent.popleft()
        except BlockingIOError:
            return
        except OSError:  # who reads there has ended, which is noticed elsewhere
            self._unsent.clear()
