"""Linear maps over weights quantized at load: what the formats mean.

    int8wo        int8 rows with a scale each; activations stay float, or are rounded to 16 bits row
                  by row, which adds less than 1 % to the error of the weights below 20,000 inputs
    w8a8          the same weights; activations are quantized row by row, sums are integers
    int4-<group>  4 bit values with a scale for each group of inputs; activations stay float
    w4a8-<group>  4 bit values with a whole multiple 1..15 for each group and a scale for each span
                  of 512 inputs; activations are quantized row by row and span by span. If a
                  checkpoint gives values and scales, a group is a span and has no multiple
    fp4-<group>   4 bit floats (e2m1) with a scale for each group of 16 or 32;
                  activations as in w4a8 with a checkpoint's scales

Legend: T tokens, I inputs, O outputs, G groups of a row.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

INT8_MAX = 127.0
SPAN = 512  # inputs that share a scale of activations in w4a8
MAX_MULTIPLE = 15
GROUPS = (32, 64, 128)
FP4_GROUPS = (16, 32)
FP4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0 to 7; 8 to 15 are negative
FORMATS = ("int8wo", "w8a8", *(f"{kind}-{g}" for kind in ("int4", "w4a8") for g in GROUPS))

# Of a checkpoint's integers: (scale, offset), float32 [O, G], for values 0..15: weight = value *
# scale + offset; (scale [O], None) for int8 values, (scale [O, G], None) for codes of e2m1. Stacked
# experts have an axis in front.
QuantScales = tuple[Tensor, Tensor | None]


def is_symmetric(scales: QuantScales) -> bool:
    """Whether values 0..15 stand for -8..7; int8 values always are symmetric."""
    scale, offset = scales
    return offset is None or torch.equal(offset, -8.0 * scale)


def fp4_values(codes: Tensor) -> Tensor:
    """The numbers of e2m1 codes 0..15, float32."""
    numbers = torch.tensor(FP4_NUMBERS, device=codes.device)
    return torch.cat((numbers, -numbers)).index_select(0, codes.flatten().int()).view(codes.shape)


def expert_scales(scales: QuantScales | None, expert: int) -> QuantScales | None:
    if scales is None:
        return None
    scale, offset = scales
    return scale[expert], None if offset is None else offset[expert]


def quantize_int8(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 [O, I], scale [O]): symmetric, a row's largest magnitude becomes 127."""
    scale_O = weight_OI.float().abs().amax(-1) / INT8_MAX
    inverse_O = torch.where(scale_O > 0, 1.0 / scale_O, 0.0)
    rounded = (weight_OI.float() * inverse_O[:, None]).round()
    return rounded.clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scale_O


def quantize_int4(weight_OI: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """(values 0..15 as uint8 [O, I], scale [O, G]): weight = (value - 8) * scale. A group's number
    of largest magnitude becomes 0, that is -8 * scale, exactly."""
    groups_OGK = weight_OI.float().view(weight_OI.shape[0], -1, group)
    largest = groups_OGK.gather(-1, groups_OGK.abs().argmax(-1, keepdim=True))
    scale = largest / -8.0
    values = _around_eight(groups_OGK, scale)
    return values.to(torch.uint8).view(weight_OI.shape), scale[..., 0]


def quantize_4bit(weight_OI: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """Values 0..15 [O, I] and scales [O, G] of ``fmt``: int4-, w4a8- or fp4-<group>."""
    kind, _, group = fmt.partition("-")
    by_kind = {"int4": quantize_int4, "w4a8": quantize_w4a8, "fp4": quantize_fp4}
    return by_kind[kind](weight_OI, int(group))


def quantize_fp4(weight_OI: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes of e2m1 (uint8 [O, I]) and scales [O, G]; halves go to the even code, what is beyond 6
    becomes 6. The scale of 32 inputs is the power of two below their largest magnitude over 4 (OCP
    MX 1.0, 6.3), that of 16 the largest magnitude over 6 in the 4 significant bits of e4m3."""
    groups_OGK = weight_OI.float().view(weight_OI.shape[0], -1, group)
    largest = groups_OGK.abs().amax(-1, keepdim=True)
    if group == FP4_GROUPS[0]:
        share, power = (largest / FP4_NUMBERS[-1]).frexp()
        scale = torch.ldexp((share * 16).round() / 16, power.clamp(min=-126))
        scale = torch.where(largest > 0, scale, 1.0)
    else:
        _, power = largest.frexp()  # largest = [0.5, 1) * 2^power
        one = torch.ones_like(power, dtype=torch.float32)
        scale = torch.ldexp(one, (power - 3).clamp(min=-126))
    size = (groups_OGK / scale).abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    whole = ((size / step).round() * step).clamp(max=6)
    codes = torch.bucketize(whole, torch.tensor(FP4_NUMBERS, device=whole.device))
    codes = codes + 8 * (groups_OGK < 0)
    return codes.to(torch.uint8).view(weight_OI.shape), scale[..., 0]


def quantize_w4a8(weight_OI: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """As ``quantize_int4``, but a group's scale is a whole multiple, -15..15, of a number that its
    span of 512 inputs shares, so that products of integers can be summed over a span. Of the
    multiple that holds the group's largest magnitude and the next smaller one, the better."""
    parts = [_multiples_of_span(part, group) for part in _spans(weight_OI.float(), SPAN)]
    values, scales = zip(*parts, strict=True)
    return torch.cat(values, 1), torch.cat(scales, 1)


def _spans(rows: Tensor, span: int) -> list[Tensor]:
    """Parts of ``span`` columns, the last may be shorter."""
    return [rows[..., i : i + span] for i in range(0, rows.shape[-1], span)]


def _multiples_of_span(part_OI: Tensor, group: int) -> tuple[Tensor, Tensor]:
    groups_OGK = part_OI.reshape(part_OI.shape[0], -1, group)
    largest = groups_OGK.gather(-1, groups_OGK.abs().argmax(-1, keepdim=True)) / -8.0
    unit = largest.abs().amax(1, keepdim=True) / MAX_MULTIPLE
    fitting = torch.where(unit > 0, (largest.abs() / unit - 1e-4).ceil(), 1.0)
    fitting = fitting.clamp(1, MAX_MULTIPLE)
    scales = [torch.where(largest < 0, -1, 1) * m * unit for m in (fitting, fitting - 1)]
    values = [_around_eight(groups_OGK, scale) for scale in scales]
    errors = [
        ((v - 8) * scale - groups_OGK).square().sum(-1, keepdim=True)
        for v, scale in zip(values, scales, strict=True)
    ]
    is_less = (errors[1] < errors[0]) & (fitting > 1)
    value = torch.where(is_less, values[1], values[0])
    scale = torch.where(is_less, scales[1], scales[0])
    return value.to(torch.uint8).reshape(part_OI.shape), scale[..., 0]


def _around_eight(x: Tensor, scale: Tensor) -> Tensor:
    inverse = torch.where(scale != 0, 1.0 / scale, 0.0)
    return ((x * inverse).round() + 8).clamp(0, 15)


def quantize_rows(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Activations as whole numbers -127..127 (kept in float64) and a scale for each row."""
    max_T = x_TI.float().abs().amax(-1, keepdim=True)
    inverse = torch.where(max_T > 0, INT8_MAX / max_T, 0.0)
    return (x_TI.float() * inverse).round().double(), max_T / INT8_MAX


def fake_quantize_groups(x_TI: Tensor, group: int) -> Tensor:
    """Activations after quantization by groups of inputs (the last may be shorter), as floats."""
    parts = [quantize_rows(part) for part in _spans(x_TI, group)]
    return torch.cat([whole.float() * scale for whole, scale in parts], -1)


class DequantLinear(ABC):
    """Base of the reference's quantized linear maps: dequantizes the weight on every call."""

    formats: tuple[str, ...] = ()

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, fmt: str) -> None:
        if fmt not in self.formats:
            raise ValueError(f"unknown weight format {fmt!r}; known: {', '.join(self.formats)}")
        self.bias_O, self.out_features = bias_O, int(weight_OI.shape[0])
        self._dtype = weight_OI.dtype

    @abstractmethod
    def dequantize(self) -> Tensor:
        """The weight as float32 [O, I]."""

    @abstractmethod
    def product(self, x_TI: Tensor) -> Tensor:
        """x times the weight, float32 [T, O]."""

    def run(self, x_TI: Tensor) -> Tensor:
        """[T, O] in the dtype of x."""
        y_TO = self.product(x_TI.reshape(-1, x_TI.shape[-1]))
        if self.bias_O is not None:
            y_TO = y_TO + self.bias_O.float()
        return y_TO.to(x_TI.dtype).view(*x_TI.shape[:-1], self.out_features)

    def rows(self, ids_T: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        """Rows ``ids`` of the weight times ``scale``, for a quantized embedding table."""
        return (self.dequantize()[ids_T] * scale).to(dtype)

    def unpack(self) -> Tensor:
        """The dequantized weight [O, I] in the checkpoint's dtype."""
        return self.dequantize().to(self._dtype)


class ReferenceQuantized(DequantLinear):
    """Holds the integers of a format."""

    formats = (*FORMATS, *(f"fp4-{group}" for group in FP4_GROUPS))

    def __init__(
        self, weight_OI: Tensor, bias_O: Tensor | None, fmt: str, scales: QuantScales | None = None
    ) -> None:
        """With ``scales``, the weight holds a checkpoint's values."""
        super().__init__(weight_OI, bias_O, fmt)
        kind, _, group = fmt.partition("-")
        self._group, self._is_dynamic = int(group or 0), kind in ("w8a8", "w4a8", "fp4")
        self._is_fp4 = kind == "fp4"
        self._span = self._group if scales is not None else SPAN
        self._offset: Tensor | None = None
        if scales is not None:
            self._dtype, self._values = torch.bfloat16, weight_OI
            self._scale, self._offset = scales
        elif self._group:
            self._values, self._scale = quantize_4bit(weight_OI, fmt)
        else:
            self._values, self._scale = quantize_int8(weight_OI)

    def product(self, x_TI: Tensor) -> Tensor:
        if self._group:
            x = fake_quantize_groups(x_TI, self._span) if self._is_dynamic else x_TI.float()
            return x @ self.dequantize().T
        if self._is_dynamic:
            x_whole, x_scale = quantize_rows(x_TI)
            sums_TO = (x_whole @ self._values.double().T).float()
            return sums_TO * (x_scale * self._scale)
        return x_TI.float() @ self.dequantize().T

    def dequantize(self) -> Tensor:
        if not self._group:
            return self._values.float() * self._scale[:, None]
        if self._is_fp4:
            numbers = fp4_values(self._values).view(*self._scale.shape, -1)
            return (numbers * self._scale[..., None]).flatten(1)
        grouped = self._values.float().view(self.out_features, -1, self._group)
        if self._offset is not None:
            return (grouped * self._scale[..., None] + self._offset[..., None]).flatten(1)
        return ((grouped - 8) * self._scale[..., None]).flatten(1)
