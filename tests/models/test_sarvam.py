"""Sarvam's models, for which transformers has configs and borrows the classes of others: as it
saves them, under the names of its modules, and with the published spelling of the config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.shapes import LATENT
from tests.fakes.tiny_checkpoint import TINY, randomise
from tests.models.test_decoder import relative_error
from torch import Tensor

ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0}
CASES: dict[str, dict[str, Any]] = {
    "sarvam_moe": {"head_dim": 16, "first_k_dense_replace": 1, "attention_bias": True},
    "sarvam_mla": {**LATENT, "q_lora_rank": None, "n_group": 2, "topk_group": 1},
}
PUBLISHED = {
    "sarvam_moe": "SarvamMoEForCausalLM",
    "sarvam_mla": "SarvamMLAForCausalLM",
}


def respelled(config: dict[str, Any]) -> dict[str, Any]:
    """The config as it is published."""
    out = {**config, "architectures": [PUBLISHED[config["model_type"]]]}
    for own, published in (
        ("n_routed_experts", "num_experts"),
        ("n_shared_experts", "num_shared_experts"),
        ("attention_bias", "use_qkv_bias"),
    ):
        if own in out:
            out[published] = out.pop(own)
    if config["model_type"] == "sarvam_mla":
        rope = out.pop("rope_parameters")
        out["rope_theta"] = rope.pop("rope_theta")
        out["rope_scaling"] = {**rope, "type": "deepseek_yarn"}
        del out["rope_scaling"]["rope_type"]
        out["head_dim"] = out["kv_lora_rank"] + out["qk_rope_head_dim"]
    return out


RENAMED = {
    "model.embed_tokens": "model.word_embeddings",
    "o_proj": "dense",
    "q_norm": "query_layernorm",
    "k_norm": "key_layernorm",
    ".self_attn.": ".attention.",
    "gate.e_score_correction_bias": "gate.expert_bias",
}


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of 30B as they are published."""
    out, last = {}, ("weight", "bias")
    for name, tensor in tensors.items():
        if any(f".{part}_proj.{end}" in name for part in "kv" for end in last):
            continue
        if ".q_proj." in name:
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            name, tensor = name.replace("q_proj", "query_key_value"), torch.cat(parts)
        for own, published in RENAMED.items():
            name = name.replace(own, published)
        out[name] = tensor
    return out


@pytest.mark.parametrize("model_type", CASES)
def test_logits_equal_hugging_face(model_type: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip("a newer transformers has it")
    settings = {**TINY, **ROUTED, **CASES[model_type]}
    if model_type == "sarvam_mla":
        settings["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 10000.0, **YARN}
    config = transformers.CONFIG_MAPPING[model_type](**settings)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomise(model)
    ids = list(range(5, 45))
    with torch.inference_mode():
        wanted = model(torch.tensor([ids])).logits[0].float()
    for is_published in (True, False):
        folder = tmp_path / str(is_published)
        model.save_pretrained(folder, save_original_format=is_published)
        if is_published:
            path = folder / "config.json"
            path.write_text(json.dumps(respelled(json.loads(path.read_text()))))
            if model_type == "sarvam_moe":
                file = folder / "model.safetensors"
                save_file(renamed(load_file(file)), file, {"format": "pt"})
            again = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
            with torch.inference_mode():
                theirs = again.eval()(torch.tensor([ids])).logits[0]
            assert relative_error(theirs, wanted) < 1e-4
        ours = PagedRunner(load_model(folder), final_len=len(ids)).prefill({0: ids}, 2)[0]
        assert relative_error(ours, wanted) < 1e-4
