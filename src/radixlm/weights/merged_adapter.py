"""A LoRA adapter in the checkpoint's folder that config.json declares part of the model (Granite
Speech), or that of a task (Jina embeddings v5): merged into the weights as they are read."""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from radixlm.arch.json_file import object_or_empty
from radixlm.arch.registry import TASK_ADAPTERS
from radixlm.base.errors import CheckpointError
from radixlm.weights.origin import Origin, describe_origins
from radixlm.weights.safetensors_file import SafetensorsSource
from radixlm.weights.source import TensorSource, WrappedSource

log = logging.getLogger(__name__)

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_LORA = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.\w+)?\.weight$")


def with_merged_adapter(folder: Path, source: TensorSource) -> TensorSource:
    """``source`` with the folder's adapter merged if config.json declares one. CheckpointError for
    an adapter that is not plain LoRA, or of modules that the model lacks."""
    config = object_or_empty(folder / "config.json")
    place = _task_folder(folder, config)
    if place is not None:
        return _MergedSource(source, place)
    if not config.get("has_lora_adapter"):
        return source
    if not (folder / _WEIGHTS).is_file():
        log.warning("%s: config.json declares an adapter, but there is no %s", folder, _WEIGHTS)
        return source
    log.info("%s: its adapter is merged into the weights, also for prompts without audio", folder)
    return _MergedSource(source, folder)


def _task_folder(folder: Path, config: Mapping[str, Any]) -> Path | None:
    """The folder of the adapter of the task that config.json names, for models with one a task."""
    listed = config.get("architectures")
    name = listed[0] if isinstance(listed, list) and listed else None
    if name not in TASK_ADAPTERS:
        return None
    key, usual = TASK_ADAPTERS[name]
    task = config.get(key) or usual
    known = sorted(file.parent.name for file in folder.glob(f"adapters/*/{_WEIGHTS}"))
    if task not in known:
        tasks = ", ".join(known) or "none"
        raise CheckpointError(
            f"{folder / 'config.json'}: {key!r} = {task!r} has no adapter; adapters: {tasks}"
        )
    return folder / "adapters" / str(task)


class _MergedSource(WrappedSource):
    """W + scale * B @ A."""

    def __init__(self, inner: TensorSource, folder: Path) -> None:
        super().__init__(inner)
        self._folder = folder
        self._adapter = SafetensorsSource([folder / _WEIGHTS])
        self._scale = _scale(object_or_empty(folder / _CONFIG), folder)
        names = {tail(name): name for name in inner.sizes()}
        self._parts: dict[str, dict[str, str]] = {}
        for name in self._adapter.sizes():
            found = _LORA.match(name)
            target = names.get(tail(f"{found[1]}.weight")) if found else None
            if found is None or target is None:
                raise CheckpointError(f"{folder / _WEIGHTS}: {name!r} is of no weight of the model")
            self._parts.setdefault(target, {})[found[2]] = name
        wrong = [name for name, parts in self._parts.items() if len(parts) != 2]
        if wrong:
            half = next(iter(self._parts[wrong[0]].values()))
            raise CheckpointError(
                f"{folder / _WEIGHTS}: {half} is half of an adapter, the other half is missing"
            )

    def read(self, name: str) -> Tensor:
        weight, parts = self.inner.read(name), self._parts.get(name)
        if parts is None:
            return weight
        a, b = (self._adapter.read(parts[half]).float() for half in "AB")
        try:
            return (weight.float() + self._scale * (b @ a)).to(weight.dtype)
        except RuntimeError as error:
            where = describe_origins(self.origins(name), self._folder, shapes=True)
            raise CheckpointError(
                f"{self._folder}: the adapter does not fit its weight ({where})"
            ) from error

    def origins(self, name: str) -> Sequence[Origin]:
        parts = self._parts.get(name, {}).values()
        of_adapter = [origin for part in parts for origin in self._adapter.origins(part)]
        return [*self.inner.origins(name), *of_adapter]

    def files(self) -> Sequence[Path]:
        return [*self.inner.files(), *self._adapter.files()]


def tail(name: str) -> str:
    """A name without the prefix before "layers.", by which a composite model and its adapter may
    differ."""
    if (at := name.find("layers.")) >= 0 and "language_model" in name:
        return name[at:]
    return name.removeprefix("model.")


def _scale(config: Mapping[str, Any], folder: Path) -> float:
    for key in ("use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "modules_to_save"):
        if config.get(key):
            raise CheckpointError(f"{folder / _CONFIG}: {key!r} is not supported")
    if config.get("peft_type", "LORA") != "LORA" or config.get("bias", "none") != "none":
        raise CheckpointError(f"{folder / _CONFIG}: only plain LoRA is supported")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise CheckpointError(f"{folder / _CONFIG}: 'r' and 'lora_alpha' must be numbers")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
