"""KV cache formats of 8 and 4 bits. int8 has a scale for every token and head, int4 one for 32
channels of them; 8 bit floats have none and saturate.

Legend: N tokens, K KV heads, C channels, G groups of 32 channels.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INT4 = torch.uint8  # bytes of two numbers
GROUP_4 = 32  # channels of an int4 row that share a scale
DTYPES = (*FLOATS, torch.int8, *FLOAT8, INT4)
SCALED = {torch.int8: torch.float32, INT4: torch.bfloat16}  # dtypes with scales, and theirs
BY_FLAG = {  # --kv-cache-dtype
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": INT4,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}
SCALE_BYTES = 4  # float32, for each int8 row
_SMALLEST = 1e-30  # rows with smaller numbers become zeros


def row_nbytes(channels: int, dtype: torch.dtype) -> int:
    """Bytes of one token's row of one head."""
    if dtype == INT4:
        return stored_channels(channels) // 2 + num_groups(channels) * SCALED[INT4].itemsize
    return channels * dtype.itemsize + (SCALE_BYTES if dtype == torch.int8 else 0)


def num_groups(channels: int) -> int:
    """Scales of an int4 row."""
    return -(-channels // GROUP_4)


def stored_channels(channels: int) -> int:
    """Channels of an int4 row with those that fill its last group."""
    return num_groups(channels) * GROUP_4


def quantize(x_NKC: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows as int8 or INT4, and their scales."""
    return quantize_int4(x_NKC) if dtype == INT4 else quantize_int8(x_NKC)


def dequantize(q: Tensor, scale: Tensor, channels: int) -> Tensor:
    """float32 [..., C] of what ``quantize`` gave."""
    if q.dtype == INT4:
        return dequantize_int4(unpack_int4(q), scale)[..., :channels]
    return dequantize_int8(q, scale)


def rotate(x_NKC: Tensor) -> Tensor:
    """float32 [..., C]: the Hadamard transform, not normalised, of each block of channels; blocks
    are the largest power of two that divides C. Keys of an int4 cache are stored so: a few large
    channels spread over all. q . k is rotate(q) . rotate(k) / block (arXiv:2404.00456)."""
    x, channels = x_NKC.float(), x_NKC.shape[-1]
    block = rotated_block(channels)
    x = split(x, -1, (-1, block))
    for _ in range(block.bit_length() - 1):  # neighbours meet, and become halves: distances 1, 2, 4
        a, b = x[..., 0::2], x[..., 1::2]
        x = torch.cat((a + b, a - b), -1)
    return x.flatten(-2)


def rotate_back(x_NKC: Tensor) -> Tensor:
    """The inverse of ``rotate``."""
    return rotate(x_NKC) / rotated_block(x_NKC.shape[-1])


def rotated_block(channels: int) -> int:
    """Channels that ``rotate`` mixes."""
    return channels & -channels


def quantize_int4(x_NKC: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes [..., 16 G] and bfloat16 scales [..., G], x = q * scale with q from -8 to 7. A byte of
    a group has channel i of it in the lower half and i + 16 in the upper one, plus 8 each.

    The number of largest magnitude becomes -8, so that a row that was read and is quantized again
    gives the same bytes. The scale of a group that is not finite is NaN.
    """
    x = split(F.pad(x_NKC.float(), (0, -x_NKC.shape[-1] % GROUP_4)), -1, (-1, GROUP_4))
    low, high = x.aminmax(dim=-1)
    most = torch.where(high >= -low, high, low)
    scale = torch.where(most.abs() < _SMALLEST, 0.0, most * -0.125)
    scale = torch.where(most.isfinite(), scale, torch.nan).bfloat16()
    wide = scale.float()[..., None]
    q = torch.where((wide > 0) | (wide < 0), x / wide, 0.0).round_().clamp_(-8, 7)
    return pack_int4(q.to(torch.int8).flatten(-2)), scale


def dequantize_int4(q_NKC: Tensor, scale_NKG: Tensor) -> Tensor:
    """float32 [..., 32 G]."""
    return q_NKC.float() * scale_NKG.float().repeat_interleave(GROUP_4, -1)


def split(x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """``Tensor.unflatten``, which has no types."""
    return x.unflatten(dim, sizes)  # type: ignore[no-untyped-call, no-any-return]


def pack_int4(q_NKC: Tensor) -> Tensor:
    """int8 [..., 32 G] from -8 to 7 as bytes [..., 16 G]."""
    halves = split((q_NKC + 8).to(torch.uint8), -1, (-1, 2, GROUP_4 // 2))
    return (halves[..., 0, :] | halves[..., 1, :] << 4).flatten(-2)


def unpack_int4(bytes_NKC: Tensor) -> Tensor:
    """The inverse of ``pack_int4``."""
    groups = split(bytes_NKC, -1, (-1, GROUP_4 // 2))
    return torch.stack((groups & 15, groups >> 4), -2).flatten(-3).to(torch.int8) - 8


def quantize_int8(x_NKC: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [..., C] and float32 scales [...], x = q * scale. The largest number of a row becomes
    127. The scale of a row that is not finite is NaN.

    A scale has 16 significant bits, so 127 * scale is exact and a row that was read and is
    quantized again gives the same bytes.
    """
    x = x_NKC.float()
    max_value = x.abs().amax(-1)
    bits = ((max_value / 127).view(torch.int32) + 0x80) & ~0xFF
    scale = torch.where(max_value < _SMALLEST, 0.0, bits.view(torch.float32))
    scale = torch.where(max_value.isfinite(), scale, torch.nan)
    q = torch.where(scale[..., None] > 0, x / scale[..., None], 0.0)
    return q.round_().clamp_(-127, 127).to(torch.int8), scale


def dequantize_int8(q_NKC: Tensor, scale_NK: Tensor) -> Tensor:
    """float32 [..., C]."""
    return q_NKC.float() * scale_NK[..., None]


def to_kv(x_NKC: Tensor, dtype: torch.dtype) -> Tensor:
    """x as a float ``dtype`` of the cache."""
    if dtype not in FLOAT8:
        return x_NKC.to(dtype)
    max_value = torch.finfo(dtype).max
    return x_NKC.float().clamp(-max_value, max_value).to(dtype)


def indexable_view(x: Tensor) -> Tensor:
    """A view that torch can index, which it cannot do with 8-bit floats."""
    return x.view(torch.uint8) if x.dtype in FLOAT8 else x
