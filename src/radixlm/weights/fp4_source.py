"""Weights in floats of 4 bits (e2m1), two in a byte, the first in the lower half.

    X_blocks, X_scales        gpt-oss: uint8 [experts, O, G, 16], powers of two [experts, O, G]
                              biased by 127 (MXFP4)
    X.weight_packed           compressed-tensors: uint8 [O, I / 2]; X.weight_scale either powers of
                              two, or e4m3 divided by X.weight_global_scale (NVFP4)
    X.weight (uint8)          ModelOpt: X.weight_scale e4m3 times X.weight_scale_2; inputs times
                              X.pre_quant_scale [I] where there is one
    X (uint8)                 the same of Llama 4's experts, with the outputs last: [experts,
                              I / 2, O]; X_weight_scale [experts, G, O] and X_weight_scale_2
    X.weight (int8)           DeepSeek V4: X.scale, powers of two (e8m0)

Legend: O outputs, I inputs, G groups of 16 or 32 inputs that share a scale.
"""

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from radixlm.base.lazy import load
from radixlm.kernels.ops.quantized import FP4_GROUPS
from radixlm.quant.fp4 import Fp4Quant, MixedQuant
from radixlm.quant.quantized_weight import QuantizedWeight
from radixlm.weights.parts_source import Parts, PartsSource, find_parts
from radixlm.weights.source import TensorSource

log = logging.getLogger(__name__)
_BLOCKS, _SCALES = "_blocks", "_scales"
_PRE = "pre_quant_scale"
_PARTS = (
    *("weight_packed", "weight", "weight_scale", "weight_scale_2", "weight_global_scale"),
    *("scale", _PRE),
)
# at most one of them is there
_VALUES = ("blocks", "outputs_last", "weight_packed", "weight")


def open_mixed(inner: TensorSource, quant: MixedQuant, dtype: torch.dtype) -> TensorSource:
    """The sources of all kinds of numbers of one checkpoint, one upon the other."""
    for part in quant.parts:
        inner = load(part.source)(inner, part, dtype)
    return inner


class Fp4Source(PartsSource):
    """``inner`` with its floats of 4 bits dequantized to ``dtype``."""

    def __init__(self, inner: TensorSource, quant: Fp4Quant, dtype: torch.dtype) -> None:
        parts = find_parts(inner, _PARTS)
        parts = {name: found for name, found in parts.items() if _is_fp4(inner, found)}
        for name in inner.sizes():
            stem = name.removesuffix(_BLOCKS)
            if name != stem:
                weight = stem if stem.endswith(".weight") else name
                scales = {"scales": stem + _SCALES} if stem + _SCALES in inner.sizes() else {}
                parts[weight] = {"blocks": name} | scales
        super().__init__(inner, parts | _with_outputs_last(inner), dtype)
        log.info("%s: %d weights in floats of 4 bits", quant.method, len(parts))

    def weight(self, name: str) -> Tensor:
        values, scale = self._values(name)
        if values.ndim == 2:
            return self._of_inputs(name, _dequantize(values, scale, self._dtype))
        out = torch.empty(values.shape, dtype=self._dtype)
        for expert, (codes, scales) in enumerate(zip(values, scale, strict=True)):
            out[expert] = _dequantize(codes, scales, self._dtype)  # one at a time: less memory
        return out.transpose(1, 2) if "outputs_last" in self._parts[name] else out

    def read_quantized(self, name: str) -> QuantizedWeight | None:
        """Inputs are last, however they are stored."""
        if name not in self._parts:
            return self.inner.read_quantized(name)
        values, scale = self._values(name)
        if values.shape[-1] // scale.shape[-1] not in FP4_GROUPS or _PRE in self._parts[name]:
            return None
        return QuantizedWeight(values, scale, torch.zeros_like(scale), is_fp4=True)

    def _of_inputs(self, name: str, weight_OI: Tensor) -> Tensor:
        """The weight for inputs as they come, where it was made for scaled ones."""
        if _PRE not in self._parts[name]:
            return weight_OI
        scale_I = self.part(name, _PRE)
        if scale_I.shape != weight_OI.shape[1:]:
            where = self._parts[name][_PRE]
            raise ValueError(f"{where} {list(scale_I.shape)}: inputs are {weight_OI.shape[1]}")
        return (weight_OI.float() * scale_I.float()).to(self._dtype)

    def _values(self, name: str) -> tuple[Tensor, Tensor]:
        """(codes uint8 [.., O, I], float32 scales [.., O, G])."""
        stored = next(part for part in _VALUES if part in self._parts[name])
        packed = self.part(name, stored)
        where = self._parts[name][stored]
        if packed.dtype == torch.int8:
            packed = packed.view(torch.uint8)
        if packed.dtype != torch.uint8:
            raise ValueError(f"{where} is of {packed.dtype}, not of bytes with two numbers each")
        if stored == "blocks":
            if "scales" not in self._parts[name]:
                raise ValueError(f"{where.removesuffix(_BLOCKS)}{_SCALES} is missing")
            scale = powers_of_two(self.part(name, "scales"))
            if packed.shape[:-1] != scale.shape:
                raise ValueError(f"{where} {list(packed.shape)} has scales {list(scale.shape)}")
            packed = packed.flatten(-2)
        else:
            scale = self._scale(name)
        if stored == "outputs_last" and packed.ndim == scale.ndim == 3:
            packed, scale = packed.transpose(1, 2), scale.transpose(1, 2)
        if packed.ndim not in (2, 3) or scale.shape[:-1] != packed.shape[:-1]:
            raise ValueError(f"{where} {list(packed.shape)} has scales {list(scale.shape)}")
        num_in, num_groups = 2 * packed.shape[-1], scale.shape[-1]
        if not num_groups or num_in % num_groups:
            raise ValueError(f"{where}: {num_in} inputs are no {num_groups} groups of one size")
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
        return codes, scale.contiguous()

    def _scale(self, name: str) -> Tensor:
        scale = self.part(name, "scale" if "scale" in self._parts[name] else "weight_scale")
        if scale.dtype == torch.uint8:
            return powers_of_two(scale)
        scale = scale.float()
        if "weight_scale_2" in self._parts[name]:
            return scale * self._number(name, "weight_scale_2")
        if "weight_global_scale" in self._parts[name]:
            return scale / self._number(name, "weight_global_scale")
        return scale

    def _number(self, name: str, part: str) -> Tensor:
        number = self.part(name, part)
        if number.numel() != 1 or not number.is_floating_point():
            raise ValueError(f"{self._parts[name][part]} is {list(number.shape)}, not one number")
        return number.float().reshape(())


def _with_outputs_last(inner: TensorSource) -> Parts:
    parts: Parts = {}
    for name in inner.sizes():
        found = {"weight_scale": f"{name}_weight_scale", "weight_scale_2": f"{name}_weight_scale_2"}
        found = {part: other for part, other in found.items() if other in inner.sizes()}
        if "weight_scale" in found and inner.dtype(name) == torch.uint8:
            parts[name] = {"outputs_last": name} | found
    return parts


def powers_of_two(scale: Tensor) -> Tensor:
    """float32 of e8m0 in bytes."""
    if scale.dtype != torch.uint8:
        raise ValueError(f"scales are of {scale.dtype}, not powers of two in bytes")
    return torch.exp2(scale.double() - 127).float()


def _dequantize(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (
        QuantizedWeight(values, scale, torch.zeros_like(scale), is_fp4=True).dequantize().to(dtype)
    )


def _is_fp4(inner: TensorSource, parts: Mapping[str, str]) -> bool:
    stored = next((part for part in _VALUES if part in parts), "")
    if not stored or not {"weight_scale", "scale"} & parts.keys():
        return False
    dtype = inner.dtype(parts[stored])
    is_v4 = dtype == torch.int8 and "scale" in parts  # others store integers so
    return is_v4 or dtype == torch.uint8
