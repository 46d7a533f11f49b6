"""How weights are rounded: methods by name, and what each stores.

Formats are those of compressed-tensors (https://github.com/vllm-project/compressed-tensors), which
vLLM, SGLang and transformers read too. Legend: O outputs, I inputs, G groups of inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from radixlm.base.record import Record, replace

FP8_MAX = 448.0
_GROUPS = (128, 64, 32)
NUM_SCALES = 24  # scales that are tried
_SMALLEST = 0.5  # of them, as a part of the one that holds the largest number
_CHUNK = 1 << 24  # numbers that are rounded at once


class Method(Record):
    """``group``: inputs that share a scale, 0 for whole rows. ``bits`` of floats: e4m3.
    ``rounds_inputs``: activations are rounded to the same kind, with a scale each token."""

    name: str
    bits: int
    is_float: bool = False
    group: int = 0
    rounds_inputs: bool = False

    @property
    def format(self) -> str:
        """The name of the layout in ``quantization_config``."""
        if self.is_float:
            return "float-quantized"
        return "int-quantized" if self.rounds_inputs else "pack-quantized"

    def fitting(self, shape: tuple[int, ...]) -> Method | None:
        """The method with the largest groups, at most these, that a weight [O, I] can have; None:
        it cannot be stored so."""
        if len(shape) != 2 or shape[1] % (32 // self.bits):
            return None
        sizes = [size for size in _GROUPS if size <= self.group] if self.group else [0]
        size = next((size for size in sizes if not size or shape[1] % size == 0), None)
        return None if size is None else replace(self, group=size)

    def scheme(self, targets: list[str]) -> dict[str, Any]:
        """One of the ``config_groups``."""
        kind = {"num_bits": self.bits, "type": "float" if self.is_float else "int"}
        common = {**kind, "symmetric": True, "actorder": None, "block_structure": None}
        weights = {
            **common,
            "strategy": "group" if self.group else "channel",
            "group_size": self.group or None,
            "dynamic": False,
            "observer": "mse",
        }
        inputs = {**common, "strategy": "token", "group_size": None, "dynamic": True}
        return {
            "targets": targets,
            "weights": weights,
            "input_activations": inputs if self.rounds_inputs else None,
            "output_activations": None,
            "format": self.format,
        }


def quantization_config(
    method: Method, others: dict[Method, list[str]], ignored: list[str]
) -> dict[str, Any]:
    """The ``quantization_config``. ``others``: modules with other groups than ``method``'s;
    ``ignored``: those that stay as they are."""
    schemes = [one.scheme(targets) for one, targets in others.items()]
    return {
        "quant_method": "compressed-tensors",
        "format": method.format,
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{number}": one
            for number, one in enumerate([*schemes, method.scheme(["Linear"])])
        },
        "ignore": ignored,
        "kv_cache_scheme": None,
    }


METHODS = {
    one.name: one
    for one in (
        *(Method(f"int4wo-{size}", 4, group=size) for size in (32, 64, 128)),
        Method("awq-like", 4, group=128),
        Method("int8wo", 8),
        Method("w8a8_int8", 8, rounds_inputs=True),
        Method("fp8", 8, is_float=True, rounds_inputs=True),
    )
}


class Rounded(Record):
    """``values_OI``: int8, of 4 bits -8..7, or e4m3; weight = values * ``scale_OG``, which has the
    dtype that it is stored in."""

    values_OI: Tensor
    scale_OG: Tensor

    def weight(self) -> Tensor:
        """The weight that it stands for, float32 [O, I]."""
        num_out, num_in = self.values_OI.shape
        groups = self.values_OI.float().view(num_out, self.scale_OG.shape[1], -1)
        return (groups * self.scale_OG.float()[..., None]).view(num_out, num_in)


def round_weight(
    weight_OI: Tensor,
    method: Method,
    dtype: torch.dtype,
    importance_I: Tensor | None = None,
    num_scales: int = NUM_SCALES,
) -> Rounded:
    """Round a weight, float32 [O, I]. Each group takes the scale of the least squared error, with
    ``importance_I`` (the mean square of each input) for its weights. ``dtype``: of the scales;
    ``num_scales``: how many are tried, the first holds the largest number."""
    step = max(1, _CHUNK // max(1, weight_OI.shape[1]))
    parts = [
        _round(rows, method, dtype, importance_I, num_scales)
        for rows in torch.split(weight_OI, step)
    ]
    return Rounded(
        torch.cat([one.values_OI for one in parts]), torch.cat([one.scale_OG for one in parts])
    )


def _round(
    weight_OI: Tensor,
    method: Method,
    dtype: torch.dtype,
    importance_I: Tensor | None,
    num_scales: int,
) -> Rounded:
    num_out, num_in = weight_OI.shape
    groups = weight_OI.view(num_out, -1, method.group or num_in)
    most = FP8_MAX if method.is_float else (1 << method.bits) / 2 - 0.5
    whole = groups.abs().amax(2, keepdim=True) / most
    weights = None if importance_I is None else importance_I.view(1, groups.shape[1], -1)
    best, best_error = whole, torch.full_like(whole, torch.inf)
    for number in range(1 if method.is_float else num_scales):
        scale = whole * (1 - (1 - _SMALLEST) * number / num_scales)
        scale = _stored(scale, dtype)
        error = (_values(groups, scale, method).float() * scale - groups).square()
        error = (error if weights is None else error * weights).sum(2, keepdim=True)
        is_better = error < best_error
        best = torch.where(is_better, scale, best)
        best_error = torch.where(is_better, error, best_error)
    values = _values(groups, best, method).view(num_out, num_in)
    return Rounded(values, best[..., 0].to(dtype))


def _stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A scale as a reader sees it; one of a group of zeros is 1."""
    return torch.where(scale > 0, scale, 1.0).to(dtype).float()


def _values(groups: Tensor, scale: Tensor, method: Method) -> Tensor:
    if method.is_float:
        return (groups / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    half = 1 << (method.bits - 1)
    return (groups / scale).round().clamp(-half, half - 1).to(torch.int8)


def tensors_of(rounded: Rounded, method: Method) -> dict[str, Tensor]:
    """What the checkpoint stores, by suffix."""
    values, scale = rounded.values_OI, rounded.scale_OG.contiguous()
    if method.format != "pack-quantized":
        return {"weight": values, "weight_scale": scale}
    shape = torch.tensor(values.shape, dtype=torch.int64)
    packed = pack(values, method.bits)
    return {"weight_packed": packed, "weight_scale": scale, "weight_shape": shape}


def pack(values_OI: Tensor, bits: int) -> Tensor:
    """int32 [O, I * bits / 32] of values shifted by half their range, the first input lowest."""
    shifted = (values_OI.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
    if bits == 4:
        shifted = shifted[:, 0::2] | (shifted[:, 1::2] << 4)
    return shifted.contiguous().view(torch.int32)
