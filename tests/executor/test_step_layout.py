"""A packer that reuses the constant parts of a decode batch writes the same as a new packer."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from radixlm.cuda_graphs.graph_inputs import pack_decodes
from radixlm.executor.device_tables import DeviceTables
from radixlm.executor.step_layout import StepPacker
from radixlm.sampling.plain import SamplingParamTable
from radixlm.sampling.table import SlotState
from radixlm.step.plan import Admission, DecodeBatch, Items, NewPages, PageUpdate
from radixlm.wire.sampling_params import SamplingParams

SLOTS = 6


def parts() -> tuple[DeviceTables, SamplingParamTable]:
    tables = DeviceTables(SLOTS, 32, 1, torch.device("cpu"), is_shared=False)
    draws = SamplingParamTable(SLOTS, 99)
    for slot in range(SLOTS):
        ids = np.zeros(5 * slot + 1, np.int32)
        tables.admit(Admission(f"r{slot}", slot, SamplingParams(), ids, ids[:0]))
        draws.set(slot, SlotState(slot % 2 == 0, slot == 3, 0.5 + slot, 9, 0.9, 0.0, slot), False)
    return tables, draws


@pytest.mark.parametrize("padded", [0, SLOTS])
def test_a_reused_layout_equals_a_new_one(padded: int) -> None:
    rng, (tables, draws) = random.Random(padded), parts()
    packer = StepPacker(tables, draws, SLOTS, 16, 16)
    batches = [
        DecodeBatch(tuple(f"r{slot}" for slot in slots), np.array(slots, np.int64))
        for slots in ([0, 1, 2, 3], [3, 1], [5], [0, 1, 2, 3])
    ]
    for _ in range(40):
        batch = rng.choice(batches)
        starts = np.array([rng.randrange(40) for _ in batch.slots], np.int64)
        items = Items(batch, starts)
        host, fresh = (torch.full((packer.num_ints,), -7, dtype=torch.int32) for _ in range(2))
        kept_shape, num = pack_decodes(items, padded, packer, host)
        other = StepPacker(tables, draws, SLOTS, 16, 16)
        shape, _ = pack_decodes(Items.of(tuple(items)), padded, other, fresh)
        assert host.tolist() == fresh.tolist() and num == packer.num_head
        assert (kept_shape.max_kv_len, kept_shape.kinds) == (shape.max_kv_len, shape.kinds)
        assert kept_shape.slots_R.tolist() == batch.slots.tolist()
        assert kept_shape.kinds.all_greedy == all(slot % 2 == 0 for slot in batch.slots)
        assert kept_shape.kinds.any_filtered == (3 in batch.slots)


def test_pages_of_several_rows_equal_single_updates() -> None:
    one, other = parts()[0], parts()[0]
    slots, columns = np.array([4, 0, 2]), np.array([7, 0, 31])
    one.add(NewPages(slots, columns, np.array([9, 8, 7], np.int32)))
    for slot, column, page in zip(slots, columns, (9, 8, 7), strict=True):
        other.write(PageUpdate(0, int(slot), int(column), np.array([page], np.int32)))
    assert (one.pages == other.pages).all() and one.pages.any()
    assert one.changes().tolist() == other.changes().tolist()
