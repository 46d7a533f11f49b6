"""M-RoPE positions (Qwen2-VL): time, row and column of each token.

Text counts on in all three; an image's placeholders have its corner plus their own row and column;
the text behind goes on from the largest.
"""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from radixlm.base.record import Record
from radixlm.wire.media import Media


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


def with_row_ends(media: Media, merge: int) -> Iterator[Grid]:
    """A box for each image and each frame of a video; a token more ends each row."""
    grids = media.inputs[f"{media.kind}_grid_thw"].read().reshape(-1, 3).tolist()
    places = [place for start, count in media.spans for place in range(start, start + count)]
    at = 0
    for times, rows, columns in grids:
        height, width = rows // merge, columns // merge + 1
        for _ in range(times):
            yield Grid(places[at], 1, height, width)
            at += height * width


def boxes(media: Media, merge: int, rate: float) -> Iterator[Grid]:
    """A box for each image and video; for each frame of videos whose frames stand apart. ``rate``:
    units of time a second."""
    grid_thw = media.inputs.get(f"{media.kind}_grid_thw")
    places = [place for start, count in media.spans for place in range(start, start + count)]
    seconds = media.inputs.get("second_per_grid_ts")
    steps = (seconds.read().reshape(-1) * rate).tolist() if seconds is not None and rate else []
    at = 0
    grids = grid_thw.read().reshape(-1, 3).tolist() if grid_thw is not None else []
    for index, (times, rows, columns) in enumerate(grids):
        size = rows * columns // merge**2
        apart = places[at + times * size - 1] - places[at] != times * size - 1
        step = steps[index] if index < len(steps) else 1.0
        for _ in range(times if apart else 1):
            yield Grid(places[at], 1 if apart else times, rows // merge, columns // merge, step)
            at += size if apart else times * size


def without_boundaries(media: Media, merge: int) -> Iterator[Grid]:
    """Each image's placeholders without the boundary token before and the one behind; a newline
    token ends each row."""
    grids = media.inputs["image_grid_thw"].read().reshape(-1, 3).tolist()
    for (start, _), (_, rows, columns) in zip(media.spans, grids, strict=True):
        yield Grid(start + 1, 1, rows // merge, columns // merge + 1)


def at_one_place(media: Media, merge: int) -> Iterator[Grid]:
    """Each image's placeholders without the first and the last, all at one position."""
    for start, count in media.spans:
        yield Grid(start + 1, count - 2, 1, 1, 0.0)
