"""GGUF architectures whose tensors the package `gguf` names, as llama.cpp's converters do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tests.fakes import gguf_file
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import cached_tiny

from radixlm.engine.gguf import unpacked

IDS = torch.randint(3, 380, (21,), generator=torch.Generator().manual_seed(3)).tolist()
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_HALF = {"rope_parameters": {**_PLAIN["rope_parameters"], "partial_rotary_factor": 0.5}}
_MOE = {
    "expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32,
    "expert_shared_count": 1, "leading_dense_block_count": 1, "expert_weights_scale": 1.0,
    "expert_weights_norm": True,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0,
    "original_max_position_embeddings": 16, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
# (architecture, llama.cpp's name, changes of the tiny config, what its converter writes)
CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("CohereForCausalLM", "command-r", {"use_qk_norm": False}, {"logit_scale": 0.9}),
    ("CohereForCausalLM", "command-r", {"use_qk_norm": True}, {"logit_scale": 0.9}),
    (
        "Cohere2ForCausalLM", "cohere2",
        {"layer_types": [*["sliding_attention"] * 3, "full_attention"], "num_hidden_layers": 4},
        {"logit_scale": 0.9},
    ),
    ("PhiForCausalLM", "phi2", _HALF, {"rope.dimension_count": 8}),
    ("NemotronForCausalLM", "nemotron", _HALF, {"rope.dimension_count": 8}),
    (
        "Ministral3ForCausalLM", "mistral3", {"rope_parameters": _YARN},
        {
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16, "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.1,
        },
    ),
    ("OlmoForCausalLM", "olmo", {"clip_qkv": 0.5, "attention_bias": False},
     {"attention.clamp_kqv": 0.5}),
    ("OlmoeForCausalLM", "olmoe", {"norm_topk_prob": False}, {}),
    ("Dots1ForCausalLM", "dots1", {"n_group": 1, "topk_group": 1, "norm_topk_prob": True}, _MOE),
    ("Glm4MoeForCausalLM", "glm4moe", {}, {**_MOE, "rope.dimension_count": 8}),
    (
        "Ernie4_5_MoeForCausalLM", "ernie4_5-moe", {},
        {**_MOE, "interleave_moe_layer_step": 1},
    ),
    ("MiniMaxM2ForCausalLM", "minimax-m2", {}, {}),
    ("Qwen3ForCausalLM", "qwen3vl", {}, {}),
    ("LlamaForCausalLM", "exaone", _PLAIN, {}),
    ("Jais2ForCausalLM", "jais2", {}, {}),
    ("GlmForCausalLM", "chatglm", {**_HALF, "head_dim": 16}, {"rope.dimension_count": 8}),
    ("HYV3ForCausalLM", "hy_v3", {}, {**_MOE, "expert_shared_feed_forward_length": 32,
     "expert_weights_scale": 2.826}),
    ("ExaoneMoeForCausalLM", "exaone-moe", {}, {
        **_MOE, "expert_shared_count": 2, "expert_weights_scale": 2.5, "expert_group_count": 2,
        "expert_group_used_count": 1,
        "attention.sliding_window_pattern": [True, True, True, False],
    }),
    ("AfmoeForCausalLM", "afmoe", {}, {**_MOE, "expert_shared_count": 2}),
    ("Cohere2MoeForCausalLM", "cohere2moe", {}, {
        **_MOE, "expert_count": 6, "expert_gating_func": 1, "logit_scale": 0.9,
        "attention.sliding_window_pattern": [False, True, True, True],
    }),
    ("HunYuanDenseV1ForCausalLM", "hunyuan-dense", _PLAIN, {}),
    ("HunYuanMoEV1ForCausalLM", "hunyuan-moe", _PLAIN, {"expert_used_count": 2}),
]  # fmt: skip


# newer than the package, with the names of another
_KIN = {"hy_v3": "afmoe", "cohere2moe": "afmoe"}


def _name_of(arch: str, num_layers: int, name: str) -> str:
    """llama.cpp's name of a tensor; of an expert's, that of all experts."""
    kinds = {own: kind for kind, own in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[_KIN.get(arch, arch)], num_layers)
    if arch == "nemotron_h_moe" and ".experts." in name:
        name = name.replace("backbone", "model").replace("mixer", "mlp")
    stem, _, ending = _EXPERT.sub(".experts.", name).rpartition(".")
    if ending == "e_score_correction_bias":
        stem, ending = f"{stem}.e_score_correction", "bias"
    elif ending in ("expert_bias", "dt_bias"):
        stem, ending = name.replace("dt_bias", "dt_proj"), "bias"
    elif ending in ("A_log", "D"):
        return f"{names.get_name(name)}"
    elif name.endswith("router.scale"):
        return f"{names.get_name(f'{stem}.proj')}.scale"
    elif ending == "per_expert_scale":
        return f"{names.get_name(stem.replace('router', 'experts.down_proj'))}.scale"
    elif names.get_name(name):  # a tensor without ".weight"
        stem, ending = name, "weight"
    found = names.get_name(stem) or names.get_name(stem.split(".", 1)[1])
    assert found is not None, name
    if arch == "hy_v3":
        found = found.replace("post_attention_norm", "ffn_norm")
    return f"{found}.{ending}"


def convert(
    folder: Path,
    file: Path,
    arch: str,
    extra: dict[str, Any],
    alter: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, value: value,
    tables: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """The checkpoint in float32; ``alter``: what the converter does to a tensor; ``tables``:
    further ones."""
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    num_layers = gguf_file.num_layers(config)
    tensors: dict[str, Any] = {**tables}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if tables and name.endswith("kv_b_proj.weight"):
            continue  # its parts are among the tables
        new, value = _name_of(arch, num_layers, name), alter(name, value)
        if expert := _EXPERT.search(name):
            experts.setdefault(new, {})[int(expert[1])] = value
            continue
        if arch == "nemotron" and name.endswith("norm.weight"):
            value = value + 1
        if arch in ("olmo", "mistral3", "granitehybrid") and name.endswith(
            ("q_proj.weight", "k_proj.weight")
        ):
            count = heads if "q_proj" in name else kv_heads
            value = value.view(count, 2, -1, value.shape[1]).transpose(1, 2).reshape(value.shape)
        tensors[new] = value.contiguous(), "F32"
    for new, parts in experts.items():
        tensors[new] = torch.stack([parts[i] for i in range(len(parts))]), "F32"
    own = {"attention.layer_norm_epsilon": config.get("layer_norm_eps", config.get("norm_eps"))}
    own |= {"expert_count": config.get("num_experts")} | extra
    said = gguf_file.metadata(config, arch) | {
        f"{arch}.{key}": value for key, value in own.items() if value is not None
    }
    return gguf_file.write(file, said, tensors)


@pytest.mark.parametrize(("architecture", "arch", "settings", "extra"), CASES)
def test_a_file_gives_the_logits_of_its_checkpoint(
    architecture: str,
    arch: str,
    settings: dict[str, Any],
    extra: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = cached_tiny(architecture, **settings)
    file = convert(folder, tmp_path / "m.gguf", arch, extra)
    got, wanted = (
        PagedRunner(load_model(one)).prefill({0: IDS}, num_chunks=2)[0]
        for one in (unpacked(file), folder)
    )
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
