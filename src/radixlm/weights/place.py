"""A parameter's value: checked, in its dtype, on its device."""

from __future__ import annotations

import torch
from torch import Tensor

from radixlm.quant.param import Param


def problem_of(path: str, origin: str, param: Param, value: Tensor) -> str:
    """What is wrong with ``value`` for ``param``, naming both sides; "" if nothing."""
    if tuple(value.shape) != param.shape:
        return f"{path} is {list(param.shape)}, the checkpoint has {list(value.shape)} ({origin})"
    if param.storage == "int64":
        is_whole = not value.is_floating_point()
        return (
            ""
            if is_whole
            else f"{path} is of integers, the checkpoint has {value.dtype} ({origin})"
        )
    if not value.is_floating_point():
        return f"{path} is a floating-point weight, the checkpoint has {value.dtype} ({origin})"
    bad = _not_finite(value)
    if bad == "infinity" and path.endswith("bias"):
        return ""  # forbids a token or an expert
    return f"{path} holds {bad} in the checkpoint ({origin})" if bad else ""


def _not_finite(value: Tensor) -> str:
    """Either of "NaN" and "infinity", or "". One pass over the data: a sum is not finite if a
    number is not. It is taken in the data's own dtype, which is many times faster, and may
    overflow: each number is looked at then."""
    if value.dtype.itemsize == 1:
        return ""  # one-byte formats come with scales, which are checked
    if bool(torch.isfinite(value.sum())):
        return ""
    if bool(torch.isnan(value).any()):
        return "NaN"
    return "infinity" if bool(torch.isinf(value).any()) else ""


def place(
    value: Tensor, param: Param, weight_dtype: torch.dtype | None, device: torch.device
) -> None:
    """Fill ``param`` in the dtype that ``--dtype`` and its storage ask for.

    The value is borrowed, not copied, where dtype, device and layout are right already.
    """
    dtype = weight_dtype or value.dtype
    if param.storage == "float32" or dtype == torch.float64:
        dtype = torch.float32
    if param.storage == "int64":
        dtype = torch.int64
    is_right = value.dtype == dtype and value.device.type == device.type
    param.is_borrowed = is_right and value.is_contiguous()
    param.value = value if param.is_borrowed else value.to(device, dtype).contiguous()
