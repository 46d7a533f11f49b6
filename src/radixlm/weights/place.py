"""A parameter's value: checked, in its dtype, on its device."""

from __future__ import annotations

import torch
from torch import Tensor

from radixlm.quant.param import Param


def problem_of(path: str, origin: str, param: Param, value: Tensor) -> str:
    """What is wrong with ``value`` for ``param``, naming both sides; "" if nothing."""
    if tuple(value.shape) != param.shape:
        return f"{path} is {list(param.shape)}, the checkpoint has {list(value.shape)} ({origin})"
    if not value.is_floating_point():
        return f"{path} is a floating-point weight, the checkpoint has {value.dtype} ({origin})"
    if _has_nan(value):
        return f"{path} holds NaN in the checkpoint ({origin})"
    return ""


def _has_nan(value: Tensor) -> bool:
    """One pass over the data: a sum is NaN if a number is (or if infinities meet). It is taken
    in the data's own dtype, which is many times faster; overflow makes infinity, not NaN."""
    if value.dtype.itemsize == 1:
        return False  # one-byte formats come with scales, which are checked
    if not bool(torch.isnan(value.sum())):
        return False
    return bool(torch.isnan(value).any())


def place(
    value: Tensor, param: Param, weight_dtype: torch.dtype | None, device: torch.device
) -> None:
    """Fill ``param`` in the dtype that ``--dtype`` and its storage ask for.

    The value is borrowed, not copied, where dtype, device and layout are right already.
    """
    dtype = weight_dtype or value.dtype
    if param.storage == "float32" or dtype == torch.float64:
        dtype = torch.float32
    is_right = value.dtype == dtype and value.device.type == device.type
    param.is_borrowed = is_right and value.is_contiguous()
    param.value = value if param.is_borrowed else value.to(device, dtype).contiguous()
