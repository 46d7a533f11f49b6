"""Folders in Mistral's own format (params.json) compute what transformers computes of the same
weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from radixlm.arch.families.mistral_native import config_of
from radixlm.arch.hf import describe_draft
from radixlm.base.errors import CheckpointError
from radixlm.engine.model_info import find_model
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import cached_tiny, reference_model
from tests.models.test_decoder import relative_error
from tests.models.test_drafts import loaded

NAMES = (
    (r"model\.embed_tokens", "tok_embeddings"), (r"lm_head", "output"), (r"^model\.", ""),
    (r"input_layernorm", "attention_norm"), (r"post_attention_layernorm", "ffn_norm"),
    (r"self_attn\.([qkvo])_proj", r"attention.w\1"),
    (r"self_attn\.q_([ab])_proj", r"attention.wq_\1"),
    (r"self_attn\.kv_a_proj_with_mqa", "attention.wkv_a_with_mqa"),
    (r"self_attn\.kv_b_proj", "attention.wkv_b"),
    (r"self_attn\.(\w+)_a_layernorm", r"attention.\1_a_norm"), (r"mlp\.(gate)\.", r"\1."),
    (r"mlp\.(shared_experts|experts\.\d+)\.", r"\1."), (r"mlp\.", "feed_forward."),
    (r"block_sparse_moe\.", "feed_forward."),
    (r"gate_proj", "w1"), (r"up_proj", "w3"), (r"down_proj", "w2"),
)  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta": 32, "alpha": 1}
KEYS = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads", "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps", "vocab_size": "vocab_size", "head_dim": "head_dim",
    "tied_embeddings": "tie_word_embeddings",
}  # fmt: skip
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
ROPE |= {"original_max_position_embeddings": 16, "max_position_embeddings": 64}


def in_turn(weight: Tensor, dim: int) -> Tensor:
    """Rows of halves that are rotated together -> rows of pairs."""
    halves = weight.unflatten(0, (-1, 2, dim // 2))
    return halves.transpose(1, 2).reshape(weight.shape).contiguous()


def native_tensors(folder: Path, dim: int) -> dict[str, Tensor]:
    out = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if re.search(r"self_attn\.[qk]_proj", name) and dim:
            tensor = in_turn(tensor, dim)
        stacked = re.search(r"(.*mlp\.experts\.)(gate_up|down)_proj", name)
        parts = {name: tensor}
        if stacked:
            names = ("gate", "up") if stacked[2] == "gate_up" else ("down",)
            parts = {
                f"{stacked[1]}{e}.{one}_proj.weight": part
                for e, expert in enumerate(tensor)
                for one, part in zip(names, expert.chunk(len(names)), strict=True)
            }
        for one, part in parts.items():
            for old, new in NAMES:
                one = re.sub(old, new, one)
            out[one] = part.contiguous()
    return out


def write(folder: Path, params: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(params))
    save_file(tensors, folder / "consolidated.safetensors")
    return folder


def params_of(folder: Path, **more: Any) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    return {old: config.get(new) for old, new in KEYS.items()} | more


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "MistralForCausalLM": ({"sliding_window": 5, "tie_word_embeddings": False}, {}),
    "MixtralForCausalLM": (
        {"sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"moe": {"num_experts": 4, "num_experts_per_tok": 2}},
    ),
    "Ministral3ForCausalLM": (
        {"rope_parameters": {**ROPE, "attention_factor": 1.0, "llama_4_scaling_beta": 0.1}},
        {"yarn": {**YARN, "apply_scale": False}, "rope_theta": 1e4},
    ),
    "Mistral4ForCausalLM": (
        {"rope_parameters": {**ROPE, "mscale": 1.0, "mscale_all_dim": 1.0,
                             "llama_4_scaling_beta": 0.1}},
        {"yarn": YARN, "rope_theta": 1e4},
    ),
}  # fmt: skip


def make_native(architecture: str, folder: Path) -> tuple[Path, Path]:
    """(transformers' folder, Mistral's)."""
    changes, more = CASES[architecture]
    theirs = cached_tiny(architecture, **changes)
    config = json.loads((theirs / "config.json").read_text())
    params = params_of(theirs, sliding_window=config.get("sliding_window"), **more)
    if "llama_4_scaling_beta" in changes.get("rope_parameters", {}):
        params["llama_4_scaling"] = {"beta": 0.1, "original_max_position_embeddings": 16}
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if "kv_lora_rank" in config:
        dim, params["head_dim"] = 0, config["v_head_dim"]
        params |= {key: config[key] for key in LATENT}
        params["moe"] = {
            "num_experts": config.get("n_routed_experts") or config["num_local_experts"],
            "num_experts_per_tok": config["num_experts_per_tok"],
            "expert_hidden_dim": config["moe_intermediate_size"],
            "first_k_dense_replace": config["first_k_dense_replace"],
            "num_shared_experts": config["n_shared_experts"],
            "routed_scale": config["routed_scaling_factor"],
            "num_expert_groups": config["n_group"],
            "num_expert_groups_per_tok": config["topk_group"],
        }
    return theirs, write(folder / "native", params, native_tensors(theirs, dim))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("architecture", CASES)
def test_a_native_folder_equals_hugging_face(architecture: str, tmp_path: Path) -> None:
    theirs, native = make_native(architecture, tmp_path)
    ids = torch.randint(3, 380, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        wanted = reference_model(theirs)(torch.tensor([ids])).logits[0]
    folder = find_model(str(native))
    ours = PagedRunner(load_model(folder)).prefill({0: ids}, num_chunks=3)[0]
    assert relative_error(ours, wanted) < 1e-4


@pytest.mark.parametrize("has_native_names", [False, True])
def test_mistral_large_3_by_its_config(has_native_names: bool, tmp_path: Path) -> None:
    changes, _ = CASES["Mistral4ForCausalLM"]
    theirs, folder = cached_tiny("Mistral4ForCausalLM", **changes), tmp_path / "m"
    config = json.loads((theirs / "config.json").read_text())
    beta = config["rope_parameters"].pop("llama_4_scaling_beta")
    config |= {"architectures": ["MistralLarge3ForCausalLM"], "model_type": "deepseek_v3"}
    config["llama_4_scaling"] = {"beta": beta, "original_max_position_embeddings": 16}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    held = load_file(theirs / "model.safetensors")
    save_file(native_tensors(theirs, 0) if has_native_names else held, folder / "model.safetensors")
    ids = torch.randint(3, 380, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        wanted = reference_model(theirs)(torch.tensor([ids])).logits[0]
    ours = PagedRunner(load_model(folder)).prefill({0: ids}, num_chunks=3)[0]
    assert relative_error(ours, wanted) < 1e-4


def test_windows_of_some_layers_repeat() -> None:
    config = config_of({"dim": 64, "n_layers": 4, "sliding_window": [8, None]}, "params.json")
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert config["sliding_window"] == 8


def test_an_eagle_head_in_eight_bits(tmp_path: Path) -> None:
    theirs = cached_tiny("MistralForCausalLM", num_hidden_layers=1, sliding_window=None)
    tensors = native_tensors(theirs, 24)
    for name in ("tok_embeddings.weight", "output.weight"):
        tensors.pop(name, None)
    tensors["eagle_linear.weight"] = torch.ones(64, 128).to(torch.float8_e4m3fn)
    tensors["eagle_linear.qscale_weight"] = torch.tensor(0.5)
    tensors["eagle_linear.qscale_act"] = torch.tensor(0.5)
    quantization = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
    folder = write(tmp_path / "head", params_of(theirs, quantization=quantization), tensors)
    spec = describe_draft(find_model(str(folder)))
    assert spec is not None and spec.decoder.blocks[0].layout == "pre"
    model = loaded(find_model(str(folder)), load_model(cached_tiny("MistralForCausalLM")), "cpu")
    assert float(model.draft.join.packed.unpack().max()) == 0.5


def test_an_unknown_quantization_is_refused(tmp_path: Path) -> None:
    params = {"dim": 64, "quantization": {"qformat_weight": "int3"}}
    folder = write(tmp_path / "model", params, {"output.weight": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"params.json: 'quantization' = .*int3"):
        find_model(str(folder))
