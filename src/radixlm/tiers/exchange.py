"""Pages between ranks that keep unequal parts of them: other heads (tensor parallelism) or other
layers (pipeline stages). The source cuts what the target lacks, and the target puts it in place.

Both know both manifests. Tensors of a page are compared one by one: where they differ in one axis,
that is the axis of the heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from radixlm.base.record import Record
from radixlm.tiers.manifest import Manifest

Bytes = NDArray[np.uint8]


class Unequal(ValueError):
    """Pages that cannot be moved between two ranks."""


class _Tensor(Record):
    """A tensor of a page: uint8 [layers, ..., item bytes] at ``start`` of the page's bytes."""

    shape: tuple[int, ...]
    start: int
    end: int

    def of(self, payload: Bytes) -> Bytes:
        return payload[self.start : self.end].reshape(self.shape)


class _Move(Record, eq=False):
    source: _Tensor
    target: _Tensor
    from_: tuple[slice, ...]
    to: tuple[slice, ...]


def tensors(manifest: Manifest, space: int) -> list[_Tensor]:
    """The tensors of a page as bytes."""
    return [
        _Tensor((one.layers, *one.shape, one.item_bytes), one.start, one.end)
        for one in manifest.tensors(space)
    ]


class Exchange:
    """What one rank's pages of a space have of another's; Unequal if it cannot be said."""

    def __init__(self, source: Manifest, target: Manifest, space: int) -> None:
        mine, theirs = tensors(source, space), tensors(target, space)
        self.is_same = (
            source.layout == target.layout
            and source.rectangle.name.rpartition("_")[0] == target.rectangle.name.rpartition("_")[0]
            and source.page_bytes == target.page_bytes
        )
        self.has_flag = [
            manifest.page_bytes[space] == (parts[-1].end if parts else 0) + 1
            for manifest, parts in ((source, mine), (target, theirs))
        ]
        if not self.is_same and any(g.states for g in source.groups if g.space == space):
            raise Unequal("recurrent states move between equal ranks only")
        self._moves = [] if self.is_same else _moves(source, target, mine, theirs, space)
        self.num_bytes = source.page_bytes[space]
        if not self.is_same:
            sizes = (move.target.of(_zeros(target, space))[move.to].size for move in self._moves)
            self.num_bytes = sum(sizes) + self.has_flag[1]

    def cut(self, payload: Bytes) -> Bytes:
        """The target's part of a source's page, uint8 [num_bytes]."""
        parts = [move.source.of(payload)[move.from_].reshape(-1) for move in self._moves]
        if self.has_flag[1]:
            parts.append(payload[-1:] if self.has_flag[0] else np.zeros(1, np.uint8))
        return np.concatenate(parts)

    def paste(self, data: Bytes, payload: Bytes) -> None:
        """Put what ``cut`` gave into a page of the target."""
        at = 0
        for move in self._moves:
            place = move.target.of(payload)[move.to]
            place[...] = data[at : at + place.size].reshape(place.shape)
            at += place.size
        if self.has_flag[1]:
            payload[-1] |= data[-1]


def _zeros(manifest: Manifest, space: int) -> Bytes:
    return np.zeros(manifest.page_bytes[space], np.uint8)


def _moves(
    source: Manifest,
    target: Manifest,
    mine: Sequence[_Tensor],
    theirs: Sequence[_Tensor],
    space: int,
) -> list[_Move]:
    layers, heads = overlap(source, target)
    num_groups = sum(group.space == space for group in source.groups)
    a, b = source.rectangle, target.rectangle
    if num_groups > 1 and (a.first_layer, a.end_layer) != (b.first_layer, b.end_layer):
        raise Unequal("several kinds of layers move between equal pipeline stages only")
    found = []
    for one, other in zip(mine, theirs, strict=False):  # drafts, which come last, are rank 0's
        if len(one.shape) != len(other.shape) or one.shape[-1] != other.shape[-1]:
            raise Unequal(f"layouts {source.layout} and {target.layout}")
        axes = [i for i in range(1, len(one.shape) - 1) if one.shape[i] != other.shape[i]]
        if len(axes) > 1:
            raise Unequal(f"layouts {source.layout} and {target.layout}")
        from_, to = [slice(None)] * len(one.shape), [slice(None)] * len(one.shape)
        if one.shape[0] == a.end_layer - a.first_layer != other.shape[0] or num_groups == 1:
            is_own = one.shape[0] == a.end_layer - a.first_layer
            if is_own and other.shape[0] == b.end_layer - b.first_layer:
                from_[0] = slice(layers[0] - a.first_layer, layers[1] - a.first_layer)
                to[0] = slice(layers[0] - b.first_layer, layers[1] - b.first_layer)
            elif one.shape[0] != other.shape[0]:
                raise Unequal("drafts of other models")
        if axes:
            (axis,) = axes
            from_[axis] = _scaled(heads, a.first_head, a.end_head, one.shape[axis])
            to[axis] = _scaled(heads, b.first_head, b.end_head, other.shape[axis])
        found.append(_Move(one, other, tuple(from_), tuple(to)))
    return found


def _scaled(heads: tuple[int, int], first: int, end: int, size: int) -> slice:
    """Heads of the model as places of an axis that has ``size`` places for [first, end)."""
    each, rest = divmod(size, end - first)
    if rest or not each:
        raise Unequal(f"{size} places for heads {first} to {end}")
    return slice((heads[0] - first) * each, (heads[1] - first) * each)


def overlap(a: Manifest, b: Manifest) -> tuple[tuple[int, int], tuple[int, int]]:
    """(layers, heads) that two ranks both keep, each [first, end)."""
    one, other = a.rectangle, b.rectangle
    layers = max(one.first_layer, other.first_layer), min(one.end_layer, other.end_layer)
    heads = max(one.first_head, other.first_head), min(one.end_head, other.end_head)
    return layers, heads


def cover(target: Manifest, sources: Sequence[Manifest]) -> list[int]:
    """Indexes of sources that have all of the target's pages together, the one of the same rank
    first; Unequal if they do not."""
    mine = target.rectangle
    lacks = {
        (layer, head)
        for layer in range(mine.first_layer, mine.end_layer)
        for head in range(mine.first_head, mine.end_head)
    }
    chosen: list[int] = []
    order = sorted(range(len(sources)), key=lambda i: sources[i].rectangle != mine)
    for index in order:
        layers, heads = overlap(sources[index], target)
        has = {(i, j) for i in range(*layers) for j in range(*heads)} & lacks
        if has:
            chosen.append(index)
            lacks -= has
    if lacks or not chosen:
        raise Unequal("the peer's ranks lack layers or heads")
    return chosen
