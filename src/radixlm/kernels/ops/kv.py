"""KV cache formats of 8 bits. int8 has a scale for every token and head; 8 bit floats have none and
saturate.

Legend: N tokens, K KV heads, C channels.
"""

import torch
from torch import Tensor

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int8, *FLOAT8)
BY_FLAG = {  # --kv-cache-dtype
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
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
    return channels * dtype.itemsize + (SCALE_BYTES if dtype == torch.int8 else 0)


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
