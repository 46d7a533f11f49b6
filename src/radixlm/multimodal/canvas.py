"""M-RoPE positions where the crops of an image lie on one plane: the whole image stretched over it,
its slices in their places, boundary tokens on corners and edges (MiniCPM-V 4.7).

Rows of the result are time, row and column. Text counts on in all three.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from radixlm.arch.media.spec import Canvas

Ids = NDArray[np.int32]
Size = tuple[int, int]  # rows and columns


@dataclass(slots=True)
class Crop:
    """Positions [start, end) of a prompt, as a grid."""

    start: int
    end: int
    size: Size


@dataclass(slots=True)
class _Frame:
    """A whole image and its slices; ``end``: behind the boundary tokens that close it."""

    whole: Crop
    slices: list[Crop] = field(default_factory=list)
    end: int = 0

    @property
    def num_columns(self) -> int:
        """Of the slices: a gap of more than two boundary tokens ends a row."""
        pairs = itertools.pairwise(self.slices)
        ends = (k + 1 for k, (one, other) in enumerate(pairs) if other.start - one.end > 2)
        columns = next(ends, len(self.slices))
        return columns if columns and not len(self.slices) % columns else len(self.slices)


def _groups(ids: Ids, crops: Sequence[Crop], canvas: Canvas) -> Iterator[list[_Frame]]:
    """Frames with nothing but boundary tokens between them form a group."""
    group: list[_Frame] = []
    last = 0
    for crop in crops:
        if group and ids[crop.start - 1] == canvas.slice_start:
            group[-1].slices.append(crop)
        else:
            gap = ids[last : crop.start - 1]
            if group and not np.isin(gap, canvas.boundary_tokens).all():
                yield group
                group = []
            group.append(_Frame(crop))
        last = crop.end
    if group:
        yield group


def _grid(size: Size, span: Size) -> NDArray[np.int64]:
    """[2, rows * columns]: row and column of each placeholder, stretched over ``span``."""
    # halves round to even and the quotient is in single precision, as in torch
    rows, columns = (
        np.rint(_spread(whole, count)).astype(np.int64)
        for whole, count in zip(span, size, strict=True)
    )
    return np.stack(np.meshgrid(rows, columns, indexing="ij")).reshape(2, -1)


def _spread(whole: int, count: int) -> NDArray[np.float32]:
    """float32 [count] from 0 to whole - 1, the upper half counted from the end."""
    step = np.float32(whole - 1) / np.float32(max(count - 1, 1))
    index = np.arange(count, dtype=np.float32)
    up, down = index * step, np.float32(whole - 1) - step * (count - 1 - index)
    half = np.arange(count) < count // 2
    return np.where(half, up, down if count > 1 else up).astype(np.float32)


def _put(out: Ids, frame: _Frame, origin: int) -> int:
    """Write a frame whose plane begins at ``origin``; returns its longer side."""
    whole, slices, columns = frame.whole, frame.slices, max(frame.num_columns, 1)
    cell = slices[0].size if slices else whole.size
    num_rows = len(slices) // columns if slices else 1
    plane = (cell[0] * num_rows, cell[1] * (columns if slices else 1))
    out[:, whole.start - 1 : frame.end] = origin
    out[1:, whole.start - 1] = max(origin - 1, 0)
    if whole.end < frame.end:
        out[1:, whole.end] = origin + plane[0], origin + plane[1]
    out[1:, whole.start : whole.end] = origin + _grid(whole.size, plane)
    for k, one in enumerate(slices):
        at = (k // columns * cell[0], k % columns * cell[1])
        out[1:, one.start - 1] = origin + at[0], origin + at[1]
        if one.end < frame.end:
            out[1:, one.end] = [origin + a + n - 1 for a, n in zip(at, one.size, strict=True)]
        out[1:, one.start : one.end] = origin + np.asarray(at)[:, None] + _grid(one.size, one.size)
    for k, (one, other) in enumerate(itertools.pairwise(slices)):
        if other.start - one.end > 2:  # the end of a row, right of it
            edge = ((k // columns + 1) * cell[0] - 1, plane[1])
            out[1:, one.end + 1 : other.start - 1] = origin + np.asarray(edge)[:, None]
    return max(plane)


def canvas_ids(ids: Ids, crops: Sequence[Crop], canvas: Canvas) -> Ids:
    """int32 [3, T] for the tokens of a prompt; ``crops`` in order, the whole of an image before
    its slices."""
    out = np.empty((3, len(ids)), np.int32)
    at = value = 0
    for group in _groups(ids, crops, canvas):
        for first, frame in enumerate(group):
            start, end = frame.whole.start - 1, (frame.slices or [frame.whole])[-1].end
            while end < len(ids) and ids[end] in canvas.boundary_tokens:
                end += 1
            frame.end = end if first == len(group) - 1 else min(end, len(ids))
            if start > at:
                out[:, at:start] = np.arange(value, value + start - at)
                value += start - at + (1 if first else 0)
            value += _put(out, frame, value) + 1
            at = frame.end
    out[:, at:] = np.arange(value, value + len(ids) - at)
    return out
