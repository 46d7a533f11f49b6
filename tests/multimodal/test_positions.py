"""Positions of multimodal ropes against a loop over tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from radixlm.multimodal.positions import Grid, numbered_ids, rope_ids


def walked(parts: list[int | tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    made: list[tuple[int, int, int]] = []
    at = 0
    for part in parts:
        if isinstance(part, int):
            made += [(at + i, at + i, at + i) for i in range(part)]
            at += part
        else:
            t, h, w = part
            box = [(x, y, z) for x in range(t) for y in range(h) for z in range(w)]
            made += [(at + x, at + y, at + z) for x, y, z in box]
            at += max(h, w)
    return made


SIZES = st.integers(1, 5)
PARTS = st.lists(st.one_of(st.integers(0, 6), st.tuples(st.integers(1, 2), SIZES, SIZES)))


@given(PARTS)
def test_text_and_image_grids(parts: list[int | tuple[int, int, int]]) -> None:
    grids, start = [], 0
    for part in parts:
        if isinstance(part, tuple):
            grids.append(Grid(start, *part))
            start += int(np.prod(part))
        else:
            start += part
    assert rope_ids(start, grids).T.tolist() == [list(one) for one in walked(parts)]


def test_numbered_images_do_not_shift_the_text() -> None:
    made = numbered_ids(12, [Grid(2, 1, 2, 2), Grid(7, 1, 1, 3)]).T.tolist()
    assert [made[i] for i in (0, 1, 6, 10, 11)] == [[i] * 3 for i in (0, 1, 6, 10, 11)]
    assert made[2:6] == [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]]
    assert made[7:10] == [[1, 0, 0], [1, 0, 1], [1, 0, 2]]
