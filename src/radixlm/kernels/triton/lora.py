"""LoRA adapters: see kernels/ops/lora.py. A program handles a tile of one sequence's tokens, which
all have the same adapter, so nothing is sorted and an adapter is read once for each tile.

Legend: T packed tokens, S sequences, L adapters loaded, I input channels, O output channels,
N outputs joined, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixlm.kernels.ops import lora as reference
from radixlm.kernels.ops.lora import AdapterRows
from radixlm.kernels.triton.mode import cast, operand, runs_on
from radixlm.kernels.triton.variant import POINTERS, Variant

MAX_RANK = 128
_TOKENS = 16  # of a tile
_VIEWS = ["adapter_ptr", "start_ptr"]  # of the step's numbers


@triton.jit
def _dot(x, w, acc):
    """acc + x w; exact products where the numbers are float32."""
    return tl.dot(operand(x), operand(w), acc, input_precision="ieee")


# tiles and places change from step to step, which must not mean another compilation
@triton.jit(do_not_specialize=["tiles"], do_not_specialize_on_alignment=_VIEWS)
def shrink_kernel(
    x_ptr, a_ptr, h_ptr, adapter_ptr, start_ptr, tiles, num_in, num_rows, x_stride,
    TOKENS: tl.constexpr, DEPTH: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Program (s * tiles + m, j): tile m of sequence s, rows j of A [N * R, I]."""
    sequence, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    end = tl.load(start_ptr + sequence + 1)
    first = tl.load(start_ptr + sequence) + tile * TOKENS
    if first >= end:
        return
    adapter = tl.load(adapter_ptr + sequence).to(tl.int64)
    token = first + tl.arange(0, TOKENS).to(tl.int64)
    rank = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    is_token, is_rank = (token < end)[:, None], rank < num_rows
    acc = tl.zeros((TOKENS, RANKS), tl.float32)
    if adapter >= 0:
        a_ptr += adapter * num_rows * num_in
        for begin in range(0, num_in, DEPTH):
            channel = begin + tl.arange(0, DEPTH)
            inside = channel < num_in
            x_at = x_ptr + token[:, None] * x_stride + channel[None, :]
            x = tl.load(x_at, mask=is_token & inside[None, :], other=0.0)
            a_at = a_ptr + rank[None, :] * num_in + channel[:, None]
            a = tl.load(a_at, mask=is_rank[None, :] & inside[:, None], other=0.0)
            acc = _dot(x, a, acc)
    tl.store(h_ptr + token[:, None] * num_rows + rank[None, :], acc, mask=is_token & is_rank)


@triton.jit(do_not_specialize=["tiles"], do_not_specialize_on_alignment=_VIEWS)
def expand_kernel(
    y_ptr, h_ptr, b_ptr, scale_ptr, part_ptr, adapter_ptr, start_ptr,
    tiles, num_out, rank, num_parts, y_stride,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Program (s * tiles + m, n, j): tile m of sequence s, block j of output n."""
    sequence, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    part = tl.program_id(1)
    end = tl.load(start_ptr + sequence + 1)
    first = tl.load(start_ptr + sequence) + tile * TOKENS
    adapter = tl.load(adapter_ptr + sequence).to(tl.int64)
    begin = tl.load(part_ptr + part) + tl.program_id(2) * WIDTH
    part_end = tl.load(part_ptr + part + 1)
    if (first >= end) | (adapter < 0) | (begin >= part_end):
        return
    token = first + tl.arange(0, TOKENS).to(tl.int64)
    out, r = begin + tl.arange(0, WIDTH), tl.arange(0, RANKS)
    is_token, is_out, is_rank = (token < end)[:, None], (out < part_end)[None, :], r < rank
    h_at = h_ptr + (token[:, None] * num_parts + part) * rank + r[None, :]
    h = tl.load(h_at, mask=is_token & is_rank[None, :], other=0.0)
    b_at = b_ptr + adapter * num_out * rank + out[None, :] * rank + r[:, None]
    b = tl.load(b_at, mask=is_out & is_rank[:, None], other=0.0)
    delta = _dot(cast(h, b_ptr.dtype.element_ty), b, tl.zeros((TOKENS, WIDTH), tl.float32))
    at = y_ptr + token[:, None] * y_stride + out[None, :]
    y = tl.load(at, mask=is_token & is_out, other=0.0).to(tl.float32)
    y += delta * tl.load(scale_ptr + adapter)
    tl.store(at, cast(y, y_ptr.dtype.element_ty), mask=is_token & is_out)


def _takes(x: Tensor, weight: Tensor, rank: int) -> bool:
    fits = weight.dtype == x.dtype and weight.is_contiguous() and x.stride(-1) == 1
    return runs_on(x) and x.dtype in POINTERS and fits and 0 < rank <= MAX_RANK and x.numel() > 0


def _ranks(rank: int, max_rank: int) -> int:
    return min(max_rank, max(16, int(triton.next_power_of_2(rank))))


def _tile(dtype: torch.dtype) -> tuple[int, int]:
    """Input channels at a time, and output channels, of a tile."""
    return (64, 32) if dtype == torch.float32 else (128, 64)


def lora_shrink(x_TI: Tensor, a_LNRI: Tensor, rows: AdapterRows) -> Tensor:
    """See kernels/ops/lora.py. Every token belongs to a sequence."""
    _, parts, rank, num_in = a_LNRI.shape
    if not _takes(x_TI, a_LNRI, rank):
        return reference.lora_shrink(x_TI, a_LNRI, rows)
    h_TNR = torch.empty(x_TI.shape[0], parts, rank, dtype=torch.float32, device=x_TI.device)
    tiles, ranks = triton.cdiv(rows.max_query_len, _TOKENS), _ranks(parts * rank, 64)
    depth, _ = _tile(x_TI.dtype)
    grid = (rows.adapter_S.shape[0] * tiles, triton.cdiv(parts * rank, ranks))
    shrink_kernel[grid](
        x_TI, a_LNRI, h_TNR, rows.adapter_S, rows.query_start_S1, tiles, num_in, parts * rank,
        x_TI.stride(0), TOKENS=_TOKENS, DEPTH=depth, RANKS=ranks, num_warps=4, num_stages=3,
    )  # fmt: skip
    return h_TNR


def lora_expand_(
    y_TO: Tensor,
    h_TNR: Tensor,
    b_LOR: Tensor,
    scale_L: Tensor,
    widths_N: Sequence[int],
    rows: AdapterRows,
) -> None:
    """See kernels/ops/lora.py."""
    parts, rank = h_TNR.shape[1:]
    if not _takes(y_TO, b_LOR, rank):
        reference.lora_expand_(y_TO, h_TNR, b_LOR, scale_L, widths_N, rows)
        return
    starts = _part_starts(tuple(widths_N), y_TO.device)
    tiles, (_, width) = triton.cdiv(rows.max_query_len, _TOKENS), _tile(y_TO.dtype)
    grid = (rows.adapter_S.shape[0] * tiles, parts, triton.cdiv(max(widths_N), width))
    expand_kernel[grid](
        y_TO, h_TNR, b_LOR, scale_L, starts, rows.adapter_S, rows.query_start_S1,
        tiles, b_LOR.shape[1], rank, parts, y_TO.stride(0),
        TOKENS=_TOKENS, WIDTH=width, RANKS=_ranks(rank, MAX_RANK), num_warps=4, num_stages=2,
    )  # fmt: skip


_STARTS: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}


def _part_starts(widths_N: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 [N + 1]; kept, so that a graph that was recorded with it can be replayed."""
    key = (widths_N, device)
    if key not in _STARTS:
        bounds = [sum(widths_N[:n]) for n in range(len(widths_N) + 1)]
        _STARTS[key] = torch.tensor(bounds, dtype=torch.int32, device=device)
    return _STARTS[key]


def variants() -> tuple[Variant, ...]:
    """Each dtype and block of ranks."""
    found = []
    for dtype, pointer in POINTERS.items():
        depth, width = _tile(dtype)
        common = {
            "h_ptr": "*fp32",
            "adapter_ptr": "*i32:1",
            "start_ptr": "*i32:1",
            "tiles": "i32",
        }
        for ranks in (16, 32, 64):
            signature = common | {"x_ptr": pointer, "a_ptr": pointer, "num_rows": "i32"}
            signature |= {"num_in": "i32:16", "x_stride": "i32:16"}
            constants = {"TOKENS": _TOKENS, "DEPTH": depth, "RANKS": ranks}
            name = f"shrink-{pointer}-{ranks}"
            found.append(Variant(name, shrink_kernel, signature, constants, 4, 3))
        for ranks in (16, 32, 64, 128):
            signature = common | {"y_ptr": pointer, "b_ptr": pointer, "scale_ptr": "*fp32"}
            signature |= {"part_ptr": "*i32", "rank": "i32", "num_parts": "i32"}
            signature |= {"num_out": "i32:16", "y_stride": "i32:16"}
            constants = {"TOKENS": _TOKENS, "WIDTH": width, "RANKS": ranks}
            name = f"expand-{pointer}-{ranks}"
            found.append(Variant(name, expand_kernel, signature, constants, 4, 2))
    return tuple(found)
