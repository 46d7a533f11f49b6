"""Plans from rank 0 to the other ranks of its host, in order and without gaps.

A message has a head of 64 bytes (its index and its length, little endian) and the payload. Rank 0
waits only when the slowest reader is a whole ring behind.
"""

from __future__ import annotations

import struct
from typing import Any

from radixlm.base.errors import RankLost

HEAD = struct.Struct("<QQ48x")
POLL_S = 0.5  # signals are handled that often while nothing comes


class PlanRing:
    """One writer, ``num_readers`` readers. ``stream``: a ``_cpu.Stream`` of the segment."""

    def __init__(self, stream: Any, num_readers: int, timeout_s: float) -> None:
        self._stream, self._num_readers, self._timeout_s = stream, num_readers, timeout_s
        self._next = 0

    def write(self, payload: bytes) -> int:
        """Hand a message to all readers; its index. RankLost when a reader stays a ring behind."""
        index, self._next = self._next, self._next + 1
        if self._num_readers:
            head = HEAD.pack(index, len(payload))
            self._stream.write_bytes(head + payload, self._timeout_s)
        return index

    def read(self) -> bytes:
        """Wait for the next message. RankLost when its index is not the next one, or a rank is
        lost."""
        while not self._stream.poll(POLL_S):
            pass
        index, length = HEAD.unpack(self._stream.read_bytes(HEAD.size, self._timeout_s))
        if index != self._next:
            raise RankLost(f"plan {index} came where plan {self._next} was expected")
        self._next += 1
        return bytes(self._stream.read_bytes(length, self._timeout_s))
