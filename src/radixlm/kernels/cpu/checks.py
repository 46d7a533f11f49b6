"""Checks of tensors before they go to the extension, which does not check them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from radixlm.kernels.cpu.extension import DTYPE_CODE


def rows_of(x: Tensor, name: str, shape: Sequence[int] | None = None) -> tuple[int, int]:
    """(address, row stride in elements) of a float32 matrix whose rows are contiguous."""
    if shape is not None and tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name}: expected {tuple(shape)}, got {tuple(x.shape)}")
    if x.dtype != torch.float32 or x.device.type != "cpu":
        raise TypeError(f"{name}: expected float32 on the cpu, got {x.dtype} on {x.device}")
    if x.ndim != 2 or (x.shape[1] > 1 and x.stride(1) != 1):
        raise ValueError(f"{name}: expected a matrix of contiguous rows, got {tuple(x.shape)}")
    return x.data_ptr(), x.stride(0)


def vector(x: Tensor | None, size: int, name: str) -> Tensor | None:
    """x as a contiguous float32 vector of ``size``; None stays None."""
    if x is None:
        return None
    if x.numel() != size:
        raise ValueError(f"{name}: expected {size} numbers, got {tuple(x.shape)}")
    return x.detach().to(torch.float32).reshape(-1).contiguous()


def int32(x: Tensor, name: str, size: int = -1) -> Tensor:
    """x [size] as contiguous int32 (converted when it is int64)."""
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected int32 or int64, got {x.dtype}")
    return expect(x.to(torch.int32).contiguous(), torch.int32, (size,), name)


def expect(x: Tensor, dtype: torch.dtype, shape: Sequence[int], name: str) -> Tensor:
    """x, a tensor of this dtype and shape (-1: of any size) in the memory of the host, whose last
    dimension is contiguous. TypeError or ValueError for another."""
    if x.dtype != dtype or x.device.type != "cpu":
        raise TypeError(f"{name}: expected {dtype} on the cpu, got {x.dtype} on {x.device}")
    fits = x.ndim == len(shape) and all(n in (-1, m) for n, m in zip(shape, x.shape, strict=True))
    if not fits or (x.shape[-1] > 1 and x.stride(-1) != 1):
        sizes = f"{tuple(x.shape)} with strides {x.stride()}"
        raise ValueError(f"{name}: expected contiguous rows {tuple(shape)}, got {sizes}")
    return x


def dtype_code(dtype: torch.dtype, name: str) -> int:
    """The extension's number of a dtype. TypeError when it has none."""
    if dtype not in DTYPE_CODE:
        raise TypeError(f"{name}: {dtype} has no kernel")
    return DTYPE_CODE[dtype]
