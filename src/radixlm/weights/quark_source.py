"""Integers of AMD Quark. Legend: O outputs, I inputs, G groups of inputs.

    by groups   weight int32 [I, O / 8] or int8 [I, O]; scale [G, O]; zeros [G, O / 8] or [G, O]
    else        weight int32 [O, I / 8] or int8 [O, I]; scale [O] or one; zeros [O / 8] or [O]

Parts are named weight, weight_scale and weight_zero_point. https://github.com/amd/Quark
"""

import torch
from torch import Tensor

from radixlm.quant.quark import QuarkQuant
from radixlm.weights.packed_integers import Integers, unpack, unpack_awq
from radixlm.weights.parts_source import PartsSource, find_parts
from radixlm.weights.source import TensorSource

_PARTS = ("weight", "weight_scale", "weight_zero_point")
_INTEGERS = (torch.int32, torch.int8, torch.uint8)


class QuarkSource(PartsSource):
    """Matrices of integers that have a scale."""

    def __init__(self, inner: TensorSource, quant: QuarkQuant, dtype: torch.dtype) -> None:
        self._quant = quant
        parts = {
            name: found
            for name, found in find_parts(inner, _PARTS).items()
            if {"weight", "weight_scale"} <= found.keys()
            and inner.dtype(found["weight"]) in _INTEGERS
        }
        super().__init__(inner, parts, dtype)

    def weight(self, name: str) -> Integers:
        stored, scale = self.part(name, "weight"), self.part(name, "weight_scale").float()
        bits, is_grouped = 4 if stored.dtype == torch.int32 else 8, self._quant.is_grouped
        values = self._numbers(stored)
        values, scale_OG = (values.t(), scale.t()) if is_grouped else (values, scale.view(-1, 1))
        num_out, num_in = values.shape
        if scale_OG.numel() == 1:
            scale_OG = scale_OG.expand(num_out, 1)
        zero_OG = torch.zeros_like(scale_OG)
        if "weight_zero_point" in self._parts[name]:
            zero = self._numbers(self.part(name, "weight_zero_point"))
            zero_OG = zero.float().t() if is_grouped else zero.float().view(-1, 1)
        elif not self._quant.is_signed:
            zero_OG = torch.full_like(scale_OG, 1 << (bits - 1))
        if (
            scale_OG.shape[0] != num_out
            or num_in % scale_OG.shape[1]
            or (zero_OG.shape not in (scale_OG.shape, (1, 1)))
        ):
            raise ValueError(
                f"{name}: integers [{num_out}, {num_in}], scales {list(scale_OG.shape)} and zero "
                f"points {list(zero_OG.shape)} do not fit each other"
            )
        half = 1 << (bits - 1) if self._quant.is_signed else 0
        unsigned = (values.to(torch.int16) + half).to(torch.uint8).contiguous()
        zero_OG = zero_OG.expand_as(scale_OG) + half
        group = num_in // scale_OG.shape[1]
        return Integers(unsigned, scale_OG.contiguous(), zero_OG.contiguous(), group, bits)

    def _numbers(self, stored: Tensor) -> Tensor:
        """Whole numbers [R, 8 W] of words [R, W], or as they are where a number is a byte."""
        if stored.dtype != torch.int32 or stored.ndim == 0:
            return stored
        words = stored.view(-1, stored.shape[-1])
        numbers = unpack_awq(words).t() if self._quant.is_reordered else unpack(words, 4)
        if self._quant.is_signed:
            numbers = (numbers.to(torch.int8) ^ 8) - 8
        return numbers
