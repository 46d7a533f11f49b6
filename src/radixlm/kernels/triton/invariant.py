"""Linear maps and experts whose rows have the same bits in every batch: one kernel with one tile,
whatever the number of rows (``--enable-deterministic-inference``). cuBLAS and the faster ways of
``linear.py`` and ``moe.py`` are chosen by the number of rows.

Legend: T tokens, H heads, I inputs, O outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from radixlm.base.errors import ConfigError
from radixlm.kernels.dispatch import INVARIANT, INVARIANT_OPS, implements
from radixlm.kernels.ops import linear as reference
from radixlm.kernels.triton import linear, moe
from radixlm.kernels.triton.gemm import INVARIANT_ROWS, choose_tile, product_by_expert
from radixlm.kernels.triton.gemm_pack import pack
from radixlm.kernels.triton.mode import interpreting
from radixlm.kernels.triton.moe_align import align


def _kept(op: str, packing: Callable[..., Any]) -> Callable[..., Any]:
    """``packing``, whose result is told to keep its rows independent of the batch. ConfigError
    where it gives the torch reference."""

    @functools.wraps(packing)
    def packed(*weights: Any, **options: Any) -> Any:
        made = packing(*weights, **options)
        inner = made.inner if isinstance(made, reference.Gated) else made
        if not hasattr(inner, "keep_batch_invariant"):
            raise ConfigError(
                f"--enable-deterministic-inference: {op} of such weights runs in torch here, whose "
                "rows depend on the batch; --dtype bfloat16 without --quantization works"
            )
        inner.keep_batch_invariant()
        return made

    return packed


class InvariantHeadLinear:
    """One linear map a head: an expert that every token chooses."""

    def __init__(self, weight_HOI: Tensor) -> None:
        self._packed = pack(weight_HOI, None, "")

    def run(self, x_THI: Tensor) -> Tensor:
        """[T, H, O] in the dtype of x."""
        packed, (tokens, heads, num_in) = self._packed, x_THI.shape
        out = x_THI.new_empty(tokens * heads, packed.num_out)
        if tokens:
            ids_TH = torch.arange(heads, device=x_THI.device).expand(tokens, heads)
            tile = choose_tile(packed, INVARIANT_ROWS, x_THI.dtype, heads)
            x = x_THI.reshape(tokens * heads, num_in)
            product_by_expert(x, packed, align(ids_TH, heads, tile.m), tile, out, top_k=1)
        return out.view(tokens, heads, packed.num_out)


def pack_head_linear(weight_HOI: Tensor) -> reference.HeadLinear:
    """See kernels/ops/linear.py."""
    return InvariantHeadLinear(weight_HOI)


_PACKING = {
    "pack_linear": _kept("pack_linear", linear.pack_linear),
    "pack_gated": _kept("pack_gated", linear.pack_gated),
    "pack_tied": _kept("pack_tied", linear.pack_tied),
    "pack_head_linear": pack_head_linear,
    "pack_experts": _kept("pack_experts", moe.pack_experts),
}
for _op in INVARIANT_OPS:
    for _device in ("cuda", *(["cpu"] if interpreting() else [])):
        implements(_op, name=INVARIANT, device=_device, is_default=False)(_PACKING[_op])
