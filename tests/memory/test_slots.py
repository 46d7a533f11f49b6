"""Slots are dense and never given twice."""

import pytest

from radixlm.base.errors import InvariantError
from radixlm.memory.slots import SlotAllocator


def test_lowest_free_slot_first():
    slots = SlotAllocator(4)
    assert [slots.alloc() for _ in range(5)] == [0, 1, 2, 3, None]
    slots.free(2)
    slots.free(0)
    assert (slots.num_free, slots.num_total, slots.used()) == (2, 4, [1, 3])
    assert [slots.alloc(), slots.alloc()] == [0, 2]


@pytest.mark.parametrize(("slot", "message"), [(1, "twice"), (4, "slot 4 of 4"), (-1, "slot -1")])
def test_wrong_free(slot, message):
    slots = SlotAllocator(4)
    slots.alloc()
    with pytest.raises(InvariantError, match=message):
        slots.free(slot)
    assert slots.num_free == 3


def test_rebuild_from_running_requests():
    slots = SlotAllocator(4)
    slots.alloc()
    slots.rebuild([3, 1])
    assert slots.used() == [1, 3]
    assert [slots.alloc(), slots.alloc(), slots.alloc()] == [0, 2, None]
