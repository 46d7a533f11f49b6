"""Weights of torchao in safetensors: "X._weight_qdata", "X._weight_scale", ... and a description of
each tensor in the file's metadata. Legend: O outputs, I inputs, G groups.

    Int8Tensor, IntxUnpackedToInt8Tensor   qdata int8 [O, I], scale and zero_point by block_size
    Int4Tensor                             qdata [O, I / 2], the first of two in the lower bits,
                                           scale, zero_point [G, O]: weight = value * scale + zero
    Float8Tensor                           qdata in 8 bit floats, scale [O or 1, 1] or by blocks

https://github.com/pytorch/ao (prototype/safetensors).
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from radixlm.base.errors import CheckpointError
from radixlm.quant.checkpoint import StoredQuant
from radixlm.quant.quantized_weight import QuantizedWeight
from radixlm.weights.fp8_source import dequantize
from radixlm.weights.packed_integers import Integers
from radixlm.weights.parts_source import Parts, PartsSource
from radixlm.weights.safetensors_file import read_metadata
from radixlm.weights.source import TensorSource

_KINDS = ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Int4Tensor", "Float8Tensor")


class TorchAoSource(PartsSource):
    """Integers stay; 8 bit floats are dequantized, and found again by layers that keep them."""

    def __init__(self, inner: TensorSource, quant: StoredQuant, dtype: torch.dtype) -> None:
        self._kinds: dict[str, Mapping[str, Any]] = {}
        parts: Parts = {}
        names = inner.sizes()
        for file in (f for f in inner.files() if f.suffix == ".safetensors"):
            for weight, record in _descriptions(read_metadata(file)).items():
                kind = record["_type"]
                if kind not in _KINDS:
                    known = ", ".join(_KINDS)
                    raise CheckpointError(f"{file}: {weight} is a {kind}; known: {known}")
                stem, _, last = weight.rpartition(".")
                prefix = f"{stem}._{last}_"
                # a weight's parts may lie in two files
                found = {
                    name.removeprefix(prefix): name for name in names if name.startswith(prefix)
                }
                self._kinds[weight], parts[weight] = record, found
        super().__init__(inner, parts, dtype)

    def is_integer(self, name: str) -> bool:
        return str(self._kinds[name]["_type"]) != "Float8Tensor"

    def weight(self, name: str) -> Integers | QuantizedWeight | Tensor:
        if "act_pre_scale" in self._parts[name]:
            raise ValueError(f"{name} scales its inputs (act_pre_scale), which cannot be computed")
        kind, values = self._kinds[name]["_type"], self.part(name, "qdata")
        scale = self.part(name, "scale")
        try:
            if kind == "Float8Tensor":
                return self._float8(name, values, scale)
            if kind == "Int4Tensor":
                return self._int4(name, values, scale)
            return self._integers(name, values, scale)
        except RuntimeError as error:  # a view of a wrong shape
            raise ValueError(f"{self._parts[name]['qdata']}: {error}") from error

    def read_quantized(self, name: str) -> QuantizedWeight | None:
        weight = super().read_quantized(name)
        if name not in self._parts:
            return weight
        is_dynamic = self._data(name).get("act_quant_kwargs") is not None
        if weight is None or not is_dynamic or weight.bits != 8 or weight.scale_OG.shape[1] > 1:
            return weight
        return QuantizedWeight(weight.values_OI, weight.scale_OG, weight.offset_OG, 8, True)

    def _data(self, name: str) -> Mapping[str, Any]:
        data = self._kinds[name].get("_data")
        return data if isinstance(data, dict) else {}

    def _float8(self, name: str, values: Tensor, scale: Tensor) -> Tensor:
        block = self._data(name).get("block_size") or values.shape[-2:]
        rows, inputs = (max(int(size), 1) for size in block[-2:])
        return dequantize(values, scale.float(), (rows, inputs)).to(self._dtype)

    def _int4(self, name: str, values: Tensor, scale: Tensor) -> QuantizedWeight:
        unsigned = values.view(torch.uint8)
        pairs = torch.stack((unsigned & 15, unsigned >> 4), -1).flatten(1) ^ 8
        scale_OG = scale.float().t().contiguous()
        zero_OG = self.part(name, "zero_point").float().t()
        return QuantizedWeight(pairs, scale_OG, zero_OG - 8 * scale_OG)

    def _integers(self, name: str, values: Tensor, scale: Tensor) -> Integers:
        kind = self._data(name).get("target_dtype")
        bits = int(str(kind["_data"]).removeprefix("int")) if isinstance(kind, dict) else 8
        half, (num_out, num_in) = 1 << (bits - 1), values.shape
        scale_OG = scale.float().view(-1, scale.shape[-1] if scale.ndim > 1 else 1)
        scale_OG = scale_OG.expand(num_out, -1)
        zero_OG = torch.zeros_like(scale_OG)
        if "zero_point" in self._parts[name]:
            zero_OG = self.part(name, "zero_point").float().reshape(-1, scale_OG.shape[1])
        unsigned = (values.to(torch.int16) + half).to(torch.uint8)
        group = num_in // scale_OG.shape[1]
        return Integers(unsigned, scale_OG, zero_OG.expand_as(scale_OG) + half, group, bits)


def _descriptions(metadata: Mapping[str, str]) -> dict[str, Mapping[str, Any]]:
    """The JSON of each tensor that is not a plain one."""
    found = {}
    for name, text in metadata.items():
        if not text.startswith('{"_type"'):
            continue
        record = json.loads(text)
        if record["_type"] != "Tensor":
            found[name] = record
    return found
