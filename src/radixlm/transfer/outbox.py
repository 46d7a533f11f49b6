"""Outbox: the pages that a prefill server has computed, kept by key until decode servers have read
them. The oldest go first; a page that is being read stays.

They lie in memfds, which a process of the same user maps. A slot has a generation there, raised
before other bytes are written into it: a reader that finds it unchanged has read what it wanted.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from radixlm.transfer.checksums import BEST, CHECKSUMS
from radixlm.wire.transfer import RemoteArena, SharedArena, Slot

Bytes = NDArray[np.uint8]
MARK_BYTES: Final = 32
_ALIGN: Final = 4096
MAX_OVER: Final = 4096  # rooms whose end is remembered


class Arena:
    """Slots of one size in a memfd, uint8 [num_slots, slot_bytes] behind mark and generations."""

    def __init__(self, slot_bytes: int, num_slots: int) -> None:
        self.slot_bytes, self.num_slots = slot_bytes, num_slots
        self.descriptor = os.memfd_create("radixlm-pages")
        os.ftruncate(self.descriptor, arena_bytes(slot_bytes, num_slots))
        self._map = mmap.mmap(self.descriptor, 0)
        self.mark = secrets.token_bytes(MARK_BYTES)
        self._map[:MARK_BYTES] = self.mark
        self.generations, self.slots = arena_views(self._map, slot_bytes, num_slots)

    def shared(self) -> SharedArena:
        return SharedArena(os.getpid(), self.descriptor, self.slot_bytes, self.num_slots, self.mark)

    def remote(self) -> RemoteArena:
        return RemoteArena(self.slots.ctypes.data, self.slot_bytes, self.num_slots)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def arena_bytes(slot_bytes: int, num_slots: int) -> int:
    return _header_bytes(num_slots) + num_slots * slot_bytes


def arena_views(
    data: mmap.mmap, slot_bytes: int, num_slots: int
) -> tuple[NDArray[np.uint64], Bytes]:
    """Generations uint64 [num_slots] and slots uint8 [num_slots, slot_bytes] of a mapped arena."""
    generations = np.frombuffer(data, np.uint64, num_slots, MARK_BYTES)
    start = _header_bytes(num_slots)
    slots = np.frombuffer(data, np.uint8, num_slots * slot_bytes, start)
    return generations, slots.reshape(num_slots, slot_bytes)


def _header_bytes(num_slots: int) -> int:
    return -(-(MARK_BYTES + 8 * num_slots) // _ALIGN) * _ALIGN


class Page:
    """A page of the outbox. ``num_readers`` of those that read it now; ``checksum``: ``BEST``."""

    __slots__ = ("arena", "checksum", "num_readers", "payload", "slot")

    def __init__(self, arena: int, slot: Slot, payload: Bytes, checksum: int) -> None:
        self.arena, self.slot, self.payload, self.checksum = arena, slot, payload, checksum
        self.num_readers = 0


class Outbox:
    """Thread-safe. ``sizes``: bytes of the pages of each kind; all slots together take at most
    ``max_bytes``, and memory only once they are used."""

    def __init__(self, sizes: Sequence[int], max_bytes: int) -> None:
        kinds = sorted({size for size in sizes if size})
        count = max(1, max_bytes // max(1, sum(kinds)))
        self.arenas = [Arena(size, count) for size in kinds]
        self._free = [list(range(count - 1, -1, -1)) for _ in kinds]
        self._index = {size: i for i, size in enumerate(kinds)}
        self._pages: OrderedDict[bytes, Page] = OrderedDict()
        self._changed = threading.Condition()
        self._open: Counter[int] = Counter()
        self._over_s: OrderedDict[int, float] = OrderedDict()
        self.num_put = self.num_dropped = 0

    # ---- rooms -----------------------------------------------------------------------------

    def open_room(self, room: int) -> None:
        """A request of the room waits or is computed."""
        with self._changed:
            self._open[room] += 1
            self._over_s.pop(room, None)

    def close_room(self, room: int) -> None:
        """A request of the room is over: only pages that are on their way still come."""
        with self._changed:
            self._open[room] -= 1
            if self._open[room] <= 0:
                del self._open[room]
                self._over_s[room] = time.monotonic()
                if len(self._over_s) > MAX_OVER:
                    self._over_s.popitem(last=False)
            self._changed.notify_all()

    def is_open(self, room: int) -> bool:
        with self._changed:
            return room in self._open

    def over_since_s(self, room: int) -> float | None:
        """When the room's last request ended, in monotonic seconds; None if none has."""
        with self._changed:
            return self._over_s.get(room)

    @property
    def num_open(self) -> int:
        return len(self._open)

    # ---- pages -----------------------------------------------------------------------------

    def has(self, key: bytes) -> bool:
        with self._changed:
            return key in self._pages

    def put(self, key: bytes, payload: Bytes) -> bool:
        """Copy a page in; False if there is no room for it, or none of its size."""
        with self._changed:
            if key in self._pages:
                self._pages.move_to_end(key)
                return True
            index = self._index.get(payload.nbytes)
            number = None if index is None else self._take_slot(index)
            if index is None or number is None:
                self.num_dropped += 1
                return False
        arena = self.arenas[index]
        arena.generations[number] += np.uint64(1)
        target = arena.slots[number]
        np.copyto(target, payload.reshape(-1))
        page = Page(
            index,
            Slot(index, number, int(arena.generations[number])),
            target,
            CHECKSUMS[BEST](target.data),
        )
        with self._changed:
            self.num_put += 1
            self._pages[key] = page
            self._changed.notify_all()
        return True

    def _take_slot(self, index: int) -> int | None:
        if self._free[index]:
            return self._free[index].pop()
        for key, page in self._pages.items():
            if page.arena == index and not page.num_readers:
                del self._pages[key]
                return page.slot.number
        return None

    def take(self, keys: Sequence[bytes], wait_s: float, max_bytes: int) -> list[Page]:
        """Leading pages of ``keys``, at least one if it comes within ``wait_s``. They stay until
        ``give_back``."""
        found: list[Page] = []
        with self._changed:
            self._changed.wait_for(lambda: keys[0] in self._pages, wait_s)
            num_bytes = 0
            for key in keys:
                page = self._pages.get(key)
                if page is None or (found and num_bytes + page.payload.nbytes > max_bytes):
                    break
                self._pages.move_to_end(key)
                page.num_readers += 1
                num_bytes += page.payload.nbytes
                found.append(page)
        return found

    def give_back(self, pages: Sequence[Page]) -> None:
        with self._changed:
            for page in pages:
                page.num_readers -= 1

    def clear(self) -> None:
        """Drop all pages that nobody reads."""
        with self._changed:
            for key, page in list(self._pages.items()):
                if not page.num_readers:
                    del self._pages[key]
                    self._free[page.arena].append(page.slot.number)

    def close(self) -> None:
        for arena in self.arenas:
            arena.close()
