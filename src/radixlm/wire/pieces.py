"""Messages of any size over a socket whose packets are limited by its buffer (SEQPACKET)."""

from __future__ import annotations

import socket
from collections.abc import Iterator

PIECE_BYTES = 1 << 16
MORE, LAST = b"\1", b"\0"


def pieces(data: bytes) -> Iterator[bytes]:
    """The packets of a message: a byte that says whether more follow, and a part of the data."""
    for start in range(0, max(1, len(data)), PIECE_BYTES):
        end = start + PIECE_BYTES
        yield (MORE if end < len(data) else LAST) + data[start:end]


def read_pieces(link: socket.socket) -> bytes | None:
    """The next message, put together; None at the end of the stream."""
    parts: list[bytes] = []
    while packet := link.recv(1 + PIECE_BYTES):
        parts.append(packet[1:])
        if packet[:1] == LAST:
            return b"".join(parts)
    return None
