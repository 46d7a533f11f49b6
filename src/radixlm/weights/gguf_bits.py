"""Bit fields of GGUF blocks. Legend: N blocks."""

import torch
from torch import Tensor


def half(bytes_N2: Tensor) -> Tensor:
    """The float16 of two bytes, in float32 [N, 1]."""
    return bytes_N2.contiguous().view(torch.float16).float()


def shifted(bytes_: Tensor, *shifts: int) -> Tensor:
    """[N, K, W] -> [N, K, shifts, W]."""
    return bytes_[:, :, None] >> torch.tensor(shifts, dtype=torch.uint8)[:, None]


def nibbles(bytes_: Tensor) -> Tensor:
    """The low halves of the last axis, then the high ones."""
    return torch.cat((bytes_ & 15, bytes_ >> 4), -1)


def words(bytes_: Tensor, dtype: torch.dtype) -> Tensor:
    """Unsigned little-endian words of int16 or int32 size, [N, words] in int64."""
    whole = bytes_.contiguous().view(dtype).long()
    return whole & (1 << 8 * dtype.itemsize) - 1


def scaled(scale_NG: Tensor, values: Tensor, minimum_NG: Tensor | None = None) -> Tensor:
    """Groups of ``values`` times their scales, minus their minimum."""
    grouped = scale_NG[..., None] * values.reshape(*scale_NG.shape, -1)
    return (grouped if minimum_NG is None else grouped - minimum_NG[..., None]).flatten(1)
