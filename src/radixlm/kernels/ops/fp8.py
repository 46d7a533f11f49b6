"""Weights and activations in 8 bit floats (e4m3): what the formats mean.

    fp8      a scale for each row of the weight; activations are rounded row by row
    fp8-128  a scale for each 128 x 128 block; activations are rounded by 128 inputs of a row

Legend: T tokens, I inputs, O outputs.
"""

import torch
from torch import Tensor

from radixlm.kernels.ops.quantized import DequantLinear

FP8_MAX = 448.0
BLOCK = 128
FORMATS = ("fp8", f"fp8-{BLOCK}")
_SAMPLE = 256  # numbers of a group that its scale is recovered from
# Mantissas of e4m3: a group's largest number is one of these times a power of two.
_MANTISSAS = (1.0, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875)


def is_fp8(fmt: str) -> bool:
    """Whether a weight format is one of these."""
    return fmt.startswith("fp8")


def scales_of(groups_GN: Tensor) -> Tensor:
    """A scale for each group of numbers (a row), float32 [G].

    For numbers that were e4m3 times one scale, that scale (maybe times a power of two), so that
    dequantized checkpoints recover their stored numbers. For others, one that maps the largest
    number to a number of e4m3 above 224: all eight such scales are tried on a part of the group.
    """
    step = max(1, groups_GN.shape[1] // _SAMPLE)
    part_GN = groups_GN[:, ::step].float()
    max_G1 = groups_GN.abs().amax(1, keepdim=True).float()
    best_G1, best_error_G1 = max_G1 / FP8_MAX, torch.full_like(max_G1, torch.inf)
    for mantissa in _MANTISSAS:
        scale_G1 = max_G1 / (mantissa * (256.0 if mantissa <= 1.75 else 128.0))
        rounded_GN = e4m3(part_GN * inverse(scale_G1)).float()
        # A dequantized checkpoint was rounded again (bfloat16), which the mean undoes.
        fit_G1 = (rounded_GN * part_GN).sum(1, keepdim=True)
        norm_G1 = rounded_GN.square().sum(1, keepdim=True)
        fitted_G1 = torch.where(norm_G1 > 0, fit_G1 / norm_G1.clamp(min=1e-30), scale_G1)
        error_G1 = (rounded_GN * fitted_G1 - part_GN).square().sum(1, keepdim=True)
        is_better = error_G1 < best_error_G1
        best_G1 = torch.where(is_better, fitted_G1, best_G1)
        best_error_G1 = torch.where(is_better, error_G1, best_error_G1)
    return best_G1[:, 0]


def inverse(scale: Tensor) -> Tensor:
    """1 / scale, 0 where the scale is 0."""
    return torch.where(scale > 0, 1.0 / scale, 0.0)


def e4m3(x: Tensor) -> Tensor:
    """x rounded to e4m3, saturating."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def quantize_rows(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 [O, I], scale [O])."""
    scale_O = scales_of(weight_OI)
    return e4m3(weight_OI.float() * inverse(scale_O)[:, None]), scale_O


def quantize_blocks(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 [O, I], scale [ceil(O / 128), ceil(I / 128)])."""
    num_out, num_in = weight_OI.shape
    padded = torch.nn.functional.pad(weight_OI, (0, -num_in % BLOCK, 0, -num_out % BLOCK))
    rows, cols = padded.shape[0] // BLOCK, padded.shape[1] // BLOCK
    blocks = padded.view(rows, BLOCK, cols, BLOCK).transpose(1, 2)
    scale = scales_of(blocks.reshape(rows * cols, -1)).view(rows, cols)
    values = e4m3(weight_OI.float() * inverse(spread(scale, num_out, num_in)))
    return values, scale


def spread(scale_RC: Tensor, num_out: int, num_in: int) -> Tensor:
    """The scale of every number of a weight [O, I], from those of its blocks."""
    rows = scale_RC.repeat_interleave(BLOCK, 0)[:num_out]
    return rows.repeat_interleave(BLOCK, 1)[:, :num_in]


def quantize_x(x_TI: Tensor, group: int = 0) -> tuple[Tensor, Tensor]:
    """Activations as (e4m3 [T, I], scale [T, ceil(I / group)]); group 0: a scale for each row."""
    num_in = x_TI.shape[1]
    group = group or num_in
    padded = torch.nn.functional.pad(x_TI.float(), (0, -num_in % group))
    groups = padded.view(x_TI.shape[0], -1, group)
    scale = groups.abs().amax(-1, keepdim=True) / FP8_MAX
    return e4m3(groups * inverse(scale)).flatten(1)[:, :num_in], scale[..., 0]


def fake_quantize_x(x_TI: Tensor, group: int = 0) -> Tensor:
    """Activations after ``quantize_x``, as float32."""
    values, scale = quantize_x(x_TI, group)
    if not group:
        return values.float() * scale
    return values.float() * scale.repeat_interleave(group, 1)[:, : x_TI.shape[1]]


def fake_quantize_weight(weight_OI: Tensor, fmt: str) -> Tensor:
    """A weight [O, I] rounded to ``fmt``, in its own dtype."""
    if fmt == FORMATS[0]:
        values, scale_O = quantize_rows(weight_OI)
        return (values.float() * scale_O[:, None]).to(weight_OI.dtype)
    values, scale = quantize_blocks(weight_OI)
    return (values.float() * spread(scale, *weight_OI.shape)).to(weight_OI.dtype)


def emulate_fp8(weight: Tensor, fmt: str) -> tuple[Tensor, str]:
    """For devices without fp8: a weight [O, I] or [E, O, I] rounded to ``fmt``, and "" to pack it
    in its own dtype; other formats stay."""
    if not is_fp8(fmt):
        return weight, fmt
    if weight.ndim == 2:
        return fake_quantize_weight(weight, fmt), ""
    return torch.stack([fake_quantize_weight(part, fmt) for part in weight]), ""


class ReferenceFp8(DequantLinear):
    """Holds e4m3, and rounds activations as the format says."""

    formats = FORMATS

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, fmt: str) -> None:
        super().__init__(weight_OI, bias_O, fmt)
        self._group = 0 if fmt == FORMATS[0] else BLOCK
        quantize = quantize_blocks if self._group else quantize_rows
        self._values, self._scale = quantize(weight_OI)

    def product(self, x_TI: Tensor) -> Tensor:
        return fake_quantize_x(x_TI, self._group) @ self.dequantize().T

    def dequantize(self) -> Tensor:
        if not self._group:
            return self._values.float() * self._scale[:, None]
        return self._values.float() * spread(self._scale, *self._values.shape)
