"""OverlaidSource: a checkpoint some of whose tensors are replaced by those of later files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from radixlm.base.errors import CheckpointError
from radixlm.quant.quantized_weight import QuantizedWeight
from radixlm.weights.origin import Origin
from radixlm.weights.safetensors_file import SafetensorsSource
from radixlm.weights.source import TensorSource, WrappedSource


class OverlaidSource(WrappedSource):
    """The tensors ``names`` of ``over``, and all others of ``inner``. A float takes the dtype of
    the tensor that it replaces, so that fused layers stay of one dtype."""

    def __init__(self, inner: TensorSource, over: TensorSource, names: frozenset[str]) -> None:
        super().__init__(inner)
        self._over, self._names = over, names

    def _of(self, name: str) -> TensorSource:
        return self._over if name in self._names else self.inner

    def sizes(self) -> Mapping[str, int]:
        return {**self.inner.sizes(), **{name: self._over.sizes()[name] for name in self._names}}

    def read(self, name: str) -> Tensor:
        value = self._of(name).read(name)
        if name not in self._names or name not in self.inner.sizes():
            return value
        old = self.inner.read(name).dtype
        floats = value.is_floating_point() and old.is_floating_point
        is_wide = min(value.dtype.itemsize, old.itemsize) > 1
        return value.to(old) if floats and is_wide else value

    def origins(self, name: str) -> Sequence[Origin]:
        return self._of(name).origins(name)

    def files(self) -> Sequence[Path]:
        return [*self.inner.files(), *self._over.files()]

    def release(self, name: str) -> None:
        self._of(name).release(name)

    def is_quantized(self, name: str) -> bool:
        return name not in self._names and self.inner.is_quantized(name)

    def read_quantized(self, name: str) -> QuantizedWeight | None:
        return None if name in self._names else self.inner.read_quantized(name)

    def is_zero_bias(self, name: str) -> bool:
        return name not in self._names and self.inner.is_zero_bias(name)


class Deltas:
    """The files of partial updates, from the oldest on. CheckpointError for one without tensors."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._sources: list[tuple[SafetensorsSource, set[str]]] = []
        for folder in folders:
            files = sorted(folder.glob("*.safetensors"))
            if not files:
                raise CheckpointError(f"{folder} holds no weights (*.safetensors)")
            source = SafetensorsSource(files)
            self._sources.append((source, set(source.sizes())))

    def over(self, inner: TensorSource, is_last: bool = False) -> TensorSource:
        """``inner`` with its tensors replaced that the deltas have. ``is_last``: CheckpointError
        for tensors that replace nothing here nor in an earlier call."""
        for source, left in self._sources:
            names = frozenset(left & inner.sizes().keys())
            left -= names
            if is_last and left:
                shown = ", ".join(sorted(left)[:5])
                raise CheckpointError(
                    f"{source.files()[0].parent}: {len(left)} tensors are not part of the model: "
                    f"{shown}; the names of the checkpoint that is served work"
                )
            inner = OverlaidSource(inner, source, names) if names else inner
        return inner
