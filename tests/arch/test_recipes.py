"""Weight recipes on numpy arrays against index arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from radixlm.arch.recipes import (
    GroupedQkv,
    PerHead,
    interleaved,
    interleaved_transposed,
    transposed,
)


def test_transposed() -> None:
    matrix, stack = np.arange(6).reshape(2, 3), np.arange(24).reshape(2, 3, 4)
    assert (transposed(matrix, np.concatenate) == matrix.T).all()
    assert (transposed(np.arange(3), np.concatenate) == np.arange(3)).all()
    assert transposed(stack, np.concatenate)[1, 2, 0] == stack[1, 0, 2]


def test_interleaved() -> None:
    assert interleaved(np.arange(6), np.concatenate).tolist() == [0, 2, 4, 1, 3, 5]
    stack = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    ours = interleaved_transposed(stack, np.concatenate)
    assert ours.shape == (2, 4, 3)
    for row, column in enumerate((0, 2, 1, 3)):
        assert (ours[:, row] == stack[:, :, column]).all()


@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(1, 3, 2), (2, 1, 4), (3, 2, 2)])
@pytest.mark.parametrize("rest", [(), (5,)])
def test_grouped_qkv(kv_heads: int, group: int, dim: int, rest: tuple[int, ...]) -> None:
    rows = [
        (part, group_index * (group if part == "q" else 1) + head, channel)
        for group_index in range(kv_heads)
        for part, heads in (("q", group), ("k", 1), ("v", 1))
        for head in range(heads)
        for channel in range(dim)
    ]
    stored = np.arange(len(rows)).reshape(-1, *([1] * len(rest))) + np.zeros(rest, int)
    ours = GroupedQkv(kv_heads, dim)(stored, np.concatenate)
    order = sorted(range(len(rows)), key=lambda n: ("qkv".index(rows[n][0]), *rows[n][1:]))
    assert ours.reshape(len(rows), -1)[:, 0].tolist() == order


def test_recipes_compare_by_value() -> None:
    assert GroupedQkv(2, 4) == GroupedQkv(2, 4) != GroupedQkv(2, 8)
    assert PerHead(2)(np.arange(6), np.concatenate).tolist() == [[0, 1, 2], [3, 4, 5]]
