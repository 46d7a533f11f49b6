"""Packs the whole numbers of a checkpoint. Legend: N outputs, K inputs."""

from __future__ import annotations

from torch import Tensor

from radixlm.kernels.cpu.extension import native
from radixlm.kernels.cpu.linear import PackedLinear, pack_int4_offsets, pack_int8
from radixlm.kernels.ops.given import QuantScales

TURNS_SIGNS = ("x86_64_v3", "avx512")  # whose products of bytes take weights of -127 at least


def pack_quantized(
    values_NK: Tensor, grid: QuantScales, bias_N: Tensor | None, fmt: str, is_paired: bool = False
) -> PackedLinear:
    """Values and ``grid`` as in kernels/ops/given.py."""
    scale, offset = grid
    if offset is not None:
        return pack_int4_offsets(values_NK, scale, offset, bias_N, fmt, is_paired)
    if fmt == "w8a8" and native().isa() in TURNS_SIGNS and int(values_NK.min()) == -128:
        fmt = "int8wo"
    return pack_int8(values_NK, scale, bias_N, fmt, is_paired)
