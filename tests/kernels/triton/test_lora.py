"""The kernels of adapters against torch, by the step and as what graphs read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from radixlm.base.record import replace
from radixlm.kernels.ops import lora as reference
from radixlm.kernels.ops.lora import LoraLayout, LoraPart
from radixlm.kernels.triton.lora import (
    ROWS,
    TritonAdapter,
    TritonLoraRows,
    TritonLoraSlots,
    group_rows,
)

NUM_IN, NUM_OUT, SITE = 700, 150, 2
LAYOUT = LoraLayout(sites=frozenset({0, SITE}), max_adapters=3, max_rank=40)
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def _part(seed: int, rank: int, first: int, count: int, with_vectors: bool = False) -> LoraPart:
    draw = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    vectors = (make(count), 1 + 0.1 * make(count), make(count)) if with_vectors else ()
    return LoraPart(0.05 * make(rank, NUM_IN), make(count, rank), 0.5 + seed, first, *vectors)


def _parts() -> list[reference.Parts]:
    """Of ranks 1 to 40, side by side, of some outputs, with vectors; more than the kernels take;
    none of the layer."""
    return [
        {SITE: (_part(0, 1, 0, 100), _part(1, 17, 100, 50))},
        {SITE: (_part(2, 40, 30, 80, True), _part(3, 16, 60, 90))},  # some outputs have both
        {SITE: tuple(_part(4, 3, 30 * number, 30) for number in range(5))},
        {0: (_part(5, 4, 0, NUM_OUT),)},
    ]


def _matrices(num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(num_tokens)
    x_TI = torch.randn(num_tokens, NUM_IN + 4, generator=draw).to(dtype)[:, :NUM_IN]
    return x_TI, torch.randn(num_tokens, NUM_OUT, generator=draw).to(dtype)


def _wanted(parts: list[reference.Parts], of_T: Tensor, x_TI: Tensor, y_TO: Tensor) -> Tensor:
    wide_TO = y_TO.float().clone()
    rows = reference.lora_rows([reference.pack_adapter(one) for one in parts], of_T)
    rows.add_(SITE, x_TI.float(), wide_TO)
    return wide_TO


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("num_tokens", [1, 41])
def test_each_row_gets_its_adapter(num_tokens: int, dtype: torch.dtype) -> None:
    parts, layout = _parts(), replace(LAYOUT, dtype=dtype)
    of_T = torch.arange(num_tokens, dtype=torch.int32) % 5 - int(num_tokens > 1)  # -1: none
    x_TI, y_TO = _matrices(num_tokens, dtype)
    want_TO, before_TO = _wanted(parts, of_T, x_TI, y_TO), y_TO.clone()
    rows = TritonLoraRows([TritonAdapter(one, layout) for one in parts], of_T)
    rows.add_(SITE, x_TI, y_TO)
    assert float((y_TO.float() - want_TO).norm()) < BOUND[dtype] * float(want_TO.norm())
    if num_tokens > 1:
        is_plain_T = (of_T < 0) | (of_T == 3)
        assert torch.equal(y_TO[is_plain_T], before_TO[is_plain_T])
        assert (y_TO[~is_plain_T] != before_TO[~is_plain_T]).any(1).all()
    assert rows.has(SITE) and rows.has(0) and not rows.has(1)


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    """Alone, in a batch, and among so many that a program sums up all inputs."""
    adapters = [TritonAdapter(one, LAYOUT) for one in _parts()[:2]]
    x_TI, y_TO = _matrices(600, torch.float32)
    of_T = torch.arange(600, dtype=torch.int32) % 3 - 1
    whole_TO = y_TO.clone()
    TritonLoraRows(adapters, of_T).add_(SITE, x_TI, whole_TO)
    for rows in (slice(5, 6), slice(40, 75)):
        some_TO = y_TO[rows].clone()
        TritonLoraRows(adapters, of_T[rows]).add_(SITE, x_TI[rows], some_TO)
        assert torch.equal(some_TO, whole_TO[rows])


def test_chosen_rows_run_in_torch_with_the_same_adapters() -> None:
    parts = _parts()
    adapters = [TritonAdapter(one, LAYOUT) for one in parts]
    x_TI, y_TO = _matrices(4, torch.float32)
    of_T, chosen_R = torch.tensor([0, 3, 1, -1], dtype=torch.int32), torch.tensor([2, -1, 0])
    x_RI, y_RO = x_TI[:3], y_TO[:3]
    want_RO = _wanted(parts, torch.tensor([1, -1, 0], dtype=torch.int32), x_RI, y_RO)
    TritonLoraRows(adapters, of_T).select(chosen_R).add_(SITE, x_RI, y_RO)
    torch.testing.assert_close(y_RO, want_RO)


def test_a_recorded_step_follows_what_is_written_for_it() -> None:
    """One recording serves any adapters in its slots, and any rows."""
    parts = _parts()
    adapters = [TritonAdapter(one, LAYOUT) for one in parts]
    slots = TritonLoraSlots(LAYOUT, 20)
    assert [slots.takes(one) for one in adapters] == [True, True, False, True]
    assert not TritonLoraSlots(replace(LAYOUT, max_rank=32), 20).takes(adapters[1])
    host = torch.zeros_like(slots.ints)
    draw = np.random.default_rng(1)
    for held in ([0, 1], [1, 3], [3, 0, 1]):
        for slot, adapter in enumerate(held):
            slots.put(slot, adapters[adapter])
        of_T = draw.integers(-1, len(held), 20, np.int32)
        of_T[draw.integers(12, 20) :] = -1  # padding
        slots.fill(of_T, host)
        slots.ints.copy_(host)
        x_TI, y_TO = _matrices(20, torch.float32)
        want_TO = _wanted([parts[one] for one in held], torch.from_numpy(of_T), x_TI, y_TO)
        rows = slots.rows(20)
        assert rows.has(SITE) and not rows.has(1) and not rows.select(torch.arange(2)).has(SITE)
        rows.add_(SITE, x_TI, y_TO)
        torch.testing.assert_close(y_TO, want_TO, rtol=1e-5, atol=1e-4)


def test_groups_hold_each_row_once() -> None:
    draw = np.random.default_rng(2)
    for count in (1, 16, 100, 1000):
        of_T = draw.integers(-1, 8, count).astype(np.int32)
        adapters_G, rows_GM = group_rows(of_T)
        assert rows_GM.shape == (len(adapters_G), ROWS)
        groups, places = np.nonzero(rows_GM >= 0)
        assert (of_T[rows_GM[groups, places]] == adapters_G[groups]).all()
        assert sorted(rows_GM[rows_GM >= 0].tolist()) == np.flatnonzero(of_T >= 0).tolist()
        assert len(adapters_G) <= min(count, (count + 15 * 8) // ROWS)
