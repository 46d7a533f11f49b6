"""Rotary tables: static ones grow, length-dependent ones follow the length of each token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from radixlm.arch.rope import inv_freq
from radixlm.arch.spec import Rope, RopeScaling
from radixlm.kernels.dispatch import bind
from radixlm.layers import rope as rope_layer
from radixlm.layers.rope import RopeTables, StaticRope
from radixlm.step.batch import MRopeIds

CPU = torch.device("cpu")
KERNELS = bind("cpu", {"all": "reference"})
PLAIN = Rope(8, 10000.0)
DYNAMIC = Rope(
    8, 10000.0, RopeScaling("dynamic", (("factor", 4.0), ("max_position_embeddings", 16)))
)


class Batch:
    """The three batch fields that tables read."""

    def __init__(self, positions: list[int], lengths: list[int]) -> None:
        self.positions_T, self.rope_len_T = torch.tensor(positions), torch.tensor(lengths)
        self.max_kv_len = max(lengths)
        self.mrope = None


def angles_of(rope: Rope, position: int, length: int) -> torch.Tensor:
    frequencies, factor = inv_freq(rope, length)
    angle = position * torch.from_numpy(frequencies)
    return torch.cat((angle.cos(), angle.sin())) * factor


@pytest.mark.parametrize("rope", [PLAIN, DYNAMIC], ids=["static", "dynamic"])
def test_each_token_rotates_by_its_position_and_length(rope: Rope) -> None:
    positions, lengths = [0, 15, 40, 3, 3], [1, 16, 41, 41, 12]
    batch: Any = Batch(positions, lengths)
    (table,) = RopeTables([rope], KERNELS, CPU).angles(batch)
    for row, position, length in zip(table, positions, lengths, strict=True):
        torch.testing.assert_close(row, angles_of(rope, position, length))
    assert torch.equal(table[3], table[4]) == (rope is PLAIN)


def test_static_tables_grow_and_keep_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope_layer, "FIRST_ROWS", 4)
    maker = StaticRope(PLAIN, KERNELS, CPU)
    first = maker.angles(Batch([0, 3], [4, 4]))  # type: ignore[arg-type]
    grown = maker.angles(Batch([0, 3, 9], [4, 4, 10]))  # type: ignore[arg-type]
    assert torch.equal(grown[:2], first)
    assert maker.table_N2R.shape[0] >= 10
    table = maker.table_N2R
    maker.angles(Batch([1], [2]))  # type: ignore[arg-type]
    assert maker.table_N2R is table


def test_tables_are_in_the_order_of_the_ropes() -> None:
    other = Rope(4, 100.0)
    batch: Any = Batch([5], [6])
    tables = RopeTables([PLAIN, other], KERNELS, CPU).angles(batch)
    assert [t.shape[1] for t in tables] == [8, 4]


def test_both_channels_of_a_pair_rotate_by_their_axes() -> None:
    rope = Rope(8, 10000.0, mrope_sections=(1, 1, 1, 1), mrope_by_channel=True)
    batch: Any = Batch([5], [6])
    ids_3T = torch.tensor([[2], [7], [9]])  # number, row, column
    batch.mrope = MRopeIds(ids_3T, lambda index: None)
    (table,) = RopeTables([rope], KERNELS, CPU).angles(batch)
    place, column, row, number = (angles_of(rope, at, 0).view(2, 4) for at in (5, 9, 7, 2))
    first = torch.cat((place[:, :2], column[:, 2:]), 1)
    second = torch.cat((row[:, :2], number[:, 2:]), 1)
    torch.testing.assert_close(table[0], torch.cat((first.flatten(), second.flatten())))
