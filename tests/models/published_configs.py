"""Configs as they are published: values of published models, and keys as transformers 4 wrote them
(`rope_theta` and `rope_scaling` at the top level, `torch_dtype`), as 5 writes them, or omitted if
the class has the value as its default."""

from __future__ import annotations

import random
from typing import Any

from tests.fakes.tiny_checkpoint import class_of

# key -> values in published configs; a key is drawn if the config class has it
VALUES: dict[str, list[Any]] = {
    "tie_word_embeddings": [False, True],
    "attention_bias": [False, True],
    "use_qkv_bias": [False, True],
    "mlp_bias": [False, True],
    "use_bias": [False, True],
    "num_key_value_heads": [1, 2, 4, None],
    "head_dim": [None, 16, 24],
    "sliding_window": [None, 5, 13, 4096],
    "use_sliding_window": [False, True],
    "max_window_layers": [0, 1, 2, 28],
    "sliding_window_pattern": [1, 2, 3],
    "use_qk_norm": [False, True],
    "qk_layernorm": [False, True],
    "qk_norm": [False, True],
    "query_pre_attn_scalar": [16, 64, 256],
    "attn_logit_softcapping": [None, 5.0, 50.0],
    "final_logit_softcapping": [None, 2.0, 30.0],
    "norm_topk_prob": [False, True],
    "num_experts_per_tok": [1, 2, 4],
    "n_group": [1, 2],
    "topk_group": [1, 2],
    "topk_method": ["greedy", "group_limited_greedy"],
    "routed_scaling_factor": [1.0, 2.5],
    "first_k_dense_replace": [0, 1, 3],
    "n_shared_experts": [1, 2],
    "moe_num_shared_experts": [1, 2],
    "mlp_only_layers": [[], [0], [1, 2]],
    "decoder_sparse_step": [1, 2],
    "moe_layer_interval": [1, 2],
    "q_lora_rank": [None, 24],
    "clip_qkv": [None, 0.5, 8.0],
    "no_rope_layer_interval": [2, 4],
    "use_parallel_residual": [False, True],
    "parallel_attn": [False, True],
    "multi_query": [False, True],
    "new_decoder_architecture": [False, True],
    "scale_attn_by_inverse_layer_idx": [False, True],
    "do_layer_norm_before": [True],
    "logits_scaling": [1.0, 4.0],
    "residual_multiplier": [1.0, 0.22],
    "embedding_multiplier": [1.0, 12.0],
    "rms_norm_eps": [1e-5, 1e-6],
}
PARTIAL = [0.25, 0.5, 0.75]
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    _YARN,
    {**_YARN, "attention_factor": 1.3},
    {**_YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    {**_YARN, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    {**_YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707},
    {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {"rope_type": "longrope", "original_max_position_embeddings": 16, "factor": 8.0},
    {"rope_type": "longrope", "original_max_position_embeddings": 128},
    {"rope_type": "longrope", "original_max_position_embeddings": 16, "attention_factor": 1.2},
    {"rope_type": "proportional"},
]  # fmt: skip
_OF_NEOX = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
# newer than rope_scaling, which their classes ignore or warn about
_OF_5 = ("cohere2_moe", "gemma4")
# always read, next to any other key
_KEPT = {"architectures", "model_type", "vocab_size", "transformers_version", "layers_block_type"}


# keys of published files without an effect on the computation
BESIDE: dict[str, Any] = {
    "_name_or_path": "someone/some-model",
    "auto_map": {"AutoConfig": "configuration_own.OwnConfig", "AutoModel": "modeling_own.Own"},
    "unsloth_fixed": True,
    "quantization_config": None,
    "pretraining_tp": 1,
    "eos_token_id": [2, 7],
    "bos_token_id": None,
    "attention_dropout": 0.1,
    "use_cache": False,
    "rope_interleaved": False,
    "_attn_implementation_autoset": True,
    "model_max_length": 256,
}


def draw(architecture: str, base: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Overrides for `make_tiny` of a config class's tiny config."""
    held = class_of(architecture).config_class(**base).to_dict()
    out = {
        key: rng.choice(values)
        for key, values in VALUES.items()
        if key in held and rng.random() < 0.5
    }
    if "qk_rope_head_dim" in held:  # there it has another name, and as many heads
        out = {k: v for k, v in out.items() if k not in ("head_dim", "num_key_value_heads")}
    if "topk_group" in out:
        out["topk_group"] = min(out["topk_group"], out.get("n_group") or held.get("n_group") or 1)
    rope = held.get("rope_parameters")
    if isinstance(rope, dict) and "rope_type" in rope and rng.random() < 0.6:
        out["rope_parameters"] = _rope(rope, {**held, **out}, rng)
    return out


def _rope(rope: dict[str, Any], held: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    made = {"rope_theta": rng.choice([1e4, 5e5, 1e6]), **rng.choice(ROPES)}
    share = rope.get("partial_rotary_factor")
    if share is not None:
        share = made["partial_rotary_factor"] = rng.choice([share, *PARTIAL])
    dim = held.get("qk_rope_head_dim") or held.get("head_dim")
    dim = dim or held["hidden_size"] // held["num_attention_heads"]
    if not held.get("qk_rope_head_dim"):
        dim = int(dim * (share or 1.0))
    if made["rope_type"] == "longrope":
        made["short_factor"] = [1.0 + 0.05 * i for i in range(dim // 2)]
        made["long_factor"] = [1.5 + 0.4 * i for i in range(dim // 2)]
    return made


def respelled(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A saved config.json with other spellings of its keys; Hugging Face defines their meaning."""
    out = {key: value for key, value in config.items() if value is not None or rng.random() < 0.7}
    if rng.random() < 0.7:
        out = _as_of_4(out, rng)
    cls = class_of(config["architectures"][0]).config_class
    usual = cls().to_dict()
    for key in sorted(out):
        if key in _KEPT or key not in usual or out[key] != usual[key]:
            continue
        if rng.random() < 0.6:
            del out[key]
    out |= {key: value for key, value in BESIDE.items() if rng.random() < 0.3}
    if "layer_types" in out and rng.random() < 0.4:
        kinds = out.pop("layer_types")
        if cls.from_dict(dict(out)).to_dict().get("layer_types") != kinds:
            out["layer_types"] = kinds
    return out


def _as_of_4(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    out = {key: value for key, value in config.items() if key != "rope_parameters"}
    if "dtype" in out:
        out["torch_dtype"] = out.pop("dtype")
    out["transformers_version"] = "4.51.0"
    rope = config.get("rope_parameters")
    if config["model_type"].startswith(_OF_5):
        return config
    if not isinstance(rope, dict):
        return out
    if "full_attention" in rope and "sliding_attention" in rope:  # Gemma 3 and later
        rope, local = rope["full_attention"], rope["sliding_attention"]
        if not isinstance(rope, dict) or not isinstance(local, dict):
            return config
        out["rope_local_base_freq"] = local.get("rope_theta", 10000.0)
    if "rope_type" not in rope:
        return config
    scaling = dict(rope)
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in scaling:
            is_neox = config["model_type"].startswith("gpt_neox")
            out[_OF_NEOX[key] if is_neox else key] = scaling.pop(key)
    kind = scaling.pop("rope_type")
    if kind == "default":
        out["rope_scaling"] = None
    else:
        name = rng.choice([("type",), ("rope_type",), ("type", "rope_type")])
        out["rope_scaling"] = {**dict.fromkeys(name, kind), **scaling}
        before = "original_max_position_embeddings"
        if kind == "longrope" and before in scaling and rng.random() < 0.5:  # as in Phi 3
            out[before] = out["rope_scaling"].pop(before)
        if rng.random() < 0.2:
            out["rope_scaling"].setdefault("attention_factor")
    return out
