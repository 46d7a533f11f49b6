"""Weights of 2 and 4 bits in bytes. Legend: O outputs, I inputs, G groups of 128 inputs.

w4afp8   experts: weight int8 [O, I / 2], two's complement, the first of two in the lower half;
         weight_scale_inv [O, G]. All else is fp8 in blocks of 128 x 128.
bitnet   weight uint8 [O / 4, I]: output r + k O / 4 in bits 2k of row r, 0..2 for -1..1;
         weight_scale [1], which divides in "bitlinear" and multiplies in "autobitlinear"
         (arXiv:2402.17764). Online, floats that become ternary by their mean magnitude.
"""

import torch

from radixlm.quant.checkpoint import StoredQuant
from radixlm.quant.fp8 import BY_BLOCK, Fp8Quant
from radixlm.quant.widened import BitNetQuant
from radixlm.weights.fp8_source import Fp8Source
from radixlm.weights.packed_integers import Integers
from radixlm.weights.parts_source import Parts, PartsSource, find_parts
from radixlm.weights.source import TensorSource

_SCALES = ("weight_scale_inv", "weight_scale")


class W4AFp8Source(PartsSource):
    """Experts in 4 bits over layers in 8 bit floats."""

    def __init__(self, inner: TensorSource, quant: StoredQuant, dtype: torch.dtype) -> None:
        found = find_parts(inner, ("weight", *_SCALES))
        parts = {
            name: part
            for name, part in found.items()
            if len(part) == 2 and "weight" in part and inner.dtype(name) == torch.int8
        }
        super().__init__(Fp8Source(inner, Fp8Quant(quant.method, BY_BLOCK), dtype), parts, dtype)

    def weight(self, name: str) -> Integers:
        packed = self.part(name, "weight").view(torch.uint8)
        values = torch.stack((packed & 15, packed >> 4), -1).flatten(-2) ^ 8
        scale = next(part for part in _SCALES if part in self._parts[name])
        scale_OG = self.part(name, scale).float()
        if (
            scale_OG.ndim != 2
            or len(scale_OG) != len(values)
            or values.shape[1] % scale_OG.shape[1]
        ):
            raise ValueError(f"{name} {list(values.shape)} has scales {list(scale_OG.shape)}")
        group = values.shape[1] // scale_OG.shape[1]
        return Integers(values, scale_OG, torch.full_like(scale_OG, 8), group, 4)


class BitNetSource(PartsSource):
    """Ternary weights, kept in 4 bits."""

    def __init__(self, inner: TensorSource, quant: BitNetQuant, dtype: torch.dtype) -> None:
        self._quant = quant
        parts: Parts = {}
        for name, found in find_parts(inner, ("weight", "weight_scale")).items():
            if quant.is_online and name.endswith("_proj.weight"):
                parts[name] = found
            elif len(found) == 2 and inner.dtype(name) == torch.uint8:
                parts[name] = found
        super().__init__(inner, parts, dtype)

    def weight(self, name: str) -> Integers:
        stored = self.part(name, "weight")
        if stored.dtype == torch.uint8:
            values = torch.cat([(stored >> shift) & 3 for shift in (0, 2, 4, 6)])
            scale = self.part(name, "weight_scale").float().reshape(-1)[:1]
            scale = 1 / scale if self._quant.divides else scale
        else:
            inverse = 1 / stored.float().abs().mean().clamp(min=1e-5)
            values = (stored.float() * inverse).round().clamp(-1, 1).add_(1).to(torch.uint8)
            scale = (1 / inverse).reshape(1)
        scale_O1 = scale.expand(len(values), 1).contiguous()
        # 1..3 around 2: the middle of 2 bits
        return Integers(values + 1, scale_O1, torch.full_like(scale_O1, 2), values.shape[1], 2)
