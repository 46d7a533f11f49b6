"""A parameter's value: checked, in its dtype, on its device."""

from __future__ import annotations

import torch
from torch import Tensor

from radixlm.quant.param import Param
from radixlm.weights.origin import non_finite_kind


def describe_mismatch(path: str, param: Param, value: Tensor) -> str:
    """How shape and dtype of ``value`` do not fit ``param``, naming both sides; "" if they do."""
    if tuple(value.shape) != param.shape:
        return f"{path} is {list(param.shape)}, the checkpoint has {list(value.shape)}"
    if param.storage == "int64":
        is_whole = not value.is_floating_point()
        return "" if is_whole else f"{path} is of integers, the checkpoint has {value.dtype}"
    if not value.is_floating_point():
        return f"{path} is a floating-point weight, the checkpoint has {value.dtype}"
    if value.dtype.itemsize == 1:
        return f"{path} is in 8 bit floats, of which quantization_config does not speak"
    return ""


def non_finite_problem(path: str, value: Tensor) -> str:
    """What number of a floating-point parameter is none, "" if all are."""
    bad = non_finite_kind(value)
    if bad == "infinity" and path.endswith("bias"):
        return ""  # forbids a token or an expert
    return f"{path} holds {bad} in the checkpoint" if bad else ""


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
