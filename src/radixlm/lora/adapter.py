"""A PEFT adapter, read from its folder, checked against a model and laid out by its layers.

Legend: R rank, I input channels, O output channels.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import psutil
import torch
from torch import Tensor

from radixlm.base.errors import CheckpointError
from radixlm.base.record import Record
from radixlm.base.units import format_bytes
from radixlm.kernels.ops.lora import LoraPart
from radixlm.layers.linear import Linear
from radixlm.lora.config import LoraConfig, read_lora_config
from radixlm.lora.targets import EMBED, HEAD, AdapterTargets, Target, place
from radixlm.weights.origin import non_finite_kind
from radixlm.weights.pickle_file import PickleSource
from radixlm.weights.safetensors_file import SafetensorsSource
from radixlm.weights.source import TensorSource

log = logging.getLogger(__name__)

FILES = ("adapter_model.safetensors", "adapter_model.bin")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_LISTED = 3
MEMORY_SHARE = 0.8  # of the free memory that one adapter may take
_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)\.(?:base_layer\.)?"
    r"(?:lora_(?P<half>[AB])(?:\.(?!weight|bias)\w+)?\.(?P<kind>weight|bias)"
    r"|lora_magnitude_vector(?:\.\w+)*|lora_embedding_(?P<table>[AB])(?:\.\w+)?)$"
)


class LoraLimits(Record):
    """What --max-lora-rank and --lora-target-modules allow; None: anything."""

    max_rank: int | None = None
    modules: tuple[str, ...] | None = None


class Adapter(Record, eq=False):
    """A checked adapter: ``parts`` by the path of the layer that they change. ``digest``: 32 hex
    digits of all that its results depend on."""

    path: str
    digest: str
    config: LoraConfig
    parts: Mapping[str, tuple[LoraPart, ...]]
    modules: tuple[str, ...]  # kinds of modules, such as q_proj
    max_rank: int
    num_bytes: int


@dataclass(slots=True)
class _Halves:
    """The names of one module's tensors; the output side may have a bias, and a magnitude.
    ``whole_bias`` takes the place of the layer's own."""

    a: str = ""
    b: str = ""
    bias: str = ""
    whole_bias: str = ""
    magnitude: str = ""
    is_table: bool = False  # of tokens
    targets: list[Target] = field(default_factory=list)


def find_file(folder: Path) -> Path:
    """The file with the adapter's tensors; CheckpointError if there is none."""
    for name in FILES:
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(f"{folder}: neither {FILES[0]} nor {FILES[1]} is there")


def open_adapter(folder: Path) -> TensorSource:
    """The adapter's tensors. A .bin file is read as tensors alone: nothing in it is run."""
    file = find_file(folder)
    free = psutil.virtual_memory().available
    if file.stat().st_size > MEMORY_SHARE * free:
        size, left = format_bytes(file.stat().st_size), format_bytes(free)
        raise CheckpointError(f"{file}: {size} do not fit into the free memory ({left})")
    if file.suffix == ".safetensors":
        return SafetensorsSource([file])
    log.info("%s: read without running anything in it; safetensors loads faster", file)
    return PickleSource([file])


_TRAINED_BIAS = re.compile(r"(?:base_model\.model\.)?(?P<module>.+?)(?:\.base_layer)?\.bias$")
_BASE_COPY = re.compile(r"(?:base_model\.model\.)?(?P<module>.+?)\.base_layer\.weight$")


def group_tensors(source: TensorSource, where: Path, has_biases: bool) -> dict[str, _Halves]:
    """The tensors by module; CheckpointError for one that is none of plain LoRA. ``has_biases``:
    the layers' own may be there."""
    modules: dict[str, _Halves] = {}
    unknown = []
    for name in source.sizes():
        if _BASE_COPY.match(name):
            continue  # PEFT saves the table that an adapter changes; see _check_copies
        found = _TENSOR.match(name)
        trained = _TRAINED_BIAS.match(name) if has_biases and found is None else None
        if trained is not None:
            modules.setdefault(trained["module"], _Halves()).whole_bias = name
            continue
        if found is None or (found["half"], found["kind"]) == ("A", "bias"):
            unknown.append(name)
            continue
        halves = modules.setdefault(found["module"], _Halves())
        half = found["half"] or found["table"]
        halves.is_table |= found["table"] is not None
        kind = "bias" if found["kind"] == "bias" else (half or "magnitude").lower()
        if getattr(halves, kind):
            raise CheckpointError(f"{where}: {name} and {getattr(halves, kind)} are of one module")
        setattr(halves, kind, name)
    if unknown:
        raise CheckpointError(
            f"{where}: {_count(unknown)} not supported: {_some(unknown)}; what works: lora_A and "
            "lora_B of linear layers"
        )
    halved = [m for m, h in modules.items() if not (h.a and h.b)]
    if halved:
        raise CheckpointError(
            f"{where}: lora_A or lora_B is missing of: {_some(halved)} (a trained bias alone is "
            "not supported)"
        )
    if not modules:
        raise CheckpointError(f"{where}: holds no tensors of an adapter")
    return modules


def read_adapter(
    folder: str | Path, targets: AdapterTargets, limits: LoraLimits | None = None
) -> Adapter:
    """The adapter of ``folder`` for the model of ``targets``. CheckpointError for what cannot be
    applied exactly, with what works instead: every tensor must have a place in the model."""
    folder = Path(folder).expanduser()
    config = read_lora_config(folder)
    where = find_file(folder)
    source = open_adapter(folder)
    modules = group_tensors(source, where, config.has_biases)
    missing = []
    for module, halves in modules.items():
        halves.targets = targets.find(module)
        if not halves.targets:
            missing.append(module)
    if missing:
        base = f" (trained on {config.base_model})" if config.base_model else ""
        raise CheckpointError(
            f"{where}: {_count(missing)} without a place in the model{base}: {_some(missing)}: "
            f"{targets.why_not(missing[0])}"
        )
    _check_limits(where, modules, config, limits or LoraLimits())
    _check_copies(where, source, targets)
    reader = _PartReader(source, where, config, modules, targets.sites)
    parts: dict[str, list[LoraPart]] = {}
    for module in sorted(modules):
        try:
            for path, part in reader.read(module):
                parts.setdefault(path, []).append(part)
        except ValueError as error:
            raise CheckpointError(f"{where}: {module}: {error}") from error
    ordered = {path: tuple(sorted(ps, key=_position)) for path, ps in sorted(parts.items())}
    flat = [part for ps in ordered.values() for part in ps]
    return Adapter(
        str(folder), _digest(ordered, config.invocation), config, ordered, kinds_of(modules),
        max(part.rank for part in flat), sum(part.num_bytes for part in flat),
    )  # fmt: skip


def kinds_of(modules: Mapping[str, object]) -> tuple[str, ...]:
    """The last words of modules' names: q_proj, down_proj."""
    return tuple(sorted({module.rpartition(".")[2] for module in modules}))


class _PartReader:
    """Reads and places the halves of modules."""

    def __init__(
        self,
        source: TensorSource,
        where: Path,
        config: LoraConfig,
        modules: Mapping[str, _Halves],
        layers: Mapping[str, Linear],
    ) -> None:
        self._source, self._where, self._config = source, where, config
        self._modules, self._layers = modules, layers
        self._widths: dict[str, dict[int, int]] = {}  # rows of a layer's modules in the adapter
        for halves in modules.values():
            for target in (t for t in halves.targets if not t.widths):
                num_rows = self._read(halves.b, 2).shape[0]
                self._widths.setdefault(target.path, {})[target.part] = num_rows

    def read(self, module: str) -> list[tuple[str, LoraPart]]:
        """(path, part) of each layer that the module is in. ValueError if it does not fit."""
        halves = self._modules[module]
        a_RI, b_OR = self._read(halves.a, 2), self._read(halves.b, 2)
        rank, wanted = a_RI.shape[0], self._config.rank_of(module)
        if rank != b_OR.shape[1]:
            raise ValueError(f"lora_A is {list(a_RI.shape)}, lora_B {list(b_OR.shape)}")
        if rank != wanted:
            raise ValueError(f"its tensors have rank {rank}, adapter_config.json says {wanted}")
        scale, num_out = self._config.scale_of(module), b_OR.shape[0]
        ends = [target.path for target in halves.targets if target.path in (HEAD, EMBED)]
        if ends == [EMBED] and self._config.invocation:
            raise ValueError("a token table cannot wait for alora_invocation_tokens")
        if halves.is_table != (ends == [EMBED]):
            raise ValueError("lora_embedding_A is of token tables, lora_A of linear layers")
        if ends and (halves.magnitude or halves.bias or halves.whole_bias):
            raise ValueError("DoRA and biases of the head and the token table are not supported")
        names = (halves.bias, halves.magnitude, halves.whole_bias)
        bias_O, magnitude_O, whole_O = (self._vector(name, num_out) for name in names)
        if (magnitude_O is not None) != self._config.is_dora:
            raise ValueError(f"use_dora is {self._config.is_dora}, its magnitude vector says other")
        found = []
        covered = torch.zeros(b_OR.shape[0], dtype=torch.bool)
        for target in halves.targets:
            whole = LoraPart(a_RI, b_OR, scale, 0, bias_O, magnitude_O, whole_O)
            part = self._placed(target, whole, covered)
            if part is not None:
                found.append((target.path, part))
        if not covered.all():
            raise ValueError("a part of its outputs is in a layer that takes no adapter")
        return found

    def _vector(self, name: str, num_out: int) -> Tensor | None:
        """float32 [O]; None without a name."""
        if not name:
            return None
        vector_O = self._read(name).float().reshape(-1)
        if len(vector_O) != num_out:
            raise ValueError(f"{name} has {len(vector_O)} numbers, not {num_out}")
        return vector_O

    def _placed(self, target: Target, part: LoraPart, covered: Tensor) -> LoraPart | None:
        """The module's rows in the layer. ``part``: gain is its magnitude, own the bias that takes
        the place of the layer's."""
        a_RI, b_OR, vectors = part.a_RI, part.b_OR, list(part.vectors)
        if a_RI.shape[1] != target.in_features:
            raise ValueError(
                f"lora_A is {list(a_RI.shape)}, the layer has {target.in_features} inputs"
            )
        where = place(target, self._widths_of(target, b_OR.shape[0]))
        if where is None:
            return None
        is_mine = torch.ones(b_OR.shape[0], dtype=torch.bool)
        if where.rows_O is None:
            covered[:] = True
        else:
            is_mine = where.rows_O >= 0
            rows_O = where.rows_O.clamp(min=0)
            covered[rows_O[is_mine]] = True
            b_OR = b_OR[rows_O] * is_mine[:, None]
            vectors = [None if v is None else v[rows_O] * is_mine for v in vectors]
        if where.columns_I is not None:
            a_RI = a_RI[:, where.columns_I]
        if where.factors_O is not None:
            factors_O = where.factors_O.float()
            b_OR = b_OR.float() * factors_O[:, None]
            vectors = [None if v is None else v * factors_O for v in vectors]
        own = [t.clone(memory_format=torch.contiguous_format) for t in (a_RI, b_OR)]
        layer = self._layers.get(target.path)
        bias_O = vectors[0]
        if vectors[2] is not None and layer is not None:
            if not part.scale:
                raise ValueError("a trained bias needs a lora_alpha other than 0")
            change_O = _bias_change(layer, vectors[2], where.first) * is_mine / part.scale
            bias_O = change_O if bias_O is None else bias_O + change_O
        placed = LoraPart(own[0], own[1], part.scale, where.first, bias_O)
        if vectors[1] is None:
            return placed
        return _with_gain(placed, vectors[1].abs(), is_mine, self._layers[target.path])

    def _widths_of(self, target: Target, num_rows: int) -> tuple[int, ...]:
        """Outputs of all modules of the layer; ValueError if this module's do not fit in."""
        widths = target.widths
        if not widths:
            given = self._widths[target.path]
            widths = tuple(given.get(part, 0) for part in range(target.num_parts))
            if len(given) < target.num_parts:
                raise ValueError("the model joins it with modules that the adapter does not have")
        if widths[target.part] != num_rows:
            raise ValueError(f"lora_B has {num_rows} outputs, the module {widths[target.part]}")
        if target.recipe is None and sum(widths) != target.out_features:
            raise ValueError(f"lora_B has {num_rows} outputs, the layer {target.out_features}")
        return widths

    def _read(self, name: str, num_dims: int = 0) -> Tensor:
        tensor = self._source.read(name)
        if tensor.dtype not in DTYPES:
            raise CheckpointError(
                f"{self._where}: {name} is {_dtype(tensor)}; what works: bfloat16, float16, float32"
            )
        if num_dims not in (0, tensor.ndim) or tensor.numel() == 0:
            raise CheckpointError(f"{self._where}: {name} has the shape {list(tensor.shape)}")
        if kind := non_finite_kind(tensor):
            raise CheckpointError(f"{self._where}: {name} holds {kind}")
        return tensor


def _bias_change(layer: Linear, whole_O: Tensor, first: int) -> Tensor:
    """What a trained bias adds to the layer's own, from output ``first`` on. ValueError if it has
    none."""
    if not hasattr(layer, "packed"):
        return whole_O  # the model has no weights: an adapter is only inspected
    own_O = layer.own_bias()
    if own_O is None:
        raise ValueError("its bias was trained, the model's layer has none")
    return whole_O - own_O[first : first + len(whole_O)].cpu()


def _with_gain(part: LoraPart, magnitude_O: Tensor, is_mine: Tensor, layer: Linear) -> LoraPart:
    """DoRA: each row of W + scale * B A gets the length ``magnitude``. Other modules' rows stay."""
    if not hasattr(layer, "packed"):
        return part  # the model has no weights: an adapter is only inspected
    outputs = slice(part.first, part.first + len(magnitude_O))
    whole_OI = layer.packed.unpack()[outputs].float()
    whole_OI = whole_OI + part.scale * (part.b_OR.float() @ part.a_RI.float())
    gain_O = torch.where(is_mine, magnitude_O / whole_OI.norm(dim=1).cpu(), 1.0)
    own_O = layer.own_bias()
    own_O = None if own_O is None else own_O[outputs].cpu().contiguous()
    return LoraPart(
        part.a_RI, part.b_OR, part.scale, part.first, part.bias_O, gain_O.contiguous(), own_O
    )


def _check_copies(where: Path, source: TensorSource, targets: AdapterTargets) -> None:
    """Weights of the base model in the adapter's file must be those of the model."""
    for name in source.sizes():
        found = _BASE_COPY.match(name)
        if found is None:
            continue
        paths = [target.path for target in targets.find(found["module"])]
        mine, copied = targets.end_weight(paths[0]) if len(paths) == 1 else None, source.read(name)
        if mine is None:
            log.warning("%s: %s is not compared with the model", where, name)
        elif mine.shape != copied.shape or not torch.equal(mine, copied.to(mine.dtype)):
            raise CheckpointError(
                f"{where}: {name} {list(copied.shape)} is not the model's {list(mine.shape)}; what "
                "works: an adapter that adds no tokens and changes no whole table"
            )


def _check_limits(
    where: Path, modules: Mapping[str, _Halves], config: LoraConfig, limits: LoraLimits
) -> None:
    rank = max(config.rank_of(module) for module in modules)
    if limits.max_rank is not None and rank > limits.max_rank:
        raise CheckpointError(
            f"{where}: rank {rank} is above the limit of {limits.max_rank} (--max-lora-rank {rank})"
        )
    if limits.modules is None or "all" in limits.modules:
        return
    outside = [kind for kind in kinds_of(modules) if kind not in limits.modules]
    if outside:
        raise CheckpointError(
            f"{where}: changes {', '.join(outside)}, --lora-target-modules allows "
            f"{', '.join(limits.modules)}"
        )


def _digest(parts: Mapping[str, Sequence[LoraPart]], invocation: tuple[int, ...]) -> str:
    """Of places, scales, shapes, dtypes and bytes."""
    total = blake2b(repr(invocation).encode() if invocation else b"", digest_size=16)
    for path, of_layer in parts.items():
        for part in of_layer:
            tensors = [t for t in (part.a_RI, part.b_OR, *part.vectors[:2]) if t is not None]
            shapes = [(_dtype(t), *t.shape) for t in tensors]
            total.update(repr((path, part.first, part.scale.hex(), shapes)).encode())
            for tensor in tensors:  # hashlib lets other threads run
                total.update(tensor.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _position(part: LoraPart) -> tuple[int, int]:
    return part.first, part.b_OR.shape[0]


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _some(names: Sequence[str]) -> str:
    rest = ", ..." if len(names) > MAX_LISTED else ""
    return ", ".join(sorted(names)[:MAX_LISTED]) + rest


def _count(names: Sequence[str]) -> str:
    return f"{len(names)} tensor{'s' * (len(names) > 1)}"
