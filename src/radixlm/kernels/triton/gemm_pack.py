"""From float weights to what ``gemm_tile`` reads. Legend: E experts, N outputs, K inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from radixlm.kernels.ops import quantized as reference
from radixlm.kernels.ops.fp8 import is_fp8
from radixlm.kernels.ops.quantized import QuantScales, is_symmetric
from radixlm.kernels.triton import gemm_tile as kinds
from radixlm.kernels.triton.gemm import Packed, int4_chunk
from radixlm.kernels.triton.gemm_fp8 import is_native, quantize_experts


def owned(weight: Tensor) -> Tensor:
    """The weight, contiguous, in memory of its own: a CPU tensor is borrowed from the loader."""
    if weight.is_cuda:
        return weight.contiguous()
    return weight.clone(memory_format=torch.contiguous_format)


def interleaved(rows: Tensor) -> Tensor:
    """[E, 2I, ...] with gate above up -> gate 0, up 0, gate 1, up 1, ..."""
    num_experts, num_rows, *rest = rows.shape
    halves = rows.reshape(num_experts, 2, num_rows // 2, *rest)
    return halves.transpose(1, 2).reshape(rows.shape)


def separated(rows: Tensor) -> Tensor:
    """The reverse of ``interleaved``."""
    num_experts, num_rows, *rest = rows.shape
    pairs = rows.reshape(num_experts, num_rows // 2, 2, *rest)
    return pairs.transpose(1, 2).reshape(rows.shape)


def pack(
    weight_ENK: Tensor,
    bias_EN: Tensor | None,
    fmt: str,
    act: str = "",
    scales: QuantScales | None = None,
) -> Packed:
    """Weights in ``fmt`` of kernels/ops/quantized.py or fp8.py, or as they are (""); ``act`` of
    gated ones. w4a8-<group> does not round x: with tensor cores that would gain nothing. With
    ``scales``, (scale, offset) [E, N] of int8 or [E, N, G] of values 0..15, weights are a
    checkpoint's integers."""
    num_out, num_in = weight_ENK.shape[1:]
    scale: Tensor | None = None
    kind, group = kinds.PLAIN, 0
    if scales is not None:
        kind, data, scale = _stored(weight_ENK, scales, fmt, bool(act))
        group = int(fmt.partition("-")[2] or 0)
    elif not fmt:
        data = interleaved(weight_ENK) if act else owned(weight_ENK)
    elif is_fp8(fmt):
        kind, data, scale = _fp8(weight_ENK, fmt, bool(act))
    elif fmt in ("int8wo", "w8a8"):
        kind = kinds.INT8 if fmt == "int8wo" else kinds.W8A8
        parts = [reference.quantize_int8(weight) for weight in weight_ENK]
        data, scale = (torch.stack(part) for part in zip(*parts, strict=True))
        if act:
            data, scale = interleaved(data), interleaved(scale)
    else:
        kind, group = kinds.INT4, int(fmt.partition("-")[2])
        parts = [reference.quantize_4bit(weight, fmt) for weight in weight_ENK]
        values, scale = (torch.stack(part) for part in zip(*parts, strict=True))
        if act:
            values, scale = interleaved(values), interleaved(scale)
        data, scale = nibbles(values, int4_chunk(group)), scale.transpose(1, 2).contiguous()
    bias = None if bias_EN is None else owned(bias_EN).float()
    if bias is not None and act:
        bias = interleaved(bias)
    return Packed(kind, data, scale, bias, int(num_out), int(num_in), act, group)


def _stored(
    values_ENK: Tensor, scales: QuantScales, fmt: str, is_gated: bool
) -> tuple[int, Tensor, Tensor]:
    """Kind, data and scale of a checkpoint's integers."""
    scale, offset = scales
    if values_ENK.dtype == torch.int8:
        kind = kinds.INT8 if fmt == "int8wo" else kinds.W8A8
        if is_gated:
            return kind, interleaved(values_ENK), interleaved(scale)
        return kind, owned(values_ENK), owned(scale)
    kind, lines_EN = kinds.INT4, scale
    if offset is not None and not is_symmetric(scales):
        kind = kinds.INT4_SHIFTED
        values_ENK, *parts = _zero_points(values_ENK, scale, offset)
        lines_EN = torch.cat(parts, 2)
    if is_gated:
        values_ENK, lines_EN = interleaved(values_ENK), interleaved(lines_EN)
    chunk = int4_chunk(int(fmt.partition("-")[2]))
    return kind, nibbles(values_ENK, chunk), lines_EN.transpose(1, 2).contiguous()


def _zero_points(
    values_ENK: Tensor, scale_ENG: Tensor, offset_ENG: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Values, scale and zero point, (value - zero point) * scale being value * scale + offset.
    Whole zero points come out whole. A group of one number only may have scale 0: there values
    become 0, 1 below their zero point."""
    is_flat = scale_ENG == 0
    flat_ENK = is_flat.repeat_interleave(values_ENK.shape[2] // scale_ENG.shape[2], 2)
    zero = -offset_ENG / torch.where(is_flat, 1.0, scale_ENG)
    whole = zero.round()
    zero = torch.where((zero - whole).abs() <= 1e-5 * whole.abs().clamp(min=1.0), whole, zero)
    return (
        values_ENK.masked_fill(flat_ENK, 0),
        torch.where(is_flat, -offset_ENG, scale_ENG),
        torch.where(is_flat, 1.0, zero),
    )


def _fp8(weight_ENK: Tensor, fmt: str, is_gated: bool) -> tuple[int, Tensor, Tensor]:
    is_block = fmt != "fp8"
    data, scale = quantize_experts(weight_ENK, is_block, 2 if is_gated else 1)
    native = is_native(weight_ENK.device)
    if is_gated:
        data = interleaved(data.view(torch.uint8)).view(torch.float8_e4m3fn)
        scale = scale if is_block else interleaved(scale)
    if is_block:
        kind = kinds.FP8_BLOCK if native else kinds.FP8_BLOCK_WIDE
    else:
        kind = kinds.FP8 if native else kinds.FP8_WIDE
    return kind, data if native else data.view(torch.uint8), scale


def nibbles(values_ENK: Tensor, chunk: int) -> Tensor:
    """Values 0..15 as bytes [E, ceil(K / chunk) * chunk / 2, N]: byte i of a chunk has input i in
    its low half and input chunk / 2 + i in its high half; missing inputs are 8, that is 0."""
    values = F.pad(values_ENK, (0, -values_ENK.shape[2] % chunk), value=8)
    halves = values.reshape(*values.shape[:2], -1, 2, chunk // 2)
    joint = halves[:, :, :, 0] | (halves[:, :, :, 1] << 4)
    return joint.flatten(2).transpose(1, 2).contiguous()


def integers(data_EBN: Tensor, chunk: int, num_in: int) -> Tensor:
    """The reverse of ``nibbles``: values 0..15 [E, N, K]."""
    packed = data_EBN.transpose(1, 2).unflatten(2, (-1, chunk // 2))
    return torch.stack([packed & 15, packed >> 4], 3).flatten(2)[:, :, :num_in]


def dequantize(packed: Packed) -> Tensor:
    """The weights as float32 [E, N, K], gate above up."""
    data, scale = packed.data, packed.scale
    if packed.kind == kinds.PLAIN or scale is None:
        values = data.float()
    elif packed.kind == kinds.INT4:
        values = integers(data, int4_chunk(packed.group), packed.num_in).float() - 8
        values *= scale.transpose(1, 2).repeat_interleave(packed.group, 2)
    elif packed.kind == kinds.INT4_SHIFTED:
        lines_ENK = scale.transpose(1, 2).repeat_interleave(packed.group, 2)
        factor, zero = lines_ENK.chunk(2, 2)
        values = (integers(data, int4_chunk(packed.group), packed.num_in).float() - zero) * factor
    elif packed.kind in (kinds.FP8_BLOCK, kinds.FP8_BLOCK_WIDE):
        return _dequantize_blocks(packed, scale)
    elif packed.kind == kinds.FP8_WIDE:
        values = data.view(torch.float8_e4m3fn).float() * scale[:, :, None]
    else:
        values = data.float() * scale[:, :, None]
    return separated(values) if packed.act else values


def _dequantize_blocks(packed: Packed, scale: Tensor) -> Tensor:
    values = packed.data.view(torch.float8_e4m3fn).float()
    halves = 2 if packed.act else 1
    values = separated(values) if packed.act else values
    rows = packed.num_out // halves
    parts = [
        part.repeat_interleave(kinds.FP8_GROUP, 1)[:, :rows] for part in scale.chunk(halves, 1)
    ]
    by_row = torch.cat(parts, 1)
    return values * by_row.repeat_interleave(kinds.FP8_GROUP, 2)[:, :, : packed.num_in]
