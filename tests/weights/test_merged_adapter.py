"""An adapter inside a checkpoint: what it is added to, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from radixlm.base.errors import CheckpointError
from radixlm.weights.folder import open_folder

NAME = "language_model.model.layers.0.self_attn.q_proj"
WEIGHT = torch.arange(12.0).reshape(4, 3)
A, B = torch.ones(2, 3), torch.full((4, 2), 0.5)
GOOD = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}


def opened(folder: Path, adapter: dict[str, torch.Tensor] | None, **said: Any) -> Any:
    config = {"has_lora_adapter": True, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {f"{NAME}.weight": WEIGHT, "head.weight": WEIGHT.clone()}, folder / "model.safetensors"
    )
    if adapter is not None:
        save_file(adapter, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(GOOD | said))
    return open_folder(folder, "auto")


def halves(name: str = NAME) -> dict[str, torch.Tensor]:
    return {
        f"base_model.model.{name}.lora_{half}.weight": t
        for half, t in zip("AB", (A, B), strict=True)
    }


def test_the_adapter_is_added_to_its_weights_alone(tmp_path: Path) -> None:
    source = opened(tmp_path, halves())
    assert torch.equal(source.read(f"{NAME}.weight"), WEIGHT + 2.0 * (B @ A))
    assert torch.equal(source.read("head.weight"), WEIGHT)
    ranked = opened(tmp_path, halves(), use_rslora=True)
    assert torch.allclose(ranked.read(f"{NAME}.weight"), WEIGHT + 4.0 / 2**0.5 * (B @ A))


def test_a_missing_adapter_leaves_the_weights(tmp_path: Path) -> None:
    assert torch.equal(opened(tmp_path, None).read(f"{NAME}.weight"), WEIGHT)


@pytest.mark.parametrize(
    ("adapter", "said", "told"),
    [
        (halves(), {"use_dora": True}, "use_dora"),
        (halves(), {"r": 0}, "'r'"),
        (halves(), {"peft_type": "IA3"}, "plain LoRA"),
        (halves("language_model.model.layers.7.mlp.up_proj"), {}, "of no weight"),
        ({f"{NAME}.lora_A.weight": A}, {}, "half"),
        ({"what.is.this": A}, {}, "of no weight"),
    ],
)
def test_unsupported_adapters_are_refused(
    adapter: dict[str, torch.Tensor], said: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=told):
        opened(tmp_path, adapter, **said)


def test_an_adapter_of_another_shape_is_refused(tmp_path: Path) -> None:
    wrong = {f"{NAME}.lora_A.weight": torch.ones(2, 5), f"{NAME}.lora_B.weight": B}
    with pytest.raises(CheckpointError, match="does not fit"):
        opened(tmp_path, wrong).read(f"{NAME}.weight")
