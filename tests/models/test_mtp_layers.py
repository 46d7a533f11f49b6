"""Checkpoints with multi-token prediction layers load, and give the same logits as without them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import cached_tiny, copy_tiny

from radixlm.arch.hf import describe_draft

JOINT = ("eh_proj", "enorm", "hnorm", "shared_head.norm", "embed_tokens")
# architecture -> the copied layer, the names of the prediction layers, their other tensors
CASES = {
    "DeepseekV3ForCausalLM": (2, "model.layers.3.", JOINT),
    "Glm4MoeForCausalLM": (2, "model.layers.3.", JOINT),
    "Ernie4_5_MoeForCausalLM": (0, "model.mtp_block.0.", ()),
    "Qwen3NextForCausalLM": (1, "mtp.layers.0.", ()),
    "MiMoV2FlashForCausalLM": (0, "model.mtp.layers.0.", JOINT),
}


@pytest.mark.parametrize("architecture", CASES)
def test_they_change_nothing(architecture: str, tmp_path: Path) -> None:
    source = cached_tiny(architecture)
    folder = copy_tiny(source, tmp_path / "with")
    layer, at, others = CASES[architecture]
    tensors = load_file(folder / "model.safetensors")
    old = f"model.layers.{layer}."
    further = {n.replace(old, at): t.clone() for n, t in tensors.items() if n.startswith(old)}
    assert further
    further |= {f"{at}{name}.weight": torch.randn(8, 8) for name in others}
    if at.startswith("model.mtp_block"):
        further["model.mtp_linear_proj.0.weight"] = torch.randn(64, 128)
    save_file({**tensors, **further}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    ids = torch.randint(3, 380, (19,), generator=torch.Generator().manual_seed(0)).tolist()
    with_them, without = (
        PagedRunner(load_model(one)).prefill({0: ids}, num_chunks=2)[0] for one in (folder, source)
    )
    assert torch.equal(with_them, without)
    assert describe_draft(folder) is not None
