"""How a checkpoint's tensors are brought into the layout of the layers, by tensor methods alone.

A recipe is ``recipe(tensor, cat) -> tensor``, where ``cat(tensors, dim)`` is ``torch.cat`` or
``numpy.concatenate``. It gets the tensor of one role after its templates were joined; for experts
that is the stack [experts, ...]. Recipes are functions or frozen records, so that equal
descriptions compare equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from radixlm.base.record import Record

Cat = Callable[[Sequence[Any], int], Any]
Recipe = Callable[[Any, Cat], Any]


class Computed(Record):
    """Recipes that compute new numbers: of 16 bit tensors in float32, which nothing rounds yet."""


class SelectRow(Record):
    """One row of a matrix."""

    index: int

    def __call__(self, tensor: Any, cat: Cat) -> Any:
        return tensor[self.index]


def transposed(tensor: Any, cat: Cat) -> Any:
    """[in, out] -> [out, in], [experts, in, out] -> [experts, out, in]; vectors stay."""
    return tensor if tensor.ndim == 1 else tensor.swapaxes(-1, -2)


def transposed_pair(tensor: Any, cat: Cat) -> Any:
    """Two of [in, out], one below the other -> [2 * out, in]; vectors stay."""
    if tensor.ndim == 1:
        return tensor
    half = tensor.shape[0] // 2
    return cat((tensor[:half].swapaxes(-1, -2), tensor[half:].swapaxes(-1, -2)), 0)


def interleaved(tensor: Any, cat: Cat) -> Any:
    """Rows gate, up, gate, up .. -> all gates, all ups (last axis of [.., 2 * inner])."""
    return cat((tensor[..., 0::2], tensor[..., 1::2]), -1)


def interleaved_middle(tensor: Any, cat: Cat) -> Any:
    """Rows gate, up, gate, up .. -> all gates, all ups, of every expert (second axis)."""
    return cat((tensor[:, 0::2], tensor[:, 1::2]), 1)


def offsets(tensor: Any, cat: Cat) -> Any:
    """Numbers, each less its place in the list."""
    return tensor + 1 - (tensor * 0 + 1).cumsum(0)


def distances_to_taps(tensor: Any, cat: Cat) -> Any:
    """Weights of a convolution by distance [width, channels] -> [channels, 1, width], the newest
    token's last."""
    rows = [tensor[i : i + 1] for i in reversed(range(tensor.shape[0]))]
    return cat(rows, 0).swapaxes(0, 1)[:, None]


class FirstRows(Record):
    """The first ``count`` rows, without the padding after them."""

    count: int

    def __call__(self, tensor: Any, cat: Cat) -> Any:
        return tensor[: self.count]


def interleaved_rows(tensor: Any, cat: Cat) -> Any:
    """Rows gate, up, gate, up .. -> all gates, all ups (first axis)."""
    return cat((tensor[0::2], tensor[1::2]), 0)


def interleaved_transposed(tensor: Any, cat: Cat) -> Any:
    """[experts, in, 2 * inner], columns gate, up, gate, up .. -> [experts, 2 * inner, in]."""
    return interleaved(tensor, cat).swapaxes(-1, -2)


def swapped_halves(tensor: Any, cat: Cat) -> Any:
    """Rows [up; gate] -> [gate; up]."""
    half = tensor.shape[0] // 2
    return cat((tensor[half:], tensor[:half]), 0)


def flat(tensor: Any, cat: Cat) -> Any:
    """Any shape -> one axis."""
    return tensor.reshape(-1)


def merge_heads(tensor: Any, cat: Cat) -> Any:
    """[heads, channels, ...] -> [heads * channels, ...]."""
    return tensor.reshape(-1, *tensor.shape[2:])


class TransposeExperts(Record):
    """Experts stored [experts, in, out] or [experts, out, in] -> the latter; ``width`` is in."""

    width: int

    def __call__(self, tensor: Any, cat: Cat) -> Any:
        return tensor if tensor.shape[-1] == self.width else tensor.swapaxes(-1, -2)


class GroupedQkv(Record):
    """Rows grouped by KV head, each [its q heads][k][v] -> [all q][all k][all v]."""

    kv_heads: int
    head_dim: int

    def __call__(self, tensor: Any, cat: Cat) -> Any:
        rest = tuple(tensor.shape[1:])
        grouped = tensor.reshape(self.kv_heads, -1, self.head_dim, *rest)
        parts = (grouped[:, :-2], grouped[:, -2], grouped[:, -1])
        return cat([part.reshape(-1, *rest) for part in parts], 0)


class SlicedQkv(Record):
    """Rows in ``slices`` slices, each [its parts in ``order``] -> [all q][all k][all v]."""

    slices: int
    order: tuple[str, str, str]

    def __call__(self, tensor: Any, cat: Cat) -> Any:
        rest = tuple(tensor.shape[1:])
        parts = tensor.reshape(self.slices, 3, -1, *rest)
        return cat([parts[:, self.order.index(one)].reshape(-1, *rest) for one in "qkv"], 0)


class GatedQkv(Record):
    """Rows [q][gate][k][v] -> each head's q and gate in turn, then [k][v]."""

    heads: int
    head_dim: int

    def widths(self, parts: tuple[int, ...]) -> tuple[int, ...]:
        """Rows of what is joined, of the rows (q with gate, k, v) of the layer."""
        return (parts[0] // 2, parts[0] // 2, *parts[1:])

    def __call__(self, tensor: Any, cat: Cat) -> Any:
        rest, rows = tuple(tensor.shape[1:]), self.heads * self.head_dim
        pairs = tensor[: 2 * rows].reshape(2, self.heads, self.head_dim, *rest)
        paired = pairs.swapaxes(0, 1).reshape(2 * rows, *rest)
        return cat([paired, tensor[2 * rows :]], 0)


class PerHead(Record):
    """Norm weights of all heads in one vector [heads * head_dim] -> [heads, head_dim]."""

    heads: int

    def __call__(self, tensor: Any, cat: Cat) -> Any:
        return tensor.reshape(self.heads, -1)


class Experts(Record):
    """``parts`` matrices joined by rows, each of all experts' rows -> [experts, rows, in]."""

    experts: int
    parts: int
    is_transposed: bool = False

    def __call__(self, tensor: Any, cat: Cat) -> Any:
        whole = tensor.reshape(self.parts, self.experts, -1, tensor.shape[-1])
        joined = cat([whole[part] for part in range(self.parts)], 1)
        return joined.swapaxes(-1, -2) if self.is_transposed else joined


class GroupedParts(Record):
    """Rows in ``groups`` groups, each with parts of ``sizes`` rows -> the parts ``take`` of all."""

    groups: int
    sizes: tuple[int, ...]
    take: tuple[int, ...]

    def __call__(self, tensor: Any, cat: Cat) -> Any:
        rest = tuple(tensor.shape[1:])
        grouped = tensor.reshape(self.groups, sum(self.sizes), *rest)
        parts = []
        for part in self.take:
            first = sum(self.sizes[:part])
            rows = grouped[:, first : first + self.sizes[part]]
            parts.append(rows.reshape(-1, *rest))
        return cat(parts, 0) if len(parts) > 1 else parts[0]


class QueriesThenPairs(Record):
    """Rows [q of all heads][k, v of each head] of ``heads`` heads -> all q, all k, all v."""

    heads: int
    dim: int

    def __call__(self, tensor: Any, cat: Cat) -> Any:
        rows = self.heads * self.dim
        pairs = GroupedParts(self.heads, (self.dim, self.dim), (0, 1))
        return cat([tensor[:rows], pairs(tensor[rows:], cat)], 0)


class DifferentialHeads(Record):
    """Rows [q][k][v], q in ``groups`` of ``ratio`` heads and one that is subtracted from each of
    them, k and v in pairs -> in each the first heads of all groups, then the others, those of q
    repeated ``ratio`` times."""

    groups: int
    ratio: int
    kv_heads: int
    dim: int

    def __call__(self, tensor: Any, cat: Cat) -> Any:
        dim, rest, per_group = self.dim, tuple(tensor.shape[1:]), self.ratio + 1
        rows = self.groups * per_group * dim
        q = tensor[:rows].reshape(self.groups, per_group, dim, *rest)
        repeated = cat([q[:, self.ratio :]] * self.ratio, 1)
        parts = [part.reshape(-1, *rest) for part in (q[:, : self.ratio], repeated)]
        pairs = GroupedParts(self.kv_heads // 2, (dim, dim), (0, 1))
        middle = rows + self.kv_heads * dim
        return cat([*parts, pairs(tensor[rows:middle], cat), pairs(tensor[middle:], cat)], 0)


class ScaleRows(Computed):
    """Runs of rows (count, factor), each times its factor; all of a matrix times ``inputs``, which
    multiplies what it reads and so no bias."""

    runs: tuple[tuple[int, float], ...]
    inputs: float = 1.0

    def __call__(self, tensor: Any, cat: Cat) -> Any:
        parts, first, inputs = [], 0, self.inputs if tensor.ndim > 1 else 1.0
        for count, factor in self.runs:
            parts.append(tensor[first : first + count] * (inputs * factor))
            first += count
        return cat(parts, 0)


class RepeatInterleave(Record):
    """Every row (every number of a vector) repeated ``times`` times; with ``columns`` a vector
    becomes a matrix of as many equal columns."""

    times: int
    columns: int = 0

    def __call__(self, tensor: Any, cat: Cat) -> Any:
        rest = tuple(tensor.shape[1:])
        rows = cat([tensor.reshape(-1, 1, *rest)] * self.times, 1).reshape(-1, *rest)
        return cat([rows.reshape(-1, 1)] * self.columns, 1) if self.columns else rows


class Scaled(Computed):
    """Every number times ``factor``."""

    factor: float

    def __call__(self, tensor: Any, cat: Cat) -> Any:
        return tensor * self.factor


class ZeroRows(Record):
    """A vector with ``count`` zeros put in at ``at``, for joined biases where one is missing."""

    at: int
    count: int

    def __call__(self, tensor: Any, cat: Cat) -> Any:
        zeros = (tensor[:1] * 0).repeat(self.count)
        return cat([tensor[: self.at], zeros, tensor[self.at :]], 0)


def message_queries(tensor: Any, cat: Cat) -> Any:
    """[layers, 4, in] -> rows; or of rows of queries and feed-forwards of each layer, above those
    of keys and values: queries, keys, values, feed-forwards of each layer."""
    if tensor.ndim == 3:
        return tensor.reshape(-1, tensor.shape[-1])
    half = tensor.shape[0] // 2
    places = [(at, half + at, half + at + 1, at + 1) for at in range(0, half, 2)]
    return cat([tensor[at : at + 1] for layer in places for at in layer], 0)


class JoinedTables(Computed):
    """A table of ``rows`` rows with the first row of another, which lies below it, added to each:
    what a token looks up in both, where it looks up that row. ``further``: how many rows below that
    one lies the first row of a third table; 0: there is none."""

    rows: int
    further: int = 0

    def __call__(self, tensor: Any, cat: Cat) -> Any:
        joined = tensor[: self.rows] + tensor[self.rows]
        return joined + tensor[self.rows + self.further] if self.further else joined


class NormalizeRows(Computed):
    """Every row [in] divided by its length."""

    def __call__(self, tensor: Any, cat: Cat) -> Any:
        return tensor / ((tensor * tensor).sum(-1, keepdims=True) ** 0.5).clip(1e-12)


class RankScaled(Computed):
    """A vector times sqrt(``width`` / its length)."""

    width: int

    def __call__(self, tensor: Any, cat: Cat) -> Any:
        return tensor * (self.width / tensor.shape[0]) ** 0.5


# those that change the order of rows only, so that quantized rows may stay as they are
ROW_ORDERS = (interleaved_middle, interleaved_rows)


def unit_biases_of_up(tensor: Any, cat: Cat) -> Any:
    """Of experts' [E, gate over up, in]: biases of gates, 0, over those of the other half, 1."""
    gates = no_biases(tensor, cat)
    return cat([gates[:, ::2], gates[:, ::2] + 1], 1)


def no_biases(tensor: Any, cat: Cat) -> Any:
    """Of experts' [E, out, in]: zeros [E, out]."""
    return tensor[..., 0] * 0
