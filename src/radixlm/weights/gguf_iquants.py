"""GGUF's blocks of one to three bits as floats: I-quants and ternary numbers.

A block has 256 numbers. I-quants name rows of a grid (``gguf_grids.safetensors``: int8 [rows, 4 or
8], the tables of ggml-common.h) and give their signs apart: bit i is the sign of number i, and
where seven bits stand for eight, the eighth makes their number even. All products fit float32.
"""

from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources

import torch
from safetensors.torch import load
from torch import Tensor

from radixlm.weights.gguf_bits import half, nibbles, scaled, shifted, words

_DELTA = 0.125  # of IQ1: what is added to, or subtracted from, -1, 0 and 1


@cache
def _grids() -> Mapping[str, Tensor]:
    file = resources.files("radixlm.weights") / "gguf_grids.safetensors"
    return {name: grid.float() for name, grid in load(file.read_bytes()).items()}


def _rows(name: str, index: Tensor) -> Tensor:
    """[..., row] of the grid ``name``."""
    return _grids()[name].index_select(0, index.flatten().int()).view(*index.shape, -1)


@cache
def _sign_table() -> Tensor:
    """The eight signs of each byte, float32 [256, 8]."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return 1.0 - 2.0 * bits


@cache
def _even_signs() -> Tensor:
    """The eight signs of each seven bits, float32 [128, 8]."""
    seven = _sign_table()[:128]
    return torch.cat((seven[:, :7], seven[:, :7].prod(1, keepdim=True)), 1)


def _signs(table: Tensor, index: Tensor) -> Tensor:
    return table.index_select(0, index.flatten().int())


def _seven_bits(words_NG: Tensor) -> Tensor:
    """Signs of 32 numbers each, from the lower 28 bits of a word."""
    return _signs(_even_signs(), words_NG[..., None] >> torch.tensor([0, 7, 14, 21]) & 127)


def _iq2_xxs(b: Tensor) -> Tensor:
    """d; for each 32 numbers four rows of the grid, then a word: signs, and 4 bits of scale."""
    groups = b[:, 2:].reshape(-1, 8, 8)
    word = words(groups[..., 4:], torch.int32)[..., 0]
    scale = half(b[:, :2]) * (0.5 + (word >> 28)) * 0.25
    rows = _rows("IQ2_XXS", groups[..., :4])
    return scaled(scale, rows.view(-1) * _seven_bits(word).view(-1))


def _iq2_xs(b: Tensor) -> Tensor:
    """d, 32 words (9 bits of row, 7 of signs), and 4 bits of scale for each 16 numbers."""
    word = words(b[:, 2:66], torch.int16)
    scale = (
        half(b[:, :2]) * (0.5 + shifted(b[:, 66:, None], 0, 4).flatten(1).bitwise_and(15)) * 0.25
    )
    return scaled(
        scale, _rows("IQ2_XS", word & 511).view(-1) * _signs(_even_signs(), word >> 9).view(-1)
    )


def _iq2_s(b: Tensor) -> Tensor:
    """d, 32 low bytes of rows, 32 bytes of signs, upper pairs of bits of rows, scales as IQ2_XS."""
    upper = shifted(b[:, 66:74, None], 0, 2, 4, 6).flatten(1) & 3
    scale = (
        half(b[:, :2]) * (0.5 + shifted(b[:, 74:, None], 0, 4).flatten(1).bitwise_and(15)) * 0.25
    )
    rows = _rows("IQ2_S", b[:, 2:34].int() | upper.int() << 8)
    return scaled(scale, rows.view(-1) * _signs(_sign_table(), b[:, 34:66]).view(-1))


def _iq3_xxs(b: Tensor) -> Tensor:
    """d, 64 rows of four, then eight words as those of IQ2_XXS."""
    word = words(b[:, 66:], torch.int32)
    scale = half(b[:, :2]) * (0.5 + (word >> 28)) * 0.5
    return scaled(scale, _rows("IQ3_XXS", b[:, 2:66]).view(-1) * _seven_bits(word).view(-1))


def _iq3_s(b: Tensor) -> Tensor:
    """d, 64 low bytes of rows of four, 8 of their ninth bits, 32 of signs, 4 bits of scale a 32."""
    ninth = shifted(b[:, 66:74, None], *range(8)).flatten(1) & 1
    scale = half(b[:, :2]) * (1 + 2 * (shifted(b[:, 106:, None], 0, 4).flatten(1) & 15))
    rows = _rows("IQ3_S", b[:, 2:66].int() | ninth.int() << 8)
    return scaled(scale, rows.view(-1) * _signs(_sign_table(), b[:, 74:106]).view(-1))


def _iq1_s(b: Tensor) -> Tensor:
    """d, 32 low bytes of rows; for each 32 numbers a word: four times three upper bits of rows,
    three bits of scale, the sign of delta."""
    word = words(b[:, 34:], torch.int16)
    scale = half(b[:, :2]) * (2 * (word >> 12 & 7) + 1)
    upper = (word[..., None] >> torch.tensor([0, 3, 6, 9]) & 7).flatten(1)
    delta = _DELTA - 2 * _DELTA * (word >> 15)
    rows = _rows("IQ1_S", b[:, 2:34].long() | upper << 8)
    return scaled(scale, rows.view(-1, 8, 32) + delta[..., None])


def _iq1_m(b: Tensor) -> Tensor:
    """32 low bytes of rows, 16 bytes of nibbles (three upper bits, the sign of delta), four words:
    four times three bits of scale for 16 numbers, and a nibble of d."""
    word = words(b[:, 48:], torch.int16)
    d = (word >> 12 << torch.tensor([0, 4, 8, 12])).sum(1, keepdim=True)
    scales = (word[..., None] >> torch.tensor([0, 3, 6, 9]) & 7).flatten(1)
    scale = half(d.to(torch.uint16).view(torch.uint8)) * (2 * scales + 1)
    upper = shifted(b[:, 32:48, None], 0, 4).flatten(1).long()
    rows = _rows("IQ1_S", b[:, :32].long() | (upper & 7) << 8)
    return scaled(scale, rows + (_DELTA - 2 * _DELTA * (upper >> 3 & 1))[..., None])


def _tq1_0(b: Tensor) -> Tensor:
    """48 bytes of five digits of base 3, four of four digits, d. A digit is the upper part of the
    byte as a fraction: times 3, above 256."""
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8)[:, None]
    parts = (b[:, :32], powers), (b[:, 32:48], powers), (b[:, 48:52], powers[:4])
    digits = torch.cat([(part[:, None] * times).flatten(1) for part, times in parts], 1)
    return half(b[:, 52:]) * ((digits.short() * 3 >> 8) - 1)


def _tq2_0(b: Tensor) -> Tensor:
    """64 bytes of pairs of bits, d."""
    pairs = shifted(b[:, :64].reshape(-1, 2, 32), 0, 2, 4, 6).flatten(1) & 3
    return half(b[:, 64:]) * (pairs.short() - 1)


@cache
def _ue4m3() -> Tensor:
    """Half of each scale of NVFP4: e4m3 without a sign, its NaN zero."""
    byte = torch.arange(256)
    power, part = byte >> 3 & 15, byte & 7
    normal = (8 + part) * torch.exp2(power - 10.0)
    value = torch.where(power == 0, part / 512, normal) / 2
    return torch.where(byte == 127, 0.0, value)


def nvfp4_parts(b: Tensor) -> tuple[Tensor, Tensor]:
    """(codes [N, 64], half of the scales [N, 4]): four scales, then 8 bytes for each 16 numbers."""
    return nibbles(b[:, 4:].reshape(-1, 4, 8)).flatten(1), _ue4m3()[b[:, :4].int()]


def _nvfp4(b: Tensor) -> Tensor:
    codes, half_scale = nvfp4_parts(b)
    return scaled(half_scale, torch.tensor(FP4)[codes.int()])


FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the numbers of e2m1
DEQUANTIZE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "IQ1_S": _iq1_s, "IQ1_M": _iq1_m, "IQ2_XXS": _iq2_xxs, "IQ2_XS": _iq2_xs, "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs, "IQ3_S": _iq3_s, "TQ1_0": _tq1_0, "TQ2_0": _tq2_0, "NVFP4": _nvfp4,
}  # fmt: skip
