"""What an adapter changes, as text: for ``radixlm lora inspect``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from radixlm.arch.hf import describe
from radixlm.base.units import format_bytes
from radixlm.kernels.dispatch import bind
from radixlm.kernels.ops.lora import LoraPart
from radixlm.lora.adapter import Adapter, kinds_of, read_adapter
from radixlm.lora.config import read_lora_config
from radixlm.lora.targets import AdapterTargets
from radixlm.lora.tensors import find_file, group_tensors, open_adapter
from radixlm.models.build import build_model


def targets_of(folder: Path) -> AdapterTargets:
    """What adapters may change of the model in ``folder``, without its weights."""
    kernels = bind("cpu", {"all": "reference"})
    return AdapterTargets(
        build_model(describe(folder), torch.device("cpu"), torch.float32, kernels)
    )


def inspect(folder: Path, model: Path | None) -> str:
    """A report of some lines. CheckpointError for an adapter that would be refused; without
    ``model`` it is not known whether every tensor has a place in the base model."""
    config = read_lora_config(folder)
    source = open_adapter(folder)
    modules = group_tensors(source, find_file(folder), config)
    changed = [tensors.name for tensors in modules.values() if tensors.a]
    ranks = Counter(config.rank_of(name) for name in changed)
    scales = sorted({config.scale_of(name) for name in changed})
    lines = [
        f"adapter   {folder}",
        f"base      {config.base_model or 'not named'}",
        f"rank      {', '.join(f'{rank} ({count} modules)' for rank, count in ranks.items())}",
        f"scale     {', '.join(f'{scale:g}' for scale in scales)}",
        f"changes   {', '.join(kinds_of(modules))}",
        f"size      {format_bytes(sum(source.sizes().values()))}, {len(source.sizes())} tensors",
    ]
    if model is None:
        return "\n".join([*lines, "model     not checked: give --model-path"])
    adapter = read_adapter(folder, targets_of(model))
    return "\n".join([*lines, *_placed(adapter, model)])


def _placed(adapter: Adapter, model: Path) -> list[str]:
    norms = [
        (torch.linalg.matrix_norm(part.b_OR.float() @ part.a_RI.float()).item() * part.scale, path)
        for path, parts in adapter.parts.items()
        for part in parts
        if isinstance(part, LoraPart)
    ]
    strongest = max(norms, default=(0.0, "none"))
    return [
        f"model     {model}: every tensor has a place, {len(adapter.parts)} of its modules change",
        f"strongest {strongest[1]} (norm of the change {strongest[0]:.3g})",
        f"digest    {adapter.digest}",
    ]
