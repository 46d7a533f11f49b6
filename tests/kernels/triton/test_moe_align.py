"""Slots grouped by expert: every slot once, in order, in blocks of one expert."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.kernels.triton.moe_align import Aligned, align, max_blocks


def expected(ids: list[int], num_experts: int, block: int) -> tuple[list[int], list[int]]:
    slots, owners = [], []
    for expert in range(num_experts):
        own = [slot for slot, chosen in enumerate(ids) if chosen == expert]
        padded = -(-len(own) // block) * block
        slots += own + [len(ids)] * (padded - len(own))
        owners += [expert] * (padded // block)
    return slots, owners


def check(aligned: Aligned, ids: list[int], num_experts: int) -> None:
    slots, owners = expected(ids, num_experts, aligned.block)
    assert len(owners) <= aligned.max_blocks
    assert aligned.slots[: len(slots)].tolist() == slots
    idle = aligned.max_blocks - len(owners)
    assert aligned.owners.tolist() == owners + [-1] * idle
    counts = torch.bincount(torch.tensor(ids), minlength=num_experts)
    assert aligned.ends.tolist() == counts.cumsum(0).tolist()


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_choice(data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(1, 9))
    top_k = data.draw(st.integers(1, 3))
    block = data.draw(st.sampled_from([16, 64]))
    choice = st.integers(0, num_experts - 1)
    rows = data.draw(st.lists(st.lists(choice, min_size=top_k, max_size=top_k), min_size=1))
    ids = [chosen for row in rows for chosen in row]
    check(align(torch.tensor(rows), num_experts, block), ids, num_experts)


@pytest.mark.parametrize("only", [0, 4])
def test_all_slots_on_one_expert_over_several_chunks(only: int) -> None:
    ids = torch.full((1100, 2), only)
    check(align(ids, 5, 64), ids.flatten().tolist(), 5)


def test_the_buffers_fit_the_worst_choice() -> None:
    for num_slots in (1, 5, 16, 100):
        for num_experts in (1, 4, 40):
            ids = [slot % num_experts for slot in range(num_slots)]
            needed = len(expected(ids, num_experts, 16)[1])
            assert needed <= max_blocks(num_slots, num_experts, 16)
