"""Tensors of several folders under one roof, and under their present names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from radixlm.weights.origin import Origin
from radixlm.weights.source import TensorSource

# what the first BERT checkpoints call the weights of a norm
_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def current_name(name: str) -> str:
    """The name that a tensor would have today."""
    for old, new in _OLD_NAMES.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


class JoinedSource:
    """The tensors of ``main`` under present names, and those of each of ``parts`` as
    "<part>.<name>"."""

    def __init__(self, main: TensorSource, parts: Mapping[str, TensorSource]) -> None:
        self._sources = (main, *parts.values())
        self._homes = {current_name(name): (main, name) for name in main.sizes()}
        for part, source in parts.items():
            self._homes |= {f"{part}.{name}": (source, name) for name in source.sizes()}

    def sizes(self) -> Mapping[str, int]:
        """Bytes of every tensor, by name."""
        return {name: source.sizes()[own] for name, (source, own) in self._homes.items()}

    def read(self, name: str) -> Tensor:
        """See TensorSource."""
        source, own = self._homes[name]
        return source.read(own)

    def release(self, name: str) -> None:
        """See TensorSource."""
        source, own = self._homes[name]
        source.release(own)

    def origins(self, name: str) -> Sequence[Origin]:
        """See TensorSource."""
        source, own = self._homes[name]
        return source.origins(own)

    def files(self) -> Sequence[Path]:
        """See TensorSource."""
        return [file for source in self._sources for file in source.files()]
