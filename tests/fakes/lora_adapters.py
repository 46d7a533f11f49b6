"""Random PEFT adapters for tiny checkpoints, and checkpoints with their weights merged, by the
formulae of the paper."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tests.fakes.tiny_checkpoint import reference_model, write_tokenizer

ALL_LINEAR = r"\.\d+\..*\.(?!gate$|router$)\w+$"  # of the layers, without routers


def linears(base: Path, pattern: str = ALL_LINEAR) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the linear modules of the reference model whose name matches."""
    found = {}
    for name, module in reference_model(base).named_modules():
        if isinstance(module, nn.Linear | Conv1D) and re.search(pattern, name):
            shape = tuple(module.weight.shape)
            found[name] = shape[::-1] if isinstance(module, Conv1D) else shape
    assert found, "no module matches"
    return found


def write_adapter(
    base: Path,
    folder: Path,
    rank: int = 4,
    pattern: str = ALL_LINEAR,
    seed: int = 0,
    prefix: str = "base_model.model.",
    rank_of: Callable[[str], int] | None = None,
    dtype: torch.dtype = torch.float32,
    size: float = 0.2,
    **config: Any,
) -> Path:
    """An adapter of random numbers for the modules that match; ``config`` changes its config."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, (num_out, num_in) in linears(base, pattern).items():
        r = rank_of(name) if rank_of else rank
        for half, shape in (("A", (r, num_in)), ("B", (num_out, r))):
            values = torch.randn(shape, generator=generator) * size
            tensors[f"{prefix}{name}.lora_{half}.weight"] = values.to(dtype)
        if config.get("use_dora"):
            lengths = torch.rand(num_out, generator=generator) + 0.5
            tensors[f"{prefix}{name}.lora_magnitude_vector"] = lengths
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, **config}
    return write_folder(folder, settings, tensors)


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """An adapter of these tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged(
    base: Path,
    adapter: Path,
    folder: Path,
    scale: float | Callable[[str], float] = 2.0,
    prefix: str = "base_model.model.",
) -> Path:
    """The checkpoint with ``W + scale * B A`` for every module of the adapter; of DoRA, with its
    rows brought to the lengths of the magnitude vector."""
    model = reference_model(base)
    tensors = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for key in [k for k in tensors if ".lora_A." in k]:
            name = key.removeprefix(prefix).partition(".lora_A.")[0]
            b_OR = tensors[key.replace("lora_A", "lora_B")].double()
            delta = b_OR @ tensors[key].double() * (scale(name) if callable(scale) else scale)
            module = model.get_submodule(name)
            is_conv = isinstance(module, Conv1D)
            weight_OI = (module.weight.T if is_conv else module.weight).double() + delta
            lengths = tensors.get(f"{key.partition('.lora_A.')[0]}.lora_magnitude_vector")
            if lengths is not None:  # DoRA
                weight_OI *= (lengths.double() / weight_OI.norm(dim=1))[:, None]
            module.weight.copy_(weight_OI.T if is_conv else weight_OI)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder
