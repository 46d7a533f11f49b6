"""Ling 3 under its published names, as Bailing hybrid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes.newer_references import CHECKPOINT, skip_if_older
from tests.fakes.tiny_checkpoint import make_tiny, reference_model
from tests.models.reference_math import check
from torch import Tensor

from radixlm.arch.hf import describe
from radixlm.base.errors import CheckpointError

NAME = "BailingHybridForCausalLM"
NAMES = {"architectures": ["BailingMoeV3ForCausalLM"], "no_kda_lora": True}

SIZES = {
    "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100,
}  # fmt: skip


@pytest.mark.parametrize("model_type", ["bailing_hybrid", "bailing_moe_v3"])
def test_ling_3_as_published(model_type: str, tmp_path: Path) -> None:
    skip_if_older(NAME, CHECKPOINT)
    make_tiny(NAME, tmp_path, vocab_size=100)
    model, path = reference_model(tmp_path), tmp_path / "config.json"
    raw = json.loads(path.read_text())
    limits = {f"{one}_swiglu_limit_list": [0, None] for one in ("expert", "share_expert")}
    gate = {"gated_attention_proj_granularity_type": "head_wise"}
    path.write_text(json.dumps({**raw, **NAMES, **limits, **gate, "model_type": model_type}))

    def reference(ids: list[int]) -> Tensor:
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0].float()

    check(tmp_path, reference)


@pytest.mark.parametrize(
    "change",
    [
        {"no_kda_lora": False},
        {"gated_attention_proj_granularity_type": "element_wise"},
        {"moe_shared_expert_intermediate_size": 7},
        {"expert_swiglu_limit_list": [0, 7.0]},
    ],
)
def test_other_values_are_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(change))):
        describe({**NAMES, **SIZES, "model_type": "bailing_moe_v3", **change})
