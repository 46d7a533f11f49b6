"""Base of sources in which several stored tensors make one weight: values, scales, zero points."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from radixlm.quant.quantized_weight import QuantizedWeight, kernel_group_size
from radixlm.weights.origin import Origin
from radixlm.weights.packed_integers import Integers
from radixlm.weights.source import TensorSource, WrappedSource

Parts = dict[str, dict[str, str]]  # weight -> part -> stored tensor


class PartsSource(WrappedSource):
    """``inner`` with the weights that ``parts`` names; their parts have no bytes of their own.
    ``quantizes_inputs``: the weights were made for activations in 8 bits."""

    quantizes_inputs = False

    def __init__(self, inner: TensorSource, parts: Parts, dtype: torch.dtype) -> None:
        super().__init__(inner)
        self._parts, self._dtype = parts, dtype
        self._sizes = dict(inner.sizes())
        for weight, names in parts.items():
            num_bytes = sum(self._sizes[name] for name in names.values())
            self._sizes |= dict.fromkeys(names.values(), 0)
            self._sizes[weight] = num_bytes

    @abstractmethod
    def weight(self, name: str) -> Integers | QuantizedWeight | Tensor:
        """The weight as integers, or as numbers of any float dtype where it has none. ValueError
        as ``read``."""

    def sizes(self) -> Mapping[str, int]:
        """Bytes of every tensor as stored; a weight's other parts count as its own."""
        return self._sizes

    def read(self, name: str) -> Tensor:
        if name not in self._parts:
            return self.inner.read(name)
        weight = self.weight(name)
        if isinstance(weight, Integers):
            return weight.dequantize(self._dtype)
        wide = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
        return wide.to(self._dtype)

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype if name in self._parts else self.inner.dtype(name)

    def is_quantized(self, name: str) -> bool:
        return name in self._parts or self.inner.is_quantized(name)

    def is_integer(self, name: str) -> bool:
        """Whether ``weight`` gives integers; False saves the work where it never does."""
        return True

    def read_quantized(self, name: str) -> QuantizedWeight | None:
        if name not in self._parts:
            return self.inner.read_quantized(name)
        weight = self.weight(name) if self.is_integer(name) else None
        if isinstance(weight, Integers):
            return weight.to_quantized(self.quantizes_inputs)
        if isinstance(weight, QuantizedWeight) and kernel_group_size(weight.group_size):
            return weight
        return None

    def is_zero_bias(self, name: str) -> bool:
        weight = name.removesuffix(".bias") + ".weight"
        return name.endswith(".bias") and weight in self._parts and not self.read(name).any()

    def release(self, name: str) -> None:
        for part in self._parts.get(name, {"": name}).values():
            self.inner.release(part)

    def origins(self, name: str) -> Sequence[Origin]:
        parts = self._parts.get(name, {"": name}).values()
        return [origin for part in parts for origin in self.inner.origins(part)]

    def part(self, weight: str, part: str) -> Tensor:
        """A stored tensor; ValueError if it is missing."""
        name = self._parts[weight].get(part)
        if name is None:
            raise ValueError(f"{weight.removesuffix('.weight')}.{part} is missing")
        return self.inner.read(name)


def find_parts(source: TensorSource, suffixes: Sequence[str]) -> Parts:
    """The tensors "<stem>.<suffix>" of each "<stem>.weight"."""
    parts: Parts = {}
    for name in source.sizes():
        stem, _, part = name.rpartition(".")
        if part in suffixes:
            parts.setdefault(f"{stem}.weight", {})[part] = name
    return parts
