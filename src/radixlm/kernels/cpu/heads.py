"""One linear map for each head. Legend: T tokens, H heads, I inputs, O outputs of a head."""

from collections.abc import Sequence

import torch
from torch import Tensor

from radixlm.kernels.cpu.extension import native
from radixlm.kernels.cpu.linear import PackedLinear


class HeadLinear:
    """y[:, h] = x[:, h] W_h^T; threads take whole heads."""

    def __init__(self, heads: Sequence[PackedLinear]) -> None:
        self._weights = tuple(heads)  # the extension knows addresses only
        self.num_heads, self.num_in = len(heads), heads[0].num_in
        self.num_out = heads[0].num_out
        self.handle = native().HeadLinear([head.handle for head in heads])

    def run(self, x_THI: Tensor, num_threads: int = 0) -> Tensor:
        """float32 [T, H, O], from any float x; heads need not be contiguous in the rows of x."""
        tokens, heads, width = x_THI.shape
        if (heads, width) != (self.num_heads, self.num_in):
            raise ValueError(f"x: {heads} heads of {width}, not {self.num_heads} of {self.num_in}")
        if x_THI.dtype != torch.float32 or (x_THI.stride(2) != 1 and width > 1):
            x_THI = x_THI.float().contiguous()
        out = torch.empty(tokens, heads, self.num_out)
        self.handle.run(
            x_THI.data_ptr(), x_THI.stride(0), x_THI.stride(1), tokens,
            out.data_ptr(), heads * self.num_out, self.num_out, num_threads,
        )  # fmt: skip
        return out
