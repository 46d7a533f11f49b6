"""Weights that transformers loads, for encoders and whole models: errors name file and tensor."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.fakes.tiny_checkpoint import cached_tiny, copy_tiny
from tests.multimodal import tiny
from torch import nn

from radixlm.arch.hf import describe
from radixlm.base.errors import CheckpointError
from radixlm.base.lazy import transformers_loading
from radixlm.kernels.dispatch import bind
from radixlm.models.encoders.transformers_encoder import TransformersEncoder
from radixlm.models.transformers_backend.check_weights import check_numbers, check_report
from radixlm.models.transformers_backend.model import TransformersModel

CPU = torch.device("cpu")
FILE = "model.safetensors"
GATE = "model.layers.1.mlp.gate_proj.weight"
FC = "vision_tower.encoder.layers.0.mlp.fc1.weight"  # its name in the file


def _nan(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name].view(-1)[-1] = torch.nan


def _misshapen(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = torch.ones(2, 3)


def _missing(tensors: dict[str, torch.Tensor], name: str) -> None:
    del tensors[name]


DAMAGE = [
    (_nan, r"hold NaN.*\(FILE: NAME\)$"),
    (_misshapen, r"misshapen: .*, the checkpoint has \[2, 3\] \(FILE: NAME \[2, 3\]\)$"),
    (_missing, r"missing from FILE: (model\.)?NAME$"),
]
Damage = Callable[[dict[str, torch.Tensor], str], None]


def damaged(folder: Path, damage: Damage, name: str) -> None:
    tensors = load_file(folder / FILE)
    damage(tensors, name)
    save_file(tensors, folder / FILE, {"format": "pt"})


@pytest.mark.parametrize(("damage", "told"), DAMAGE)
def test_encoders(damage: Damage, told: str, tmp_path: Path) -> None:
    tiny.save(tiny.llava(), tmp_path)
    TransformersEncoder(tmp_path, CPU, torch.float32)
    damaged(tmp_path, damage, FC)
    with pytest.raises(CheckpointError, match=told.replace("FILE", FILE).replace("NAME", FC)):
        TransformersEncoder(tmp_path, CPU, torch.float32)


@pytest.mark.parametrize(("damage", "told"), DAMAGE)
def test_models(damage: Damage, told: str, tmp_path: Path) -> None:
    """Hugging Face initialises missing tensors at random and would serve them."""
    folder = copy_tiny(cached_tiny("Qwen3ForCausalLM"), tmp_path / "model")
    damaged(folder, damage, GATE)
    told = told.replace("FILE", FILE).replace("NAME", GATE)
    with pytest.raises(CheckpointError, match=told):
        TransformersModel(folder, describe(folder), CPU, torch.float32, bind("cpu"))


def test_a_truncated_file(tmp_path: Path) -> None:
    folder = copy_tiny(cached_tiny("Qwen3ForCausalLM"), tmp_path / "model")
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"{FILE}: truncated: model\.\S+ ends"):
        TransformersModel(folder, describe(folder), CPU, torch.float32, bind("cpu"))


def test_optional_tensors_may_be_missing(tmp_path: Path) -> None:
    report: dict[str, Any] = {"missing_keys": ["text.a"], "mismatched_keys": [("text.b", [1], [2])]}
    check_report(report, tmp_path, "the encoders", lambda name: not name.startswith("text"))
    check_numbers(nn.Linear(2, 2), tmp_path, "the encoders")


def test_one_model_is_loaded_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers replaces methods of its base class meanwhile, for all threads."""
    tiny.save(tiny.llava(), tmp_path)
    others: list[bool] = []

    def make(cls: Any, *args: Any, **options: Any) -> Any:
        with ThreadPoolExecutor(1) as thread:  # a lock that this thread holds, another cannot take
            others.append(thread.submit(transformers_loading.acquire, blocking=False).result())
        return whole(*args, **options)

    whole = transformers.LlavaForConditionalGeneration.from_pretrained
    kind = transformers.LlavaForConditionalGeneration
    monkeypatch.setattr(kind, "from_pretrained", classmethod(make))
    TransformersEncoder(tmp_path, CPU, torch.float32)
    whole = transformers.Qwen3ForCausalLM.from_pretrained
    monkeypatch.setattr(transformers.Qwen3ForCausalLM, "from_pretrained", classmethod(make))
    folder = cached_tiny("Qwen3ForCausalLM")
    TransformersModel(folder, describe(folder), CPU, torch.float32, bind("cpu"))
    assert others == [False, False]
