"""Which rows of the page and token tables are in use: one row, a slot, a running request."""

import heapq
from collections.abc import Iterable

from radixlm.base.errors import InvariantError


class SlotAllocator:
    """Gives out slots ``first .. first + num_slots - 1``, the lowest free one first."""

    def __init__(self, num_slots: int, first: int = 0) -> None:
        self.first = first
        self._free = list(range(first, first + num_slots))
        self._is_free = bytearray(b"\x01" * num_slots)

    @property
    def num_free(self) -> int:
        """Slots that ``alloc`` can still give."""
        return len(self._free)

    @property
    def num_total(self) -> int:
        return len(self._is_free)

    def alloc(self) -> int | None:
        """A slot, or None if all are in use."""
        if not self._free:
            return None
        slot = heapq.heappop(self._free)
        self._is_free[slot - self.first] = 0
        return slot

    def free(self, slot: int) -> None:
        """Takes a slot back; InvariantError if it is not in use."""
        index = slot - self.first
        if not 0 <= index < len(self._is_free):
            raise InvariantError(f"slot {slot} of {len(self._is_free)}")
        if self._is_free[index]:
            raise InvariantError(f"slot {slot} is freed twice")
        self._is_free[index] = 1
        heapq.heappush(self._free, slot)

    def used(self) -> list[int]:
        """The slots in use, ascending."""
        return [slot for slot, is_free in enumerate(self._is_free, self.first) if not is_free]

    def rebuild(self, used: Iterable[int]) -> None:
        """Makes the free list anew: every slot not in ``used`` is free."""
        self._is_free[:] = b"\x01" * len(self._is_free)
        for slot in used:
            self._is_free[slot - self.first] = 0
        # Ascending, hence already a heap.
        self._free = [slot for slot, is_free in enumerate(self._is_free, self.first) if is_free]
