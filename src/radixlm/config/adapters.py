"""LoRA adapters."""

import json
from dataclasses import dataclass
from typing import Annotated

from radixlm.base.errors import ConfigError
from radixlm.config.flag import POSITIVE, Flag, Group


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AdapterConfig(Group):
    """LoRA."""

    enable_lora: Annotated[bool, "Serve LoRA adapters; follows from --lora-paths."] = False
    lora_paths: Annotated[
        tuple[str, ...] | None,
        'Adapters to load: PATH, NAME=PATH or {"lora_name": .., "lora_path": .., "pinned": ..}.',
    ] = None
    max_lora_rank: Annotated[
        int | None,
        "Maximum rank of an adapter; any when unset.",
        Flag(within=POSITIVE, part_of=("enable_lora", "lora_paths")),
    ] = None
    lora_target_modules: Annotated[
        tuple[str, ...] | None,
        "Modules that adapters may change; any when unset.",
        Flag(part_of=("enable_lora", "lora_paths")),
    ] = None
    max_loras_per_batch: Annotated[
        int | None,
        "Maximum number of adapters in a batch; unset: 8 on a GPU, any on a CPU.",
        Flag(within=POSITIVE, part_of=("enable_lora", "lora_paths")),
    ] = None
    max_loaded_loras: Annotated[
        int | None,
        "Maximum number of loaded adapters; unlimited when unset.",
        Flag(within=POSITIVE, part_of=("enable_lora", "lora_paths")),
    ] = None
    lora_backend: Annotated[
        str,
        "Kernels for adapters.",
        Flag(
            choices=("triton", "csgmv", "torch_native", "triton_v2", "ascend"),
            state="no-op",
            why="there is one implementation for each device",
        ),
    ] = "triton"


@dataclass(frozen=True, slots=True)
class LoraPath:
    """One adapter of --lora-paths."""

    name: str
    path: str
    is_pinned: bool = False


def read_lora_path(text: str) -> LoraPath:
    """PATH, NAME=PATH or JSON {"lora_name", "lora_path", "pinned"}; ConfigError otherwise."""
    if not text.lstrip().startswith("{"):
        name, equals, path = text.partition("=")
        adapter = LoraPath(name, path) if equals else LoraPath(text, text)
    else:
        try:
            record = json.loads(text)
            pinned = record.get("pinned", False)
            adapter = LoraPath(str(record["lora_name"]), str(record["lora_path"]), pinned is True)
        except (ValueError, KeyError) as error:
            raise ConfigError(f"--lora-paths {text}: not an adapter ({error!r})") from error
    if not adapter.name or not adapter.path:
        raise ConfigError(f"--lora-paths {text!r}: give PATH or NAME=PATH, such as fr=/models/fr")
    return adapter
