"""Random changes to the tiny config of any architecture, drawn from the keys of its Hugging Face
config class: flags, numbers, activations, heads, ropes, windows and layer types."""

from __future__ import annotations

import random
from typing import Any

from tests.fakes.tiny_checkpoint import ARCHITECTURES, TINY, class_of

ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "gelu_fast")
ACT_KEYS = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act")
# flags that change no logit, or whose other value gives no language model
IDLE = {
    *("use_cache", "is_decoder", "is_encoder_decoder", "add_cross_attention", "return_dict"),
    *("output_hidden_states", "output_attentions", "output_router_logits", "use_mamba_kernels"),
    *("chunk_size_feed_forward", "tie_encoder_decoder", "use_bidirectional_attention"),
    *("residual_in_fp32", "rescale_prenorm_residual", "use_mambapy", "use_return_dict"),
    *("use_falcon_mambapy", "scale_depth", "cross_attention_hidden_size", "rescale_layer"),
    "alibi",  # test_alibi: Hugging Face's eager attention adds the slopes twice
    *("attn_pdrop", "is_causal", "use_associative_scan", "pretraining_tp"),
}
FACTORS = (
    *("multiplier", "scaling_factor", "logit_scale", "alpha_factor", "beta_factor", "scale_emb"),
)
CAPS = ("softcap", "soft_cap")
HEADS = [(4, 2), (4, 1), (4, 4), (8, 2), (6, 3), (2, 1)]
SCALED: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
    },
    {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 8},
)


def draw(architecture: str, rng: random.Random) -> dict[str, Any]:
    """Overrides for ``make_tiny``."""
    cls = class_of(architecture).config_class
    base = {**TINY, **ARCHITECTURES[architecture]}
    config = cls(**{key: value for key, value in base.items() if value is not None})
    held = {key: value for key, value in config.to_dict().items() if not key.startswith("_")}
    out: dict[str, Any] = {}
    for key, value in sorted(held.items()):
        if key in IDLE:
            continue
        drawn = _drawn(key, value, rng)
        if drawn is not None:
            out[key] = drawn
    if "word_embed_proj_dim" in held:  # OPT 350M
        out["word_embed_proj_dim"] = rng.choice([24, 64])
    _shape(base, held, out, rng)
    _rope(held, out, rng)
    return out


def _drawn(key: str, value: Any, rng: random.Random) -> Any:
    """Another value for one key, or None for the same."""
    if isinstance(value, bool):
        return not value if rng.random() < 0.25 else None
    if key in ACT_KEYS:
        return rng.choice(ACTIVATIONS) if rng.random() < 0.5 else None
    if key.endswith(("eps", "epsilon")) and isinstance(value, float):
        return rng.choice([1e-3, 1e-5, 0.05, None])
    if any(part in key for part in FACTORS) and isinstance(value, float | int):
        return rng.choice([0.4, 1.7, None])
    if any(part in key for part in CAPS):
        return rng.choice([3.0, 25.0, None])
    if key == "sliding_window" and isinstance(value, int):
        return rng.choice([1, 2, 5, 13, 400, None])
    if key == "layer_types" and isinstance(value, list) and rng.random() < 0.5:
        kinds = sorted(set(value))
        return kinds + rng.choices(kinds, k=len(value) - len(kinds))
    return None


def _shape(
    base: dict[str, Any], held: dict[str, Any], out: dict[str, Any], rng: random.Random
) -> None:
    """Vocabulary, heads and their width."""
    if base.get("vocab_size"):
        out["vocab_size"] = rng.choice([384, 387, 401])
    heads = rng.choice(HEADS)
    plain = base.get("num_attention_heads") == 4 and "kv_lora_rank" not in base
    if plain and not any("mamba" in key or "linear" in key or "lru" in key for key in held):
        out["num_attention_heads"] = heads[0]
        if base.get("num_key_value_heads"):
            out["num_key_value_heads"] = heads[1]
        if isinstance(held.get("head_dim"), int) and held.get("head_dim") != 0:
            out["head_dim"] = rng.choice([8, 16, 24])
        out["hidden_size"] = heads[0] * rng.choice([8, 16])
    if rng.random() < 0.3 and "num_experts_per_tok" in base:
        out["num_experts_per_tok"] = rng.choice([1, 2, 3])


def _rope(held: dict[str, Any], out: dict[str, Any], rng: random.Random) -> None:
    """Another rope if the model has one for all layers, or another one for each layer type."""
    rope = held.get("rope_parameters")
    if not isinstance(rope, dict) or rng.random() < 0.4:
        return
    changed = {"rope_theta": rng.choice([10000.0, 500000.0, 777.0]), **rng.choice(SCALED)}
    if any(isinstance(one, dict) for one in rope.values()):
        kind = rng.choice(sorted(rope))
        own = {k: v for k, v in (rope[kind] or {}).items() if k == "partial_rotary_factor"}
        if changed["rope_type"] not in ("longrope", "dynamic"):
            out["rope_parameters"] = {**rope, kind: {**own, **changed}}
        return
    share = rope.get("partial_rotary_factor")
    dim = out.get("head_dim") or held.get("head_dim") or 0
    dim = dim or out.get("hidden_size", 64) // out.get("num_attention_heads", 4)
    dim = held.get("qk_rope_head_dim") or int(dim * (share or 1.0))
    if changed["rope_type"] == "longrope":
        changed["short_factor"] = [1 + 0.1 * i for i in range(dim // 2)]
        changed["long_factor"] = [1.5 + 0.3 * i for i in range(dim // 2)]
    own = {} if share is None else {"partial_rotary_factor": share}
    out["rope_parameters"] = {**changed, **own}
