"""Linear layers on packed weights. Legend: M rows, N outputs, K inputs, G groups of a row.

Weights are stored in panels of 32 outputs: [ceil(N / 32)][K][32]. Every output is one chain of
fused multiply-adds over ascending k, so a row's result does not depend on the other rows."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from radixlm.kernels.cpu.checks import dtype_code, expect, rows_of, vector
from radixlm.kernels.cpu.extension import address, native
from radixlm.kernels.ops.fp8 import emulate_fp8, is_fp8
from radixlm.kernels.ops.quantized import (
    FP4_GROUPS,
    GROUPS,
    SPAN,
    QuantScales,
    is_symmetric,
    quantize_4bit,
)
from radixlm.kernels.packing import packed

PANEL = 32
FORMAT_CODE = {
    "fp32": 0,
    "bf16": 1,
    "fp16": 2,
    "int8wo": 3,
    "w8a8": 4,
    "int4": 5,
    "w4a8": 6,
    "fp4": 9,
}
TAIL_BYTES = 2048  # int8 tiles read 64 inputs at once, past the last panel
BF16_PAIRS = 7  # bf16 where the processor multiplies pairs: matrix tiles, dot products
W8A16 = 8  # int8wo where products of bytes are fast: activations of 16 bits in two of them
OF_ISA = {
    ("amx", "bf16"): BF16_PAIRS, ("avx512bf16", "bf16"): BF16_PAIRS,
    ("amx", "int8wo"): W8A16, ("avx512bf16", "int8wo"): W8A16, ("avx512vnni", "int8wo"): W8A16,
    ("avxvnni", "int8wo"): W8A16,
}  # fmt: skip
ACT_CODE = {
    "silu": 1, "gelu": 2, "gelu_tanh": 3, "gelu_quick": 4, "relu": 5, "relu2": 6, "tanh": 7,
}  # fmt: skip
GATED_CODE = {**ACT_CODE, "swiglu_oai": 8}
APART = 9  # gate and up beside each other, before their activation
BYTE_TILES = (FORMAT_CODE["w8a8"], W8A16)
BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "int8wo": 8, "w8a8": 8, "int4": 4, "w4a8": 4, "fp4": 4}
ZeroPoints = Literal["eight", "stored"]
# instruction sets whose byte products are exact for weights of -127 and more only
_NO_MINUS_128 = ("x86_64_v3", "avx512")
NATIVE_FORMAT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def parse_format(fmt: str) -> tuple[str, int]:
    """("int4", 128) of "int4-128"; (fmt, 0) of the formats without groups."""
    kind, _, group = fmt.partition("-")
    if kind not in FORMAT_CODE or bool(group) != (BITS.get(kind) == 4):
        raise ValueError(f"unknown weight format {fmt!r}; known: {', '.join(FORMAT_CODE)}")
    sizes = FP4_GROUPS if kind == "fp4" else GROUPS
    if group and int(group) not in sizes:
        raise ValueError(f"weight format {fmt!r}: groups have {sizes} inputs")
    return kind, int(group or 0)


def act_code(act: str | None, is_gated: bool) -> int:
    """The extension's number of an activation. ValueError for a name that does not fit."""
    if is_gated:
        name = (act or "silu_mul").removesuffix("_mul")
        if name in GATED_CODE and (act is None or act.endswith("_mul")):
            return GATED_CODE[name]
    elif act is None:
        return 0
    elif act in ACT_CODE:
        return ACT_CODE[act]
    raise ValueError(f"act {act!r} does not fit {'gated' if is_gated else 'plain'} outputs")


@dataclass(slots=True)
class Buffers:
    """Memory of a packed weight; the extension keeps only addresses."""

    data: Any
    scale: Tensor | None
    offset: Tensor | None
    multiple: Tensor | None
    column_sum: Tensor | None
    bias: Tensor | None


class PackedLinear:
    """Weights [N, K] ready to run. Filled by ``pack`` and ``pack_rows``; read-only afterwards.

    With ``is_paired`` the rows are [gate; up] and ``run`` gives act(gate) * up, N / 2 outputs.
    """

    def __init__(
        self,
        num_out: int,
        num_in: int,
        fmt: str,
        bias: Tensor | None,
        is_paired: bool,
        zero_points: ZeroPoints | None = None,
        buffers: Buffers | None = None,
    ) -> None:
        """``zero_points``: 4 bit values and scales come from a checkpoint; whether zero points do
        too, or are all 8. ``buffers``: memory that is packed already, with its bias."""
        kind, group = parse_format(fmt)
        if group and num_in % group:
            raise ValueError(f"{fmt}: {num_in} inputs are not a multiple of the group")
        if is_paired and num_out % 2:
            raise ValueError(f"paired weights need an even number of rows, got {num_out}")
        self.fmt, self.is_paired = fmt, is_paired
        self.num_out, self.num_in = num_out, num_in
        self.out_features = num_out // 2 if is_paired else num_out
        self._kind, self._group = kind, group
        self.format_code = OF_ISA.get((native().isa(), kind), FORMAT_CODE[kind])
        self.padded = self._padded_rows()
        self._has_multiples = kind == "w4a8" and zero_points is None
        self._span = SPAN if self._has_multiples else group
        self.zero_points = zero_points
        whole = 32 if self.format_code == BF16_PAIRS else 4 if BITS[kind] <= 8 else 1
        inputs = -(-num_in // whole) * whole
        tail = TAIL_BYTES if self.format_code in BYTE_TILES and inputs % 64 else 0
        self._panel_bytes = PANEL * inputs * BITS[kind] // 8
        self._data_bytes = self.padded // PANEL * self._panel_bytes + tail
        if buffers is None:
            buffers = self._allocate(bias, zero_points == "stored" or kind == "int4")
        elif buffers.data.num_bytes < self._data_bytes:
            raise ValueError(f"{fmt}: {buffers.data.num_bytes} bytes, not {self._data_bytes}")
        self.buffers = buffers
        self.handle = self.native_handle(num_out, is_paired, buffers.bias)

    def native_handle(self, num_out: int, is_paired: bool, bias: Tensor | None) -> Any:
        """The extension's view of this memory."""
        b = self.buffers
        return native().Linear(
            num_out, self.num_in, self.format_code, self._group, self._span, is_paired,
            b.data.address, address(b.scale), address(b.offset), address(b.multiple),
            address(b.column_sum), address(bias),
        )  # fmt: skip

    def part(self, begin: int, end: int) -> PackedLinear:
        """The outputs ``begin`` to ``end`` (whole panels but for the last) of a weight that is
        neither paired nor in groups: a view of the same memory."""
        assert not (begin % PANEL or self.is_paired or self._group), "no view of such a part"
        part, b = copy(self), self.buffers
        part.num_out = part.out_features = end - begin
        scale, column_sum, bias = (
            None if t is None else t[begin:] for t in (b.scale, b.column_sum, b.bias)
        )
        part.handle = native().Linear(
            end - begin, self.num_in, self.format_code, 0, self._span, False,
            b.data.address + begin // PANEL * self._panel_bytes, address(scale), 0, 0,
            address(column_sum), address(bias),
        )  # fmt: skip
        return part

    def _padded_rows(self) -> int:
        rows, panel = (self.num_out // 2, 16) if self.is_paired else (self.num_out, PANEL)
        return (rows + panel - 1) // panel * PANEL

    def _allocate(self, bias: Tensor | None, has_offset: bool) -> Buffers:
        data = native().Memory(self._data_bytes)
        scale = offset = multiple = column_sum = None
        if self._group:
            panels = self.padded // PANEL
            shape = (panels, -(-self.num_in // self._span), PANEL)
            scale = torch.zeros(shape)
            offset = torch.zeros(shape) if has_offset else None
            if self._has_multiples:
                groups = self.num_in // self._group
                multiple = torch.zeros(panels, groups, 2, PANEL, dtype=torch.int8)
        elif BITS[self._kind] == 8:
            scale = torch.zeros(self.padded)
            column_sum = torch.zeros(self.padded, dtype=torch.int32)
        flat = vector(bias, self.num_out, "bias")
        lanes = None if flat is None else self.lanes(flat)
        return Buffers(data, scale, offset, multiple, column_sum, lanes)

    def lanes(self, per_row: Tensor) -> Tensor:
        """A number (or row) for each output, [N, ...], in the order of the panels, padded."""
        out = per_row.new_zeros(self.padded, *per_row.shape[1:])
        if not self.is_paired:
            out[: self.num_out] = per_row
            return out
        half = self.num_out // 2
        view = out.view(-1, 2, 16, *per_row.shape[1:])
        rows = torch.arange(half)
        view[rows // 16, 0, rows % 16] = per_row[:half]
        view[rows // 16, 1, rows % 16] = per_row[half:]
        return out

    @property
    def rounds_inputs(self) -> bool:
        """Whether ``run`` rounds activations to bfloat16 (sums stay float32)."""
        return self.format_code == BF16_PAIRS

    @property
    def byte_products(self) -> int:
        """Products of bytes that stand for one of numbers; 0 where ``run`` multiplies floats."""
        if self.format_code == W8A16:
            return 2
        return int(self._kind in ("w8a8", "w4a8", "fp4"))

    def tensors(self) -> list[Tensor]:
        """The memory of weights, scales and bias, as it is packed."""
        b = self.buffers
        raw = (ctypes.c_uint8 * b.data.num_bytes).from_address(b.data.address)
        extra = (b.scale, b.offset, b.multiple, b.column_sum, b.bias)
        return [torch.frombuffer(raw, dtype=torch.uint8), *(t for t in extra if t is not None)]

    @property
    def num_bytes(self) -> int:
        """Resident bytes: weights, scales, bias."""
        b = self.buffers
        extra = (b.scale, b.offset, b.multiple, b.column_sum, b.bias)
        return int(b.data.num_bytes) + sum(t.nbytes for t in extra if t is not None)

    def fill(self, rows: Tensor, first_row: int) -> None:
        """Pack rows [n, K] (float32, bfloat16, float16) at ``first_row``; int8 values for 8 bit
        formats and values 0..15 in uint8 for int4 keep their scale for ``set_scales``."""
        is_strided = self.num_in > 1 and rows.stride(1) != 1  # a single column may have any stride
        if rows.ndim != 2 or rows.shape[1] != self.num_in or is_strided:
            raise ValueError(f"expected rows of {self.num_in} inputs, got {tuple(rows.shape)}")
        if first_row < 0 or first_row + rows.shape[0] > self.num_out:
            raise ValueError(f"rows {first_row}+{rows.shape[0]} exceed {self.num_out}")
        if rows.is_meta:
            raise ValueError("expected numbers, got a stand-in of the packed cache")
        code = dtype_code(rows.dtype, "weight")
        if (code == 3) and BITS[self._kind] > 8:
            raise TypeError(f"{self.fmt} weights are packed from floats, got {rows.dtype}")
        self.handle.pack(rows.data_ptr(), code, rows.stride(0), rows.shape[0], first_row)

    def set_scales(self, scale: Tensor, offset: Tensor | None = None) -> None:
        """Scales of a checkpoint's integers: [N] for 8 bit; [N, G] for int4 with offsets [N, G]
        (default -8 scales): weight = q * scale + offset."""
        b = self.buffers
        assert b.scale is not None, "this format has no scales"
        scale = scale.detach().float()
        if not self._group:
            b.scale.copy_(self.lanes(scale.reshape(self.num_out)))
            return
        if offset is not None and b.offset is None:
            raise ValueError(f"{self.fmt}: allocated without zero points")
        if offset is None:
            offset = -8.0 * scale
        for target, values in ((b.scale, scale), (b.offset, offset)):
            lanes = self.lanes(values)
            if target is not None:
                target.copy_(lanes.view(-1, PANEL, lanes.shape[1]).transpose(1, 2))

    def run(
        self,
        x_MK: Tensor,
        out: Tensor | None = None,
        act: str | None = None,
        residual: Tensor | None = None,
        out_scale: float = 1.0,
        num_threads: int = 0,
    ) -> Tensor:
        """``act(x W^T + bias) * out_scale + residual``, float32 [M, N].

        ``act`` is a name of ``ACT_CODE``; of paired weights one of ``GATED_CODE`` with "_mul"
        behind it ("silu_mul", the default). ``out`` may be ``residual`` but not
        ``x``. ``num_threads`` 0 lets the size of the work decide.
        """
        code = act_code(act, self.is_paired)
        if x_MK.shape[-1] != self.num_in:
            raise ValueError(f"expected {self.num_in} inputs, got {tuple(x_MK.shape)}")
        x, ldx = rows_of(x_MK, "x")
        if out is None:
            out = torch.empty(x_MK.shape[0], self.out_features)
        shape = x_MK.shape[0], self.out_features
        y, ldy = rows_of(out, "out", shape)
        r, ldr = (0, 0) if residual is None else rows_of(residual, "residual", shape)
        self.handle.run(x, ldx, x_MK.shape[0], y, ldy, r, ldr, out_scale, code, 0, num_threads)
        return out

    def embed(self, ids_T: Tensor, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
        """Rows ``ids`` (int32) of the weight as float32 [T, K], times ``scale``: a tied table."""
        expect(ids_T, torch.int32, (-1,), "ids")
        out = torch.empty(ids_T.shape[0], self.num_in) if out is None else out
        y, ldy = rows_of(out, "out", (ids_T.shape[0], self.num_in))
        self.handle.embed(ids_T.data_ptr(), ids_T.shape[0], y, ldy, scale)
        return out

    def unpack(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [N, K] again (quantized formats: what the kernel computes with)."""
        flat = torch.empty(self.num_out, self.num_in)
        if self.is_paired:
            raise NotImplementedError("paired weights are unpacked by their owner")
        self.embed(torch.arange(self.num_out, dtype=torch.int32), out=flat)
        return flat.to(dtype)


def pack_rows(
    parts: Sequence[Tensor], bias: Tensor | None, fmt: str, is_paired: bool = False
) -> PackedLinear:
    """Pack several matrices [n_i, K] as the rows of one, without joining them first."""
    packed = PackedLinear(
        sum(int(p.shape[0]) for p in parts), int(parts[0].shape[1]), fmt, bias, is_paired
    )
    first = 0
    for part in parts:
        packed.fill(part.detach(), first)
        first += int(part.shape[0])
    return packed


def pack(
    weight_NK: Tensor, bias_N: Tensor | None, fmt: str = "", is_paired: bool = False
) -> PackedLinear:
    """Pack a float weight. ``fmt``: fp32, bf16, fp16, int8wo, w8a8, int4-<group> (32, 64, 128);
    "" keeps the weight's own dtype, as do fp8 formats, whose rounding is emulated. ``is_paired``:
    rows are [gate; up] of a gated MLP."""
    return packed(partial(_pack, weight_NK, bias_N, fmt, is_paired))


def _pack(weight_NK: Tensor, bias_N: Tensor | None, fmt: str, is_paired: bool) -> PackedLinear:
    weight_NK, fmt = emulate_fp8(weight_NK, fmt)
    if fmt.startswith("fp4"):
        codes, scale = quantize_4bit(weight_NK, fmt)
        return _pack_quantized(codes, (scale, None), bias_N, fmt, is_paired)
    return pack_rows([weight_NK], bias_N, fmt or NATIVE_FORMAT[weight_NK.dtype], is_paired)


def multiplies_minus_128() -> bool:
    """Whether byte products of this instruction set are exact for weights of -128."""
    return native().isa() not in _NO_MINUS_128


def can_pack(weight: Tensor, fmt: str) -> bool:
    """Whether ``pack`` takes weights of this dtype in ``fmt``."""
    return weight.dtype in NATIVE_FORMAT or bool(fmt and not is_fp8(fmt))


def pack_quantized(
    values_NK: Tensor, scales: QuantScales, bias_N: Tensor | None, fmt: str, is_paired: bool = False
) -> PackedLinear:
    """Pack a checkpoint's integers; values and ``scales`` as in ``kernels/ops/quantized.py``."""
    return packed(partial(_pack_quantized, values_NK, scales, bias_N, fmt, is_paired))


def _pack_quantized(
    values_NK: Tensor, scales: QuantScales, bias_N: Tensor | None, fmt: str, is_paired: bool
) -> PackedLinear:
    scale, offset = scales
    if fmt.startswith("fp4"):
        num_out, num_in = values_NK.shape
        linear = PackedLinear(num_out, num_in, fmt, bias_N, is_paired, "eight")
        linear.fill(values_NK, 0)
        linear.set_scales(0.5 * scale)  # of twice the numbers, which are whole
        return linear
    if offset is not None:
        return pack_int4_offsets(values_NK, scale, offset, bias_N, fmt, is_paired)
    if fmt == "w8a8" and not multiplies_minus_128() and int(values_NK.min()) == -128:
        fmt = "int8wo"
    return pack_int8(values_NK, scale, bias_N, fmt, is_paired)


def pack_int8(
    weight_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None, fmt: str, is_paired: bool = False
) -> PackedLinear:
    """Pack int8 values with a scale for each output (``fmt`` int8wo or w8a8)."""
    num_out, num_in = weight_NK.shape
    packed = PackedLinear(num_out, num_in, fmt, bias_N, is_paired)
    packed.fill(weight_NK, 0)
    packed.set_scales(scale_N)
    return packed


def pack_int4_offsets(
    nibbles_NK: Tensor,
    scale_NG: Tensor,
    offset_NG: Tensor,
    bias_N: Tensor | None,
    fmt: str,
    is_paired: bool = False,
) -> PackedLinear:
    """Pack values 0..15 (uint8 [N, K]): weight = q * scale + offset; offsets of -8 scales are not
    stored."""
    is_asymmetric = not is_symmetric((scale_NG, offset_NG))
    num_out, num_in = nibbles_NK.shape
    zero_points: ZeroPoints = "stored" if is_asymmetric else "eight"
    packed = PackedLinear(num_out, num_in, fmt, bias_N, is_paired, zero_points)
    packed.fill(nibbles_NK, 0)
    packed.set_scales(scale_NG, offset_NG if is_asymmetric else None)
    return packed
