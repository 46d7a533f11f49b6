"""M-RoPE positions (Qwen2-VL): time, row and column of each token.

Text counts on in all three; an image's placeholders have its corner plus their own row and column;
the text behind goes on from the largest.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from radixlm.base.record import Record


class Grid(Record):
    """Positions [start, start + times * rows * columns) of a prompt as a box; ``step``: from a time
    to the next."""

    start: int
    times: int
    rows: int
    columns: int
    step: float = 1.0


def rope_ids(num_tokens: int, grids: Iterable[Grid]) -> NDArray[np.int32]:
    """int32 [3, num_tokens]."""
    ids = np.empty((3, num_tokens), np.int32)
    at = value = 0
    for grid in grids:
        ids[:, at : grid.start] = np.arange(value, value + grid.start - at)
        value += grid.start - at
        box = np.indices((grid.times, grid.rows, grid.columns)).reshape(3, -1)
        box[0] = (box[0].astype(np.float32) * np.float32(grid.step)).astype(np.int64)
        at = grid.start + box.shape[1]
        ids[:, grid.start : at] = box + value
        value += max(grid.rows, grid.columns)
    ids[:, at:] = np.arange(value, value + num_tokens - at)
    return ids


def numbered_ids(num_tokens: int, grids: Iterable[Grid]) -> NDArray[np.int32]:
    """int32 [3, num_tokens]: text counts on through the images, an image's placeholders have its
    number, their row and their column."""
    ids = np.tile(np.arange(num_tokens, dtype=np.int32), (3, 1))
    for number, grid in enumerate(grids):
        box = np.indices((grid.times, grid.rows, grid.columns)).reshape(3, -1)
        box[0] = number
        ids[:, grid.start : grid.start + box.shape[1]] = box
    return ids
