"""Blocks of GGUF tensors as floats.

Legend: N blocks. All hold a scale d in 16 bits. The plain ones have 32 numbers and, in the formats
"_1", a minimum m. K-quants have 256 numbers in groups of 16 or 32, each with an integer that
multiplies d, and in some with another one that multiplies a second scale: the minimum. Layouts:
https://github.com/ggml-org/ggml, ggml-common.h; tests decode each number by number.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from radixlm.weights import gguf_iquants
from radixlm.weights.gguf_bits import half, nibbles, scaled, shifted
from radixlm.weights.gguf_iquants import FP4

CHUNK = 1 << 20  # numbers that are dequantized at once
_CURVE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def dequantize(kind: str, blocks_NB: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """uint8 blocks -> [N, ``block``] in ``dtype``, computed in pieces."""
    count, function = blocks_NB.shape[0], DEQUANTIZE[kind]
    out = torch.empty(count, block, dtype=dtype)
    step = CHUNK // block
    for first in range(0, count, step):
        out[first : first + step] = function(blocks_NB[first : first + step])
    return out


def quantized_parts(kind: str, blocks_NB: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of ``GRIDS``: (values or codes 0..15 in uint8 [N, block], scale, offset in float32 [N,
    groups])."""
    if kind == "MXFP4":
        scale = 2 * _power(blocks_NB)
        return nibbles(blocks_NB[:, 1:]), scale, torch.zeros_like(scale)
    if kind == "NVFP4":
        codes, half_scale = gguf_iquants.nvfp4_parts(blocks_NB)
        return codes, 2 * half_scale, torch.zeros_like(half_scale)
    if kind == "Q4_K":
        values, scale, minimum = _q4_k_parts(blocks_NB)
        return values, scale, -minimum
    scale = half(blocks_NB[:, :2])
    if kind == "Q4_0":
        return nibbles(blocks_NB[:, 2:]), scale, -8.0 * scale
    return nibbles(blocks_NB[:, 4:]), scale, half(blocks_NB[:, 2:4])


def _fifth_bits(bytes_N4: Tensor) -> Tensor:
    bits = (bytes_N4[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten(-2) << 4


def _q8_0(b: Tensor) -> Tensor:
    return half(b[:, :2]) * b[:, 2:].view(torch.int8)


def _q4_0(b: Tensor) -> Tensor:
    return half(b[:, :2]) * (nibbles(b[:, 2:]).float() - 8)


def _q4_1(b: Tensor) -> Tensor:
    return half(b[:, :2]) * nibbles(b[:, 4:]) + half(b[:, 2:4])


def _q5_0(b: Tensor) -> Tensor:
    return half(b[:, :2]) * ((nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6])).float() - 16)


def _q5_1(b: Tensor) -> Tensor:
    values = nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8])
    return half(b[:, :2]) * values + half(b[:, 2:4])


def _q2_k(b: Tensor) -> Tensor:
    """16 bytes of two nibbles (scale, minimum), 64 of pairs of bits, d, the minimum's d."""
    values = shifted(b[:, 16:80].reshape(-1, 2, 32), 0, 2, 4, 6) & 3
    scales = half(b[:, 80:82]) * (b[:, :16] & 15)
    return scaled(scales, values, half(b[:, 82:]) * (b[:, :16] >> 4))


def _q3_k(b: Tensor) -> Tensor:
    """32 bytes of third bits (unset: minus 4), 64 of pairs, 12 of scales in 6 bits (upper pairs in
    the last four), d."""
    high = shifted(b[:, None, :32], *range(8)).reshape(-1, 2, 4, 32) & 1
    pairs = shifted(b[:, 32:96].reshape(-1, 2, 32), 0, 2, 4, 6) & 3
    low = nibbles(b[:, 96:104])
    upper = (shifted(b[:, None, 104:108], 0, 2, 4, 6) & 3).flatten(1)
    scales = (low | upper << 4).float() - 32
    return scaled(half(b[:, 108:]) * scales, (pairs | high << 2).float() - 4)


def _two_scales(b: Tensor) -> tuple[Tensor, Tensor]:
    """(scale, minimum) of 8 groups, from d, the minimum's d, and 12 bytes of 6 bits: the first four
    of each whole; the last four as nibbles, with their upper pairs of bits above the first."""
    first, second, nibbles = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = torch.cat((first & 63, (nibbles & 15) | (first >> 6) << 4), 1)
    minimum = torch.cat((second & 63, (nibbles >> 4) | (second >> 6) << 4), 1)
    return half(b[:, :2]) * scales, half(b[:, 2:4]) * minimum


def _q4_k_parts(b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(integers 0..15 [N, 256], scale [N, 8], minimum [N, 8])."""
    scale, minimum = _two_scales(b)
    return (shifted(b[:, 16:].reshape(-1, 4, 32), 0, 4) & 15).flatten(1), scale, minimum


def _q4_k(b: Tensor) -> Tensor:
    values, scale, minimum = _q4_k_parts(b)
    return scaled(scale, values, minimum)


def _q5_k(b: Tensor) -> Tensor:
    scale, minimum = _two_scales(b)
    low = shifted(b[:, 48:].reshape(-1, 4, 32), 0, 4) & 15
    high = shifted(b[:, None, 16:48], *range(8)).reshape(-1, 4, 2, 32) & 1
    return scaled(scale, low | high << 4, minimum)


def _q6_k(b: Tensor) -> Tensor:
    """Two halves of 128 numbers: 64 bytes of low nibbles, 32 of upper pairs of bits; a signed
    byte of scale for each 16 numbers, then d."""
    low, high = b[:, :128].reshape(-1, 2, 2, 32), b[:, 128:192].reshape(-1, 2, 32)
    scales = b[:, 192:208].contiguous().view(torch.int8)
    nibbles = torch.cat((low & 15, low >> 4), 2)  # [N, 2, 4, 32]
    values = nibbles | (shifted(high, 0, 2, 4, 6) & 3) << 4
    return scaled(half(b[:, 208:]) * scales, values.float() - 32)


def _iq4_nl(b: Tensor) -> Tensor:
    return half(b[:, :2]) * torch.tensor(_CURVE)[nibbles(b[:, 2:]).int()]


def _iq4_xs(b: Tensor) -> Tensor:
    """d, upper pairs and low nibbles of 8 scales, then the numbers of each group as in IQ4_NL."""
    upper = (shifted(b[:, 2:4, None], 0, 2, 4, 6) & 3).flatten(1)
    low = (shifted(b[:, 4:8, None], 0, 4) & 15).flatten(1)
    scales = (low | upper << 4).float() - 32
    values = torch.tensor(_CURVE)[nibbles(b[:, 8:].reshape(-1, 8, 16)).int()]
    return scaled(half(b[:, :2]) * scales, values)


def _mxfp4(b: Tensor) -> Tensor:
    """A power of two, biased by 127, and numbers of e2m1."""
    return _power(b) * torch.tensor(FP4)[nibbles(b[:, 1:]).int()]


def _power(b: Tensor) -> Tensor:
    """Half of the scale."""
    return torch.exp2(b[:, :1].double() - 128).float()


DEQUANTIZE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
    **gguf_iquants.DEQUANTIZE,
}  # fmt: skip
