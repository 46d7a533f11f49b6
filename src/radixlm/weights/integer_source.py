"""Tensors of integers, dequantized as they are read.

"X.weight" stands for X.qweight, X.weight_packed or an X.weight in int8, and for its scales and zero
points. Recipes and concatenations see floats; a layer that keeps integers calls ``read_quantized``.
"""

import logging
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from radixlm.quant.integers import BITS, IntegerQuant
from radixlm.quant.quantized_weight import QuantizedWeight
from radixlm.weights.packed_integers import (
    Integers,
    find_group_size,
    unpack,
    unpack_awq,
    unpack_padded,
)
from radixlm.weights.parts_source import PartsSource, find_parts
from radixlm.weights.source import TensorSource

log = logging.getLogger(__name__)
_GPTQ_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_PACKED = "weight_packed"
_COMPRESSED_PARTS = (
    *(_PACKED, "weight", "weight_scale", "weight_scale_inv", "weight_zero_point"),
    *("weight_shape", "weight_g_idx"),
)
_INTEGERS = (torch.int32, torch.int64)


class IntegerSource(PartsSource):
    """``inner`` with its integers dequantized to ``dtype``."""

    def __init__(self, inner: TensorSource, quant: IntegerQuant, dtype: torch.dtype) -> None:
        self._quant, is_compressed = quant, quant.layout == "compressed"
        parts = find_parts(inner, _COMPRESSED_PARTS if is_compressed else _GPTQ_PARTS)
        if is_compressed:
            parts = {name: p for name, p in parts.items() if _has_integers(inner, p)}
        super().__init__(inner, parts, dtype)
        self._log_counts()

    def _log_counts(self) -> None:
        kinds = Counter(
            "packed" if {"qweight", _PACKED} & parts.keys() else "int8"
            for parts in self._parts.values()
        )
        counts = ", ".join(f"{count} weights {kind}" for kind, count in sorted(kinds.items()))
        log.info("%s: %s", self._quant.method, counts or "no integers")

    def read_quantized(self, name: str) -> QuantizedWeight | None:
        if name not in self._parts:
            return self.inner.read_quantized(name)
        quantizes_inputs = self._quant.quantizes_inputs and not self._is_packed(name)
        return self.weight(name).to_quantized(quantizes_inputs)

    def _is_packed(self, weight: str) -> bool:
        return not {"qweight", _PACKED}.isdisjoint(self._parts[weight])

    def weight(self, name: str) -> Integers:
        if self._quant.layout == "compressed":
            return self._compressed(name)
        return self._gptq_or_awq(name)

    def _gptq_or_awq(self, weight: str) -> Integers:
        quant, layout = self._quant, self._quant.layout
        words, zero_words = self._words(weight, "qweight"), self._words(weight, "qzeros")
        scale_OG = self._floats(weight, "scales", 2).t().contiguous()
        bits = 4
        if layout == "awq":
            values, zeros = unpack_awq(words), unpack_awq(zero_words)
        elif layout == "gemv":
            values, zeros = unpack(words, 4), unpack(zero_words, 4)
            num_groups = max(values.shape[1] // (quant.groups or (values.shape[1],))[0], 1)
            scale_OG = scale_OG.t()[:, :num_groups]
            zeros = zeros[:, :num_groups]
        else:
            bits = 32 * zero_words.shape[1] // max(words.shape[1], 1)
            if bits not in BITS or (quant.bits and bits != quant.bits):
                known = quant.bits or ", ".join(map(str, BITS))
                raise ValueError(
                    f"{self._name(weight, 'qzeros')} is of {bits} bits beside "
                    f"{list(words.shape)}, config.json says {known}"
                )
            values = unpack(words.t(), bits)
            zeros = unpack(zero_words, bits).t()
        if zeros.shape != scale_OG.shape:
            raise ValueError(
                f"{self._name(weight, 'qzeros')} has zero points {list(zeros.t().shape)}, "
                f"scales are {list(scale_OG.t().shape)}"
            )
        zero_OG = zeros.float() + quant.zero_shift
        return self._checked(weight, values, scale_OG, zero_OG, bits, "g_idx", "scales")

    def _compressed(self, weight: str) -> Integers:
        bits, values = self._compressed_values(weight)
        num_out = values.shape[0]
        part = "weight_scale"
        if part not in self._parts[weight] and "weight_scale_inv" in self._parts[weight]:
            part = "weight_scale_inv"
        scale = self._floats(weight, part)
        if scale.numel() == 1:
            scale = scale.reshape(1, 1).expand(num_out, 1)
        scale_OG = scale[:, None] if scale.ndim == 1 else scale
        if scale_OG.ndim == 2 and self._quant.block_rows > 1 and num_out:
            num_blocks = -(-num_out // self._quant.block_rows)
            if scale_OG.shape[0] == num_blocks:
                scale_OG = scale_OG.repeat_interleave(self._quant.block_rows, 0)[:num_out]
        if scale_OG.ndim != 2:
            raise ValueError(f"{self._name(weight, part)} is {list(scale.shape)}")
        zero_OG = self._compressed_zeros(weight, scale_OG, bits)
        return self._checked(weight, values, scale_OG, zero_OG, bits, "weight_g_idx", part)

    def _compressed_values(self, weight: str) -> tuple[int, Tensor]:
        """(bits, values shifted by half their range [O, I])."""
        parts = self._parts[weight]
        if _PACKED not in parts and "weight" in parts:
            values = self.inner.read(parts["weight"])
            if values.dtype != torch.int8 or values.ndim != 2:
                raise ValueError(f"{parts['weight']} is of {values.dtype}, not of int8")
            return 8, values.view(torch.uint8) ^ 128
        words = self._words(weight, _PACKED)
        shape = self.part(weight, "weight_shape")
        sizes = shape.flatten().tolist() if not shape.is_floating_point() else []
        if len(sizes) != 2 or sizes[0] != words.shape[0]:
            raise ValueError(f"{self._name(weight, 'weight_shape')} says {sizes}")
        num_in = int(sizes[1])
        known = self._quant.bits  # few inputs fill as many words in other bits
        for choice in ((known,) if known else (), (4, 8, *BITS)):
            for bits in choice:
                if -(-num_in * bits // 32) == words.shape[1]:
                    return bits, unpack(words, bits)[:, :num_in]
            for bits in choice:  # as versions before 0.13 packed 3, 5 and 6 bits
                if -(-num_in // (32 // bits)) == words.shape[1]:
                    return bits, unpack_padded(words, bits)[:, :num_in]
        raise ValueError(
            f"{self._name(weight, _PACKED)} {list(words.shape)} holds no {sizes} numbers of 2 to 8 "
            "bits"
        )

    def _compressed_zeros(self, weight: str, scale_OG: Tensor, bits: int) -> Tensor:
        half = 1 << (bits - 1)
        if "weight_zero_point" not in self._parts[weight]:
            return torch.full_like(scale_OG, half)
        name, num_out = self._name(weight, "weight_zero_point"), scale_OG.shape[0]
        zeros = self.inner.read(name)
        if zeros.dtype == torch.int32 and zeros.ndim == 2:
            is_dense = -(-num_out * bits // 32) == zeros.shape[0]
            zeros = (unpack if is_dense else unpack_padded)(zeros.t(), bits)
            zeros = zeros[:, :num_out].t().float()
        elif not zeros.is_floating_point():
            zeros = zeros.float() + half
            if zeros.numel() == 1:
                zeros = zeros.reshape(1, 1).expand_as(scale_OG)
            zeros = zeros[:, None] if zeros.ndim == 1 else zeros
        if zeros.shape != scale_OG.shape:
            raise ValueError(f"{name} {list(zeros.shape)} does not fit {list(scale_OG.shape)}")
        return zeros

    def _checked(
        self,
        weight: str,
        values: Tensor,
        scale_OG: Tensor,
        zero_OG: Tensor,
        bits: int,
        index_part: str,
        scale_part: str,
    ) -> Integers:
        """The integers, after a check that the parts' shapes fit each other."""
        num_out, num_in = values.shape
        num_groups = scale_OG.shape[1]
        group = find_group_size(num_in, num_groups, self._quant.groups)
        if scale_OG.shape[0] != num_out or not group:
            sizes = " or ".join(str(g) for g in (*self._quant.groups, "all"))
            raise ValueError(
                f"{self._name(weight, scale_part)} has scales for {scale_OG.shape[0]} outputs and "
                f"{num_groups} groups; the integers are [{num_out}, {num_in}], and {sizes} inputs "
                "share a scale"
            )
        index = self._group_index(weight, index_part, num_in, num_groups)
        return Integers(values, scale_OG, zero_OG, group, bits, index)

    def _group_index(self, weight: str, part: str, num_in: int, num_groups: int) -> Tensor | None:
        """The group of each input; None if inputs are in the order of their groups."""
        if part not in self._parts[weight]:
            return None
        index = self.part(weight, part)
        is_whole = index.dtype in _INTEGERS and index.shape == (num_in,)
        if is_whole and num_in and bool((index == -1).all()):  # an order was allocated, not used
            return None
        if not is_whole or (num_in and not 0 <= int(index.min()) <= int(index.max()) < num_groups):
            raise ValueError(
                f"{self._name(weight, part)} does not name a group below {num_groups} for each of "
                f"{num_in} inputs"
            )
        return index.long()

    def _name(self, weight: str, part: str) -> str:
        return f"{weight.removesuffix('.weight')}.{part}"

    def _words(self, weight: str, part: str) -> Tensor:
        words = self.part(weight, part)
        if words.dtype != torch.int32 or words.ndim != 2:
            raise ValueError(
                f"{self._name(weight, part)} is {list(words.shape)} of {words.dtype}, not a matrix "
                "of int32"
            )
        return words

    def _floats(self, weight: str, part: str, ndim: int = 0) -> Tensor:
        scale = self.part(weight, part)
        if not scale.is_floating_point() or (ndim and scale.ndim != ndim):
            raise ValueError(f"{self._name(weight, part)} is {list(scale.shape)} of {scale.dtype}")
        return scale.float()


def _has_integers(source: TensorSource, parts: Mapping[str, str]) -> bool:
    """Floats may have scales too, left over from a calibration."""
    if len(parts) == 1 and "weight" in parts:
        return False
    if _PACKED in parts:  # bytes hold floats of 4 bits
        return source.dtype(parts[_PACKED]) != torch.uint8
    return "weight" not in parts or not source.dtype(parts["weight"]).is_floating_point
