"""Experts of a layer on a GPU. Three implementations, by the number of tokens of a step:

    up to 8        one program a (token, expert, block of outputs): ``moe_gemv``
    up to 2,048    slots sorted by expert, two grouped products: ``moe_align`` + ``gemm_tile``
    more           torch's grouped product where weights are 16 bit floats without biases

No way waits for the device or adds floats in an order that may change: a step gives the same bits
every time. The ways differ in their last bits.

Legend: T tokens, E experts, K chosen experts, S = T * K slots, D channels, I inner channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from radixlm.kernels.ops import moe as reference
from radixlm.kernels.ops.activation import NO_LIMIT, GateLimit
from radixlm.kernels.ops.fp8 import FORMATS as FP8_FORMATS
from radixlm.kernels.ops.quantized import FORMATS
from radixlm.kernels.triton import gemm_tile as kinds
from radixlm.kernels.triton.activation import CODES, SWISH, gated_pairs
from radixlm.kernels.triton.gemm import (
    INVARIANT_ROWS,
    Packed,
    choose_tile,
    fits,
    product_by_expert,
)
from radixlm.kernels.triton.gemm_fp8 import quantize_groups, quantize_rows
from radixlm.kernels.triton.gemm_pack import pack
from radixlm.kernels.triton.launch import cdiv, launch
from radixlm.kernels.triton.mode import FLOATS, runs_on
from radixlm.kernels.triton.moe_align import align
from radixlm.kernels.triton.moe_gemv import gemv_down, gemv_up

GEMV_TOKENS = 8
GROUPED_TOKENS = 2048
_TORCH_ALIGNMENT = 8  # channels, of torch's grouped product
_BLOCK_D = 1024


@triton.jit
def combine_kernel(
    slots_ptr, out_ptr, ids_ptr, dim, TOP_K: tl.constexpr, SKIPS: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (token, block): the sum of a token's slots, in their order; with SKIPS without those
    of id -1."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < dim
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        slot = token * TOP_K + choice
        width = dim
        if SKIPS:
            width = tl.where(tl.load(ids_ptr + slot) >= 0, dim, 0)
        at = slots_ptr + slot * dim + col
        total += tl.load(at, mask=col < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * dim + col, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def combine_sorted_kernel(
    sorted_ptr, position_ptr, weight_ptr, out_ptr, dim, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """As ``combine_kernel``, of rows sorted by expert that carry no weight yet."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < dim
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        slot = token * TOP_K + choice
        row = tl.load(position_ptr + slot).to(tl.int64)
        y = tl.load(sorted_ptr + row * dim + col, mask=mask, other=0.0).to(tl.float32)
        total += y * tl.load(weight_ptr + slot)
    tl.store(out_ptr + token * dim + col, total.to(out_ptr.dtype.element_ty), mask=mask)


class TritonExperts:
    """``PackedExperts`` of the op; one expert may come twice for a token."""

    def __init__(self, up: Packed, down: Packed) -> None:
        self.up, self.down = up, down
        self.num_experts = int(up.data.shape[0])
        self._tile_rows: int | None = None
        sizes = (up.num_out, up.num_in, down.num_out, down.num_in)
        self._fits_torch = (
            up.kind == down.kind == kinds.PLAIN
            and up.bias is None
            and down.bias is None
            and up.data.dtype == torch.bfloat16
            and all(size % _TORCH_ALIGNMENT == 0 for size in sizes)
            and hasattr(F, "grouped_mm")
        )

    def keep_batch_invariant(self) -> None:
        """From now on take one way with one tile, whatever the batch."""
        self._tile_rows = INVARIANT_ROWS

    def run(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """See kernels/ops/moe.py."""
        x_TD = x_TD if x_TD.stride(-1) == 1 else x_TD.contiguous()
        weights_TK, ids_TK = weights_TK.float().contiguous(), ids_TK.contiguous()
        if not x_TD.shape[0]:
            return torch.empty_like(x_TD)
        tokens = x_TD.shape[0]
        if self._tile_rows is not None:
            return self.run_sorted(x_TD, weights_TK, ids_TK)
        if tokens <= GEMV_TOKENS and self.up.act in SWISH:
            return self.run_few(x_TD, weights_TK, ids_TK)
        is_known = self._fits_torch and x_TD.is_cuda and x_TD.dtype == torch.bfloat16
        if tokens > GROUPED_TOKENS and is_known:
            return self.run_grouped_mm(x_TD, weights_TK, ids_TK)
        return self.run_sorted(x_TD, weights_TK, ids_TK)

    def run_some(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """``run`` without the choices whose id is -1."""
        x_TD = x_TD if x_TD.stride(-1) == 1 else x_TD.contiguous()
        weights_TK, ids_TK = weights_TK.float().contiguous(), ids_TK.contiguous()
        if not x_TD.shape[0]:
            return torch.empty_like(x_TD)
        is_few = x_TD.shape[0] <= GEMV_TOKENS and self.up.act in SWISH
        run = self.run_few if is_few and self._tile_rows is None else self.run_sorted
        return run(x_TD, weights_TK, ids_TK, skips=True)

    def run_few(
        self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, skips: bool = False
    ) -> Tensor:
        """Each slot by itself; with ``skips`` not those of id -1."""
        h_SI = gemv_up(x_TD, self.up, ids_TK, skips)
        return gemv_down(h_SI, self.down, ids_TK, weights_TK, skips)

    def run_sorted(
        self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, skips: bool = False
    ) -> Tensor:
        """Slots sorted by expert and padded to tiles. The first product applies the activation, the
        second one the routing weights."""
        tokens, top_k = ids_TK.shape
        rows = self._tile_rows or -(-tokens * top_k // self.num_experts)
        busy = self.num_experts if self._tile_rows else min(self.num_experts, tokens * top_k)
        up_tile = choose_tile(self.up, rows, x_TD.dtype, busy)
        down_tile = choose_tile(self.down, rows, x_TD.dtype, busy)
        aligned = align(ids_TK, self.num_experts, up_tile.m)
        h_SI = x_TD.new_empty(tokens * top_k, self.up.width)
        x, x_scale = quantized(x_TD, self.up)
        product_by_expert(x, self.up, aligned, up_tile, h_SI, top_k=top_k, x_scale=x_scale)
        if down_tile.m != up_tile.m:  # kinds that differ
            aligned = align(ids_TK, self.num_experts, down_tile.m)
        out_SD = x_TD.new_empty(tokens * top_k, self.down.width)
        h, h_scale = quantized(h_SI, self.down)
        product_by_expert(
            h, self.down, aligned, down_tile, out_SD,
            top_k=1, x_scale=h_scale, row_weights=weights_TK,
        )  # fmt: skip
        return _combined(out_SD, ids_TK, skips)

    def run_grouped_mm(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """Rows gathered by expert, torch's grouped product, rows summed by token."""
        tokens, top_k = ids_TK.shape
        aligned = align(ids_TK, self.num_experts, 1)
        order_S = aligned.slots[: tokens * top_k].long()
        position_S = torch.empty_like(aligned.slots[: tokens * top_k])
        position_S[order_S] = torch.arange(tokens * top_k, dtype=torch.int32, device=x_TD.device)
        ends = aligned.ends.contiguous()
        rows = x_TD[order_S // top_k]
        pairs = F.grouped_mm(rows, self.up.data.transpose(1, 2), offs=ends)
        h_SI = gated_pairs(pairs, self.up.act)
        out_SD = F.grouped_mm(h_SI, self.down.data.transpose(1, 2), offs=ends)
        out_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
        dim = out_TD.shape[1]
        launch(
            combine_sorted_kernel, (tokens, cdiv(dim, _BLOCK_D)),
            (out_SD, position_S, weights_TK, out_TD), (dim,), TOP_K=top_k, BLOCK=_BLOCK_D
        )  # fmt: skip
        return out_TD


def quantized(x: Tensor, packed: Packed) -> tuple[Tensor, Tensor | None]:
    """x in the format that products with ``packed`` take, and its scale."""
    if packed.kind == kinds.W8A8:
        return quantize_rows(x, torch.int8)
    if packed.kind == kinds.FP8:
        return quantize_rows(x)
    if packed.kind == kinds.FP8_BLOCK:
        return quantize_groups(x)
    return x, None


def _combined(out_SD: Tensor, ids_TK: Tensor, skips: bool) -> Tensor:
    tokens, top_k = ids_TK.shape
    if top_k == 1 and not skips:
        return out_SD
    dim = out_SD.shape[1]
    out_TD = out_SD.new_empty(tokens, dim)
    launch(
        combine_kernel, (tokens, cdiv(dim, _BLOCK_D)),
        (out_SD, out_TD, ids_TK), (dim,), TOP_K=top_k, SKIPS=skips, BLOCK=_BLOCK_D
    )  # fmt: skip
    return out_TD


def pack_experts(
    up_E2ID: Tensor,
    down_EDI: Tensor,
    up_bias_E2I: Tensor | None,
    down_bias_ED: Tensor | None,
    act: str,
    fmts: tuple[str, str] = ("", ""),
    scales: reference.ExpertScales = (None, None),
    limit: GateLimit = NO_LIMIT,
) -> reference.PackedExperts:
    """See kernels/ops/moe.py; formats of kernels/ops/quantized.py and fp8.py."""
    known = ("", *FORMATS, *FP8_FORMATS)
    weights = (up_E2ID, down_EDI)
    is_known = act in CODES and runs_on(up_E2ID) and set(fmts) <= set(known)
    is_fit = all(
        stored is not None or (weight.dtype in FLOATS and fits(fmt, weight.dtype))
        for weight, fmt, stored in zip(weights, fmts, scales, strict=True)
    )
    if limit[0] or not (is_known and is_fit):
        biases = up_bias_E2I, down_bias_ED
        return reference.pack_experts(*weights, *biases, act, fmts, scales, limit)
    up = pack(up_E2ID, up_bias_E2I, fmts[0], act, scales[0])
    return TritonExperts(up, pack(down_EDI, down_bias_ED, fmts[1], "", scales[1]))
