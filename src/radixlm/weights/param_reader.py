"""ParamReader: gives the loader the value of each parameter of the model."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from torch import Tensor

from radixlm.arch.names import is_ignorable
from radixlm.arch.recipes import ROW_ORDERS, transposed, transposed_pair
from radixlm.arch.spec import Decoder
from radixlm.base.errors import CheckpointError
from radixlm.base.record import replace
from radixlm.quant.param import Param
from radixlm.quant.quantized_weight import QuantizedWeight, concat_rows, stack_experts
from radixlm.weights.dummy import checkpoint_dtype, dummy_value
from radixlm.weights.folder import index_of, open_folder
from radixlm.weights.mapper import (
    LoadableLayer,
    LoadableModel,
    ParamMapping,
    TensorJoiner,
    WeightsMapper,
    concat,
)
from radixlm.weights.options import DEFAULT, LoadOptions
from radixlm.weights.origin import Origin, describe_files, describe_origins
from radixlm.weights.safetensors_file import SafetensorsSource
from radixlm.weights.source import TensorSource, read_weight_map

Layers = list[tuple[str, LoadableLayer]]

MAX_LISTED = 20  # names of one kind in an error message


class ParamReader(Protocol):
    """Values of parameters by their path in the model, each read once, in any order."""

    total_bytes: int
    ignored: tuple[str, ...]
    folder: Path  # of the files, for messages

    def read(self, path: str, param: Param) -> Tensor:
        """The value in the checkpoint's dtype, of a cut parameter its part: borrowed memory, valid
        until the layer's values are released. A value of a wrong shape comes whole. ValueError if
        the checkpoint's tensors cannot be joined."""

    def read_quantized(self, path: str, param: Param) -> QuantizedWeight | None:
        """The quantized weight, or its part, as the checkpoint stores it; None for floats, and
        where the model needs floats. ValueError as ``read``."""

    def quantized_bytes(self, path: str) -> int:
        """Bytes of the quantized tensors that make a value; 0 if they are floats."""

    def origins(self, path: str) -> Sequence[Origin]:
        """The tensors of files that make a parameter, for messages."""

    def release(self, path: str) -> int:
        """The value is not needed any more; the number of bytes that were read for it."""

    def ordered(self, layers: Layers) -> Layers:
        """The layers in the order in which their values are read fastest."""
        return layers

    def finish(self) -> None:
        """All values have been read. CheckpointError if the files as a whole are damaged."""
        return

    def close(self) -> None:
        """End reads under way."""
        return


class CheckpointReader(ParamReader):
    """Joins a checkpoint's tensors by the names and recipes of its model family."""

    def __init__(
        self,
        model: LoadableModel,
        folder: Path,
        load_format: str,
        leaves: Callable[[str], bool] | None = None,
        deltas: Sequence[Path] = (),
        options: LoadOptions = DEFAULT,
    ) -> None:
        self._leaves = leaves
        own = {
            (path, name): param
            for path, layer in model.layers()
            for name, param in layer.own_params().items()
        }
        self._fused = fused_spellings(model)
        self._source: TensorSource = open_folder(
            folder, load_format, model.weight_dtype, deltas, self._fused, options
        )
        self._joiner = TensorJoiner(self._source)
        files = self._source.files()  # of a GGUF file: links to the user's own files
        is_inside = not files or any(file.is_relative_to(folder) for file in files)
        self.folder = folder if is_inside else files[0].parent
        self._sizes = dict(self._source.sizes())
        mapper = WeightsMapper(model.decoder, self._sizes)
        self._mappings: dict[str, ParamMapping] = {
            f"{path}.{name}": self._as_stored(mapper.mapping(path, name), param)
            for (path, name), param in own.items()
        }
        # A tensor may fill two parameters (a table that is also the head).
        self._uses = Counter(name for m in self._mappings.values() for name in m.names())
        self.ignored = self._check_names(model, folder)
        # what ``release`` will report: tensors that are ignored are never read
        self.total_bytes = sum(self._sizes[name] for name in self._uses)

    def _as_stored(self, mapping: ParamMapping, param: Param) -> ParamMapping:
        """The mapping without a transposition that quantizing has made already: the tools store
        GPT-2's [in, out] matrices as they store linear layers."""
        is_conv = mapping.recipe in (transposed, transposed_pair) and len(param.whole_shape) == 2
        if is_conv and all(map(self._source.is_quantized, mapping.names())):
            return replace(mapping, recipe=None)
        return mapping

    def ordered(self, layers: Layers) -> Layers:
        """``layers`` by where their tensors lie, if the source reads ahead; it is told the order of
        all tensors. What stands below one block stays together, in its order."""
        groups: dict[str, Layers] = {}
        for path, layer in layers:
            groups.setdefault(_block(path), []).append((path, layer))
        origins = {key: self._origins_of(group) for key, group in groups.items()}
        places = {key: [self._source.place(o) for o in own] for key, own in origins.items()}
        if not any(place for own in places.values() for place in own):
            return layers
        last = (len(self._source.files()), 0)  # what has no tensors: the model itself
        first = {key: min(filter(None, own), default=last) for key, own in places.items()}
        keys = sorted(groups, key=lambda key: (not key, first[key]))
        self._source.expect([o for key in keys for o in origins[key]])
        return [pair for key in keys for pair in groups[key]]

    def _origins_of(self, layers: Layers) -> list[Origin]:
        paths = (f"{path}.{name}" for path, layer in layers for name in layer.own_params())
        return [origin for path in paths for origin in self.origins(path)]

    def finish(self) -> None:
        self._source.finish()

    def close(self) -> None:
        self._source.close()

    def _check_names(self, model: LoadableModel, folder: Path) -> tuple[str, ...]:
        """The tensors that the model does not use. CheckpointError for missing tensors,
        and for unused ones that are not known to be ignorable."""
        left = sorted(self._sizes.keys() - self._uses.keys())
        # empty tensors are left out: those of zero shared experts, say
        full = [name for name in left if self._sizes[name]]
        unknown = [
            name
            for name in full
            if not (self._leaves and self._leaves(name))
            and not is_ignorable(name, model.decoder)
            and not self._source.is_zero_bias(name)
        ]
        index = index_of(folder)
        weight_map = {} if index is None else read_weight_map(index)
        missing = sorted(self._uses.keys() - self._sizes.keys())
        missing += sorted(weight_map.keys() - self._sizes.keys() - set(missing))
        if missing or unknown:
            files = describe_files(self._source.files(), self.folder)
            where = files if index is None else f"{index.name} and {files}"
            problems = [
                f"missing from {weight_map.get(name, where)}: {name}"
                for name in missing[:MAX_LISTED]
            ]
            problems += [
                "not part of the model: "
                f"{describe_origins(self._source.origins(name), self.folder)}"
                for name in unknown[:MAX_LISTED]
            ]
            count = f"{len(missing)} missing, {len(unknown)} unknown tensors"
            raise CheckpointError(listing(f"{self.folder}: {count}", problems))
        return tuple(left)

    def read(self, path: str, param: Param) -> Tensor:
        try:
            return self._joiner.join(self._mappings[path], param)
        except (RuntimeError, IndexError) as error:
            raise ValueError(str(error).splitlines()[0]) from error

    def read_quantized(self, path: str, param: Param) -> QuantizedWeight | None:
        # Whole first: whether the kernels take it must not depend on the part.
        weight = self._whole_quantized(path)
        if weight is None or tuple(weight.values_OI.shape) != param.whole_shape or not param.cuts:
            return weight
        return weight.part(param.sliced)

    def _whole_quantized(self, path: str) -> QuantizedWeight | None:
        mapping, source = self._mappings[path], self._source
        if mapping.recipe is transposed and len(names := mapping.names()) == 1:
            stacked = source.read_quantized(names[0])  # experts, whose inputs are last already
            return None if stacked is None or stacked.values_OI.ndim != 3 else stacked
        recipe = mapping.recipe if mapping.recipe in ROW_ORDERS else None
        if mapping.recipe != recipe or not all(map(source.is_quantized, mapping.names())):
            return None
        try:
            if mapping.is_stacked:
                experts = zip(*mapping.tensors, strict=True)
                whole = stack_experts(map(source.read_quantized, names) for names in experts)
            else:
                whole = concat_rows([source.read_quantized(row[0]) for row in mapping.tensors])
            if whole is None or recipe is None:
                return whole
            return whole.part(lambda value: recipe(value, concat))
        except (RuntimeError, IndexError) as error:
            raise ValueError(str(error).splitlines()[0]) from error

    def quantized_bytes(self, path: str) -> int:
        names = self._mappings[path].names()
        return sum(self._sizes[name] for name in names if self._source.is_quantized(name))

    def origins(self, path: str) -> Sequence[Origin]:
        names = self._mappings[path].names()
        return [origin for name in names for origin in self._source.origins(name)]

    def layers_of(self, names: Collection[str]) -> set[str] | None:
        """The layers that are made of any of these tensors, and all that they are part of. None if
        one of the names is no tensor that the model reads."""
        fused = self._fused(self._sizes)
        wanted = {part for name in names for part in fused.get(name, (name,))}
        if not self._uses.keys() >= wanted:
            return None
        paths = {
            path.rpartition(".")[0]
            for path, mapping in self._mappings.items()
            if wanted.intersection(mapping.names())
        }
        parts = [path.split(".") for path in paths]
        return {".".join(part[:end]) for part in parts for end in range(len(part) + 1)}

    def release(self, path: str) -> int:
        num_bytes = 0
        for name in self._mappings[path].names():
            self._uses[name] -= 1
            if not self._uses[name]:
                self._source.release(name)
                num_bytes += self._sizes[name]
        return num_bytes


def fused_spellings(model: LoadableModel) -> Callable[[Mapping[str, int]], dict[str, list[str]]]:
    """By the sizes of a checkpoint's tensors: the names under which others store several of them as
    one, with the names of its parts."""
    params = [(path, name) for path, layer in model.layers() for name in layer.own_params()]
    return partial(_fused_spellings, model.decoder, params)


def _fused_spellings(
    decoder: Decoder, params: Sequence[tuple[str, str]], sizes: Mapping[str, int]
) -> dict[str, list[str]]:
    mapper, found = WeightsMapper(decoder, sizes), dict[str, list[str]]()
    for module, name in params:
        parts = mapper.mapping(module, name)
        if parts.is_stacked or parts.recipe is not None or len(parts.tensors) == 1:
            continue
        for other in mapper.spellings(module, name):
            if not other.is_stacked and other.recipe is None and len(other.tensors) == 1:
                found[other.tensors[0][0]] = parts.names()
    return found


class DummyReader(ParamReader):
    """Random numbers of the dtype in config.json, but for what ``deltas`` have."""

    total_bytes = 0
    ignored: tuple[str, ...] = ()

    def __init__(
        self, folder: Path, model: LoadableModel | None = None, deltas: Sequence[Path] = ()
    ) -> None:
        """CheckpointError for tensors of ``deltas`` that are not part of ``model``."""
        self.folder = folder
        self._dtype = checkpoint_dtype(folder)
        self._mappings: dict[str, ParamMapping] = {}
        if model is None or not deltas:
            return
        source = SafetensorsSource([f for d in deltas for f in sorted(d.glob("*.safetensors"))])
        self._sizes, self._joiner = dict(source.sizes()), TensorJoiner(source)
        mapper = WeightsMapper(model.decoder, self._sizes)
        self._mappings = {
            f"{path}.{name}": mapper.mapping(path, name)
            for path, layer in model.layers()
            for name in layer.own_params()
        }
        known = {name for mapping in self._mappings.values() for name in mapping.names()}
        unknown = [n for n in sorted(self._sizes.keys() - known) if not model.is_part]
        if unknown := [n for n in unknown if not is_ignorable(n, model.decoder)]:
            raise CheckpointError(listing("not part of the model", unknown[:MAX_LISTED]))

    def read(self, path: str, param: Param) -> Tensor:
        mapping = self._mappings.get(path)
        missing = [n for n in mapping.names() if n not in self._sizes] if mapping else [""]
        if mapping is None or len(missing) == len(mapping.names()):
            return param.part_of(dummy_value(path, param, self._dtype))
        if missing:
            raise ValueError(f"only {missing[0]} is missing, and --load-format dummy has no values")
        try:
            return self._joiner.join(mapping, param)
        except (RuntimeError, IndexError) as error:
            raise ValueError(str(error).splitlines()[0]) from error

    def read_quantized(self, path: str, param: Param) -> QuantizedWeight | None:
        return None

    def quantized_bytes(self, path: str) -> int:
        return 0

    def origins(self, path: str) -> Sequence[Origin]:
        return ()

    def release(self, path: str) -> int:
        return 0


def _block(path: str) -> str:
    """The part of the model that a layer belongs to: "blocks.3", "embed"."""
    first, _, rest = path.partition(".")
    number = rest.partition(".")[0]
    return f"{first}.{number}" if number.isdigit() else first


def listing(title: str, problems: list[str]) -> str:
    """A message with one problem a line; a single one is on the line of the title."""
    if len(problems) == 1:
        return f"{title}: {problems[0]}"
    shown = problems[: 2 * MAX_LISTED]
    if len(problems) > len(shown):
        shown = [*shown, f"... and {len(problems) - len(shown)} more"]
    return "\n  ".join([f"{title}:", *shown])
