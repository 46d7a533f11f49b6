"""Nemotron H whose layers have values of their own, as Nemotron H with the same in all layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes.tiny_checkpoint import make_tiny, reference_model
from tests.models.reference_math import check
from torch import Tensor

from radixlm.arch.hf import describe
from radixlm.base.errors import CheckpointError

OWN = {
    "mamba": ("mamba_num_heads", "mamba_head_dim"),
    "moe": ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "attention": ("num_key_value_heads",),
    "mlp": ("intermediate_size",),
}


def _puzzle(config: dict[str, Any]) -> dict[str, Any]:
    """The config with the values of ``OWN`` in its layers, and others at the top."""
    kinds = {"linear_attention": "mamba", "full_attention": "attention"}
    blocks = []
    for listed in config["layers_block_type"]:
        kind = kinds.get(listed, listed)
        blocks.append({"block_type": kind, **{key: config[key] for key in OWN[kind]}})
    kept = {key: value for key, value in config.items() if key != "layers_block_type"}
    wrong = {key: kept[key] * 2 for keys in OWN.values() for key in keys}
    names = {"architectures": ["NemotronHPuzzleForCausalLM"], "model_type": "nemotron_h_puzzle"}
    return {**kept, **wrong, **names, "block_configs": blocks}


def test_each_layer_has_its_own_values(tmp_path: Path) -> None:
    make_tiny("NemotronHForCausalLM", tmp_path, vocab_size=100)
    model, path = reference_model(tmp_path), tmp_path / "config.json"
    path.write_text(json.dumps(_puzzle(json.loads(path.read_text()))))

    def reference(ids: list[int]) -> Tensor:
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0].float()

    check(tmp_path, reference)


def test_layers_without_values_are_refused_by_name(tmp_path: Path) -> None:
    make_tiny("NemotronHForCausalLM", tmp_path)
    config = _puzzle(json.loads((tmp_path / "config.json").read_text()))
    config |= {"block_configs": config["block_configs"][1:], "num_hidden_layers": 4}
    with pytest.raises(CheckpointError, match="block_configs"):
        describe(config)
