"""OverlaidSource: a checkpoint some of whose tensors are replaced by those of later files."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from radixlm.base.errors import CheckpointError
from radixlm.quant.quantized_weight import QuantizedWeight
from radixlm.weights.origin import Origin
from radixlm.weights.safetensors_file import SafetensorsSource
from radixlm.weights.source import TensorSource, WrappedSource

# of the names of a checkpoint: fused tensor -> the tensors that it is made of, row by row
Fused = Callable[[Mapping[str, int]], Mapping[str, Sequence[str]]] | None


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


class PartSource(WrappedSource):
    """The tensors of ``inner``, and rows of fused ones (qkv_proj) under the names of the parts that
    ``rows`` tells: part -> (fused tensor, first row, number of rows)."""

    def __init__(self, inner: TensorSource, rows: Mapping[str, tuple[str, int, int]]) -> None:
        super().__init__(inner)
        self.rows = rows

    def sizes(self) -> Mapping[str, int]:
        sizes = dict(self.inner.sizes())
        for part, (fused, _, count) in self.rows.items():
            sizes[part] = self.inner.sizes()[fused] * count // self.inner.read(fused).shape[0]
        return sizes

    def read(self, name: str) -> Tensor:
        if name not in self.rows:
            return self.inner.read(name)
        fused, first, count = self.rows[name]
        return self.inner.read(fused).narrow(0, first, count)

    def origins(self, name: str) -> Sequence[Origin]:
        return self.inner.origins(self.rows[name][0] if name in self.rows else name)

    def release(self, name: str) -> None:
        if name not in self.rows:  # other parts may be read yet
            self.inner.release(name)


def parts_of_fused(
    over: TensorSource, inner: TensorSource, fused: Mapping[str, Sequence[str]]
) -> TensorSource:
    """``over`` with the parts, which ``inner`` has, of its fused tensors. CheckpointError for a
    fused tensor of other rows than its parts."""
    rows: dict[str, tuple[str, int, int]] = {}
    for name in sorted(over.sizes().keys() - inner.sizes().keys()):
        first = 0
        for part in fused.get(name, ()):
            if part in over.sizes():
                raise CheckpointError(f"{name} and its part {part} are both there: send one")
            count = inner.read(part).shape[0]
            rows[part] = (name, first, count)
            first += count
        shape = list(over.read(name).shape)
        if name in fused and shape[:1] != [first]:
            raise CheckpointError(f"{name} is {shape}, its parts have {first} rows together")
    return PartSource(over, rows) if rows else over


class Deltas:
    """The files of partial updates, from the oldest on. CheckpointError for one without tensors."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._sources: list[tuple[TensorSource, set[str]]] = []
        for folder in folders:
            files = sorted(folder.glob("*.safetensors"))
            if not files:
                raise CheckpointError(f"{folder} holds no weights (*.safetensors)")
            source = SafetensorsSource(files)
            self._sources.append((source, set(source.sizes())))

    def over(self, inner: TensorSource) -> TensorSource:
        """``inner`` with its tensors replaced that the deltas have."""
        for source, left in self._sources:
            names = frozenset(left & inner.sizes().keys())
            left -= names
            inner = OverlaidSource(inner, source, names) if names else inner
        return inner

    def finish(self, inner: TensorSource, fused: Fused) -> TensorSource:
        """The same for what no earlier call has replaced, fused tensors among it; what is no
        tensor of the model comes under its own name, for its reader to refuse."""
        for source, left in self._sources:
            if not left:
                continue
            whole = parts_of_fused(source, inner, fused(inner.sizes()) if fused else {})
            names = (left | (whole.sizes().keys() - source.sizes().keys())) & inner.sizes().keys()
            rows = whole.rows if isinstance(whole, PartSource) else {}
            names |= left - {name for name, _, _ in rows.values()}
            inner = OverlaidSource(inner, whole, frozenset(names))
        return inner
