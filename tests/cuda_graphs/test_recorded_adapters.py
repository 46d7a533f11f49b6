"""What recorded steps are told of adapters: a slot for each, and which rows have it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixlm.cuda_graphs.recorded_adapters import RecordedAdapters
from radixlm.devices.device import CpuDevice
from radixlm.kernels.dispatch import bind
from radixlm.kernels.ops.lora import LoraLayout, LoraRows, PackedAdapter
from radixlm.lora.table import AdapterTable
from radixlm.step.plan import DecodeBatch, Drafts, Item, Items


class NotedSlots:
    """Two slots, and what they were told."""

    num_slots = 2

    def __init__(self) -> None:
        self.ints = torch.zeros(16, dtype=torch.int32)
        self.held: dict[int, PackedAdapter] = {}
        self.steps: list[list[int]] = []  # slots of the tokens of each step
        self.num_puts = 0

    def takes(self, adapter: PackedAdapter) -> bool:
        return True

    def put(self, slot: int, adapter: PackedAdapter) -> None:
        self.held[slot] = adapter
        self.num_puts += 1

    def fill(self, slot_T: Any, host: Tensor) -> None:
        self.steps.append(slot_T.tolist())

    def rows(self, num_tokens: int) -> LoraRows:
        raise AssertionError("nothing is recorded here")


def make(*numbers: int) -> tuple[AdapterTable, NotedSlots, RecordedAdapters]:
    """Requests in slots 0, 1, ... with these adapters."""
    table, slots = AdapterTable(bind("cpu", {"all": "reference"}), LoraLayout()), NotedSlots()
    table.reset(len(numbers))
    for slot, number in enumerate(numbers):
        table.assign(slot, number)
        if number >= 0:
            table.put(number, table.pack({}))
    return table, slots, RecordedAdapters(CpuDevice(), table, slots)


def decodes(*of: int) -> Items:
    batch = DecodeBatch(tuple(map(str, of)), np.array(of, np.int64))
    return Items(batch, np.full(len(of), 9, np.int64))


def test_steps_of_the_same_requests_are_told_once() -> None:
    table, slots, recorded = make(7, -1, 9)
    step = decodes(0, 1, 2)
    recorded.fill(step, 1)
    recorded.fill(Items(step.decodes, step.starts + 1), 1)
    assert slots.steps == [[0, -1, 1]]
    again = table.pack({})
    table.drop(7)
    table.put(7, again)  # made anew while its request runs
    recorded.fill(step, 1)
    assert slots.steps[1:] == [[0, -1, 1]] and slots.held[0] is again
    recorded.fill(decodes(2, 0), 1)
    assert slots.steps[2:] == [[1, 0]] and slots.num_puts == 3


def test_an_adapter_keeps_its_slot_until_another_needs_it() -> None:
    table, slots, recorded = make(3, 4, 5)
    assert not recorded.takes(decodes(0, 1, 2)) and recorded.takes(decodes(1, 2))
    for of in ((0,), (1,), (2,), (1, 2), (0,)):
        recorded.fill(decodes(*of), 1)
    first, second, third = slots.steps[:3]
    assert (first, second) == ([0], [1]) and slots.steps[3] == [1 - third[0], third[0]]
    assert set(slots.held.values()) <= set(table.of(decodes(0, 1, 2)).values())


def test_rows_of_several_tokens() -> None:
    """Drafts, of which a graph has the same number a row, and parts of prompts; one is changed from
    its fifth token on."""
    table, slots, recorded = make(1, -1, 2)
    drafted = decodes(0, 1)
    drafts = Drafts(np.array([2, 0], np.int32), np.zeros(2, np.int32))
    recorded.fill(Items(drafted.decodes, drafted.starts, (), drafts), 4)
    table.assign(2, 2, start=5)
    prompt = Item("2", 2, 3, 4, np.zeros(4, np.int32), True)
    recorded.fill(Items(drafted.decodes, drafted.starts, (prompt,)), 1)
    assert slots.steps == [[0] * 4 + [-1] * 4, [0, -1, -1, -1, 1, 1]]
