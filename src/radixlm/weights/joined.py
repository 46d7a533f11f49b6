"""Tensors of several folders under one roof."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from radixlm.weights.source import TensorSource


class JoinedSource:
    """The tensors of ``main``, and those of each of ``parts`` as "<part>.<name>"."""

    def __init__(self, main: TensorSource, parts: Mapping[str, TensorSource]) -> None:
        self._homes = {name: (main, name) for name in main.sizes()}
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
