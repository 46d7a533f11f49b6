"""Which outputs of a linear layer a rank computes, and what is gathered before and after it.

Layers are cut by outputs only: each output is one sum over all inputs, as on one rank, so that its
bits are the same. Cut points respect blocks of outputs that share a scale.
"""

from itertools import pairwise

from torch import Tensor

from radixlm.base.record import Record
from radixlm.distributed.groups import SOLO, Group
from radixlm.distributed.topology import bounds
from radixlm.kernels.ops.linear import PackedLinear, TiedTable
from radixlm.quant.param import Cut, Param

Bounds = tuple[int, ...]
Ranges = tuple[tuple[int, int], ...]

PANEL = 32  # outputs that the kernels store together
_STEPS = (2 * PANEL, PANEL, 16, 8, 4, 2, 1)


class Placement(Record, eq=False):
    """How the ranks of ``group`` hold a layer.

    rows: this rank's ranges of the weight's rows, in whose order it has the outputs; () for all.
    inputs: cut points of the inputs where each rank brings its own; () where all have all.
    outputs: cut points of the outcomes that are gathered, on rank 0 alone with ``to_first``.
    """

    group: Group = SOLO
    rows: Ranges = ()
    inputs: Bounds = ()
    outputs: Bounds = ()
    to_first: bool = False


WHOLE = Placement()


def even_bounds(total: int, group: Group, together: int = 1) -> Bounds | None:
    """Cut points that give each rank of the group about as many of ``total`` outputs, in whole
    panels where there are enough; None for fewer blocks of ``together`` outputs than ranks."""
    if group.size == 1:
        return None
    for panel in _STEPS:
        step = max(panel, together)
        if -(-total // step) >= group.size:
            return bounds(total, group.size, step)
    return None


def evenly(total: int, group: Group, together: int, num_parts: int = 1) -> Placement:
    """Each rank computes a part of ``total`` outcomes, which all get; whole where that is not
    possible. An outcome needs a row of each of ``num_parts`` matrices (gate and up)."""
    if num_parts > 1 and total % together:
        return WHOLE
    cut = even_bounds(total, group, together)
    if cut is None:
        return WHOLE
    begin, end = cut[group.rank], cut[group.rank + 1]
    rows = tuple((part * total + begin, part * total + end) for part in range(num_parts))
    return Placement(group, rows, outputs=cut)


class CutLinear:
    """A packed part of a linear layer between its collectives."""

    def __init__(self, inner: PackedLinear, place: Placement) -> None:
        self.inner, self.place = inner, place
        self.out_features = place.outputs[-1] if place.outputs else inner.out_features

    def run(self, x_TI: Tensor) -> Tensor:
        """[T, O] of all outputs, or of this rank's where the placement gathers none."""
        return self.gathered(self.inner.run(self.whole_inputs(x_TI)))

    def whole_inputs(self, x_TI: Tensor) -> Tensor:
        """The inputs of all ranks."""
        place = self.place
        return place.group.all_gather_columns(x_TI, place.inputs) if place.inputs else x_TI

    def gathered(self, y_TO: Tensor) -> Tensor:
        """The outcomes of all ranks, of any leading dimensions."""
        place = self.place
        if not place.outputs:
            return y_TO
        flat = y_TO.reshape(-1, y_TO.shape[-1])
        if place.to_first:
            whole = place.group.gather_columns(flat, place.outputs)
            return flat.new_empty(0, self.out_features) if whole is None else whole
        whole = place.group.all_gather_columns(flat, place.outputs)
        return whole.view(*y_TO.shape[:-1], self.out_features)

    def unpack(self) -> Tensor:
        """This rank's rows of the weight."""
        return self.inner.unpack()


def cut_table(table: TiedTable, vocab: int, group: Group) -> TiedTable | CutLinear:
    """The head of a table that each rank holds whole: a rank computes a range of the vocabulary
    where the kernels can, and rank 0 gets all logits."""
    cut = even_bounds(vocab, group, PANEL)
    take = getattr(table, "part", None)
    if cut is None or take is None:
        return table
    rows = cut[group.rank], cut[group.rank + 1]
    return CutLinear(take(*rows), Placement(group, (rows,), outputs=cut, to_first=True))


class HeadCut(Record, eq=False):
    """Which heads of an attention a rank computes: whole KV heads with their queries; with fewer KV
    heads than ranks, a part of one KV head's queries, and a copy of its keys and values. ``heads``
    are the query heads' cut points, () for all heads on each rank; ``kv`` this rank's range."""

    group: Group = SOLO
    heads: Bounds = ()
    kv_heads: int = 0
    kv: tuple[int, int] = (0, 0)

    @property
    def own(self) -> tuple[int, int]:
        """This rank's query heads."""
        return self.heads[self.group.rank], self.heads[self.group.rank + 1]

    def place(self, query: int, *kv: int) -> Placement | None:
        """Of joined projections of ``query`` numbers a query head and ``kv`` numbers a KV head; the
        outcome stays local. None for all heads."""
        if not self.heads:
            return None
        rows, first = [(self.own[0] * query, self.own[1] * query)], self.heads[-1] * query
        for width in kv:
            rows.append((first + self.kv[0] * width, first + self.kv[1] * width))
            first += self.kv_heads * width
        return Placement(self.group, tuple(row for row in rows if row[1]))

    def inputs(self, width: int) -> Bounds:
        """Cut points of the heads' outcomes of ``width`` numbers each."""
        return tuple(head * width for head in self.heads)

    def cut(self, param: Param, kv: bool = False) -> Param:
        """A parameter with one entry a head, which becomes this rank's part of it."""
        if not self.heads:
            return param
        whole = self.kv_heads if kv else self.heads[-1]
        return param.cut(Cut(0, whole, (self.kv if kv else self.own,)))


ALL_HEADS = HeadCut()


def cut_heads(heads: int, kv_heads: int, group: Group, together: int = 1) -> HeadCut:
    """A division of ``kv_heads`` and their queries, in multiples of ``together`` KV heads;
    ``ALL_HEADS`` where a rank would be left without any."""
    size, each = group.size, heads // kv_heads
    if size == 1:
        return ALL_HEADS
    if size <= kv_heads:
        kv = bounds(kv_heads, size, together)
        cut = tuple(head * each for head in kv)
        own = kv[group.rank], kv[group.rank + 1]
    else:
        ranks = bounds(size, kv_heads)  # the ranks of each KV head
        parts = (bounds(each, end - begin) for begin, end in pairwise(ranks))
        cut = (0, *(k * each + end for k, part in enumerate(parts) for end in part[1:]))
        own_head = next(k for k, end in enumerate(ranks[1:]) if group.rank < end)
        own = own_head, own_head + 1
    if any(begin == end for begin, end in pairwise(cut)) or (together > 1 and size > kv_heads):
        return ALL_HEADS
    return HeadCut(group, cut, kv_heads, own)
