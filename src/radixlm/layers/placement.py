"""Which outputs of a linear layer a rank computes, and what is gathered before and after it.

Layers are cut by outputs only: each output is one sum over all inputs, as on one rank, so that its
bits are the same. Cut points respect blocks of outputs that share a scale.
"""

from torch import Tensor

from radixlm.base.record import Record
from radixlm.distributed.groups import SOLO, Group
from radixlm.distributed.topology import bounds
from radixlm.kernels.ops.linear import PackedLinear

Bounds = tuple[int, ...]
Ranges = tuple[tuple[int, int], ...]

_PANELS = (64, 32, 16, 8, 4, 2, 1)  # outputs; the kernels store panels of 32


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
    for panel in _PANELS:
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
