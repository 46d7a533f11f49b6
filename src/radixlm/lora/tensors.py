"""The tensors of a PEFT adapter's file, by the module of the base model that they change."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from radixlm.base.errors import CheckpointError
from radixlm.base.system_memory import system_memory
from radixlm.base.units import format_bytes
from radixlm.lora.config import LoraConfig
from radixlm.lora.targets import Target
from radixlm.weights.origin import non_finite_kind
from radixlm.weights.pickle_file import PickleSource
from radixlm.weights.safetensors_file import SafetensorsSource
from radixlm.weights.source import TensorSource

log = logging.getLogger(__name__)

FILES = ("adapter_model.safetensors", "adapter_model.bin")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_LISTED = 3
MEMORY_SHARE = 0.8  # of the free memory that one adapter may take
TABLES = ("embed_tokens", "lm_head")  # saved whole where PEFT has resized them
BASE = ".base_layer"
_START = r"(?:base_model\.model\.)?(?P<module>.+?)"
_TENSOR = re.compile(
    _START + r"\.(?:lora_(?P<half>[AB])(?:\.(?!weight|bias)\w+)?\.(?P<kind>weight|bias)"
    r"|lora_magnitude_vector(?:\.\w+)*|lora_embedding_(?P<table>[AB])(?:\.\w+)?)$"
)
_TOKENS = re.compile(_START + r"\.token_adapter\.trainable_tokens_delta(?:\.\w+)?$")
_WHOLE = re.compile(_START + r"(?:\.modules_to_save(?:\.\w+)?)?\.(?P<kind>weight|bias)$")
_TRAINED_BIAS = re.compile(_START + r"(?:\.base_layer)?\.bias$")
_BASE_COPY = re.compile(_START + r"\.base_layer\.weight$")


@dataclass(slots=True)
class ModuleTensors:
    """The names of one module's tensors; the output side may have a bias, and a magnitude.
    ``whole_bias`` takes the place of the layer's own, ``saved`` of its weight, ``tokens`` of rows
    of a token table. ``name``: as patterns of the config see it."""

    a: str = ""
    b: str = ""
    bias: str = ""
    whole_bias: str = ""
    magnitude: str = ""
    saved: str = ""
    tokens: str = ""
    is_table: bool = False  # of tokens
    name: str = ""
    targets: list[Target] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether there is what the others belong to."""
        return bool(self.a or self.saved or self.tokens or self.whole_bias)


def find_file(folder: Path) -> Path:
    """The file with the adapter's tensors; CheckpointError if there is none."""
    for name in FILES:
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(f"{folder}: neither {FILES[0]} nor {FILES[1]} is there")


def open_adapter(folder: Path) -> TensorSource:
    """The adapter's tensors. A .bin file is read as tensors alone: nothing in it is run."""
    file = find_file(folder)
    free = system_memory().available
    if file.stat().st_size > MEMORY_SHARE * free:
        size, left = format_bytes(file.stat().st_size), format_bytes(free)
        raise CheckpointError(f"{file}: {size} do not fit into the free memory ({left})")
    if file.suffix == ".safetensors":
        return SafetensorsSource([file])
    log.info("%s: read without running anything in it; safetensors loads faster", file)
    return PickleSource([file])


def group_tensors(
    source: TensorSource, where: Path, config: LoraConfig
) -> dict[str, ModuleTensors]:
    """The tensors by module; CheckpointError for one that is none of an adapter. Parameters of one
    module that are targeted (``target_parameters``) end in as many ``.base_layer`` as PEFT has
    put around them."""
    modules: dict[str, ModuleTensors] = {}
    unknown = []
    for name in source.sizes():
        found = _kind_of(name, config)
        if found is None:
            unknown.append(name)
            continue
        module, kind, is_table = found
        if kind == "copy":
            continue  # PEFT saves the table that an adapter changes; see copied_tables
        one = modules.setdefault(module, ModuleTensors(name=module.replace(BASE, "")))
        one.is_table |= is_table
        if getattr(one, kind):
            raise CheckpointError(f"{where}: {name} and {getattr(one, kind)} are of one module")
        setattr(one, kind, name)
    if unknown:
        raise CheckpointError(
            f"{where}: {count_of(unknown)} not supported: {some_of(unknown)}; what works: lora_A "
            "and lora_B of linear layers and experts, and what modules_to_save names"
        )
    halved = [m for m, t in modules.items() if bool(t.a) != bool(t.b) or not t.is_whole]
    if halved:
        raise CheckpointError(f"{where}: lora_A or lora_B is missing of: {some_of(halved)}")
    if not modules:
        raise CheckpointError(f"{where}: holds no tensors of an adapter")
    return modules


def _kind_of(name: str, config: LoraConfig) -> tuple[str, str, bool] | None:
    """(module, field of ModuleTensors or "copy", whether it is of a token table)."""
    if found := _TENSOR.match(name):
        if (found["half"], found["kind"]) == ("A", "bias"):
            return None
        half = found["half"] or found["table"]
        kind = "bias" if found["kind"] == "bias" else (half or "magnitude").lower()
        return found["module"], kind, found["table"] is not None
    if found := _BASE_COPY.match(name):
        return found["module"], "copy", False
    if found := _TOKENS.match(name):
        return found["module"], "tokens", True
    found = _WHOLE.match(name)
    if found and (config.saves(found["module"]) or found["module"].endswith(TABLES)):
        return found["module"], "saved" if found["kind"] == "weight" else "whole_bias", False
    if config.has_biases and (found := _TRAINED_BIAS.match(name)):
        return found["module"], "whole_bias", False
    return None


def copied_tables(source: TensorSource) -> list[tuple[str, str]]:
    """(name, module) of weights of the base model that PEFT has saved too."""
    return [(name, found["module"]) for name in source.sizes() if (found := _BASE_COPY.match(name))]


class AdapterReader:
    """Reads tensors that have numbers as adapters may have them."""

    def __init__(self, source: TensorSource, where: Path) -> None:
        self._source, self._where = source, where

    def read(self, name: str, num_dims: int = 0) -> Tensor:
        """CheckpointError for other dtypes than floats of 16 or 32 bits, other numbers of axes
        than ``num_dims`` (0: any but none), NaN and infinity."""
        tensor = self._source.read(name)
        if tensor.dtype not in DTYPES:
            raise CheckpointError(
                f"{self._where}: {name} is {dtype_name(tensor)}; what works: bfloat16, float16, "
                "float32"
            )
        if tensor.ndim != (num_dims or max(tensor.ndim, 1)) or tensor.numel() == 0:
            raise CheckpointError(f"{self._where}: {name} has the shape {list(tensor.shape)}")
        if kind := non_finite_kind(tensor):
            raise CheckpointError(f"{self._where}: {name} holds {kind}")
        return tensor

    def vector(self, name: str, num_out: int) -> Tensor | None:
        """float32 [O]; None without a name. ValueError for another length."""
        if not name:
            return None
        vector_O = self.read(name).float().reshape(-1)
        if len(vector_O) != num_out:
            raise ValueError(f"{name} has {len(vector_O)} numbers, not {num_out}")
        return vector_O


def dtype_name(tensor: Tensor) -> str:
    """Such as bfloat16."""
    return str(tensor.dtype).removeprefix("torch.")


def some_of(names: Iterable[str]) -> str:
    """The first names."""
    ordered = sorted(names)
    return ", ".join(ordered[:MAX_LISTED]) + (", ..." if len(ordered) > MAX_LISTED else "")


def count_of(names: Sequence[str]) -> str:
    """Such as 2 tensors."""
    return f"{len(names)} tensor{'s' * (len(names) > 1)}"
