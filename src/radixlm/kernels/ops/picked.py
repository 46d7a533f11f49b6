"""A packed linear map over inputs in another order than they come in. Legend: T tokens, I inputs,
J columns of the packed weight, O outputs."""

from __future__ import annotations

from torch import Tensor

from radixlm.kernels.ops.linear import PackedLinear


class GatherLinear:
    """Column j of ``inner`` reads input ``index_J[j]``; an input may be read more than once, and
    its columns then add up."""

    def __init__(self, inner: PackedLinear, index_J: Tensor, num_in: int) -> None:
        self.inner, self.index_J, self._num_in = inner, index_J, num_in
        self.out_features = inner.out_features

    def run(self, x_TI: Tensor) -> Tensor:
        """See PackedLinear."""
        return self.inner.run(x_TI.index_select(-1, self.index_J))

    def unpack(self) -> Tensor:
        """See PackedLinear."""
        weight_OJ = self.inner.unpack()
        weight_OI = weight_OJ.new_zeros(weight_OJ.shape[0], self._num_in)
        return weight_OI.index_add_(1, self.index_J.to(weight_OJ.device), weight_OJ)
