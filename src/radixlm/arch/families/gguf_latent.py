"""GGUF architectures with latent attention: DeepSeek V2 to V3.2 and what llama.cpp takes for these
(Kimi K2, GLM 4.7 Flash, Youtu), GLM 5, MiniCPM 3."""

from __future__ import annotations

from typing import Any

from radixlm.arch.families.gguf_experts import DEEPSEEK_MOE
from radixlm.arch.families.gguf_kind import (
    PRE,
    Kind,
    Kinds,
    corrected_experts,
    has,
    layers_with,
    rows_of,
)
from radixlm.arch.families.gguf_rope import rope_scaling
from radixlm.arch.gguf import GgufHeader

_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.kv_b_proj",
}
_INDEXER = {
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
}
_NAMES = {**DEEPSEEK_MOE, **_LATENT}


def _joined(k_b: Any, v_b: Any) -> Any:
    """K [heads, rank, k] and V [heads, v, rank], which the converter took apart, as rows of [k][v]
    by head."""
    heads, rank, k = k_b.shape
    rows = v_b.new_empty(heads, k + v_b.shape[1], rank)
    rows[:, :k], rows[:, k:] = k_b.swapaxes(1, 2), v_b
    return rows.reshape(-1, rank)


_PAIRS = {"attn_k_b.weight": ("attn_v_b.weight", _joined)}


def _sizes(h: GgufHeader) -> dict[str, Any]:
    """Of latent attention; older files count the channels of heads under other keys."""
    rope, heads = h.count("rope.dimension_count"), h.count("attention.head_count")
    key = h.own("attention.key_length_mla") or h.count("attention.key_length")
    value = h.own("attention.value_length_mla") or h.own("attention.value_length")
    if value is None:
        value = (rows_of(h, "attn_kv_b") or heads) // heads - (key - rope)
    return {
        "q_lora_rank": h.own("attention.q_lora_rank"),
        "kv_lora_rank": h.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key - rope,
        "v_head_dim": value,
        "head_dim": rope,
        "attention_bias": has(h, "attn_kv_a_mqa.bias"),
        "num_key_value_heads": heads,
    }


def _yarn(h: GgufHeader) -> dict[str, Any]:
    """The file has a tenth of mscale_all_dim, which mscale equals in all published models."""
    scaling, tenth = rope_scaling(h), h.own("rope.scaling.yarn_log_multiplier")
    if scaling is None or scaling["rope_type"] != "yarn" or not tenth:
        return {}
    whole = round(10 * tenth, 6)
    return {"rope_scaling": {**scaling, "mscale": whole, "mscale_all_dim": whole}}


def _deepseek2(h: GgufHeader) -> Kind:
    """Experts are chosen with a correction (V3), by softmax (V2), or there are none."""
    if not h.own("expert_count"):
        architecture, model_type = "YoutuForCausalLM", "youtu"
    elif has(h, "exp_probs_b.bias") or h.own("expert_gating_func") == 2:
        architecture, model_type = "DeepseekV3ForCausalLM", "deepseek_v3"
    else:
        architecture, model_type = "DeepseekV2ForCausalLM", "deepseek_v2"
    return Kind(architecture, model_type, _NAMES, more=_deepseek_keys, pairs=_PAIRS)


def _deepseek_keys(h: GgufHeader) -> dict[str, Any]:
    keys = corrected_experts(h) if h.own("expert_count") else {}
    grouped = (h.own("expert_group_count") or 1) > 1
    method = "group_limited_greedy" if grouped else "greedy"
    return {**keys, **_sizes(h), **_yarn(h), "topk_method": method, "rope_interleave": True}


def _indexed(h: GgufHeader) -> dict[str, Any]:
    """Layers without an indexer use the choice of the one before."""
    own = layers_with(h, "indexer.attn_k.weight")
    return {
        **_deepseek_keys(h),
        "indexer_types": ["full" if one else "shared" for one in own],
        "index_n_heads": h.count("attention.indexer.head_count"),
        "index_head_dim": h.count("attention.indexer.key_length"),
        "index_topk": h.count("attention.indexer.top_k"),
    }


def _minicpm3(h: GgufHeader) -> dict[str, Any]:
    """The file has no keys for the scales, which the one published model has."""
    return {**_sizes(h), "scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4}


KINDS: Kinds = {
    "deepseek2": _deepseek2,
    **{
        name: Kind(architecture, model_type, {**_NAMES, **_INDEXER}, more=_indexed, pairs=_PAIRS)
        for name, architecture, model_type in (
            ("deepseek32", "DeepseekV32ForCausalLM", "deepseek_v32"),
            ("glm-dsa", "GlmMoeDsaForCausalLM", "glm_moe_dsa"),
        )
    },
    "minicpm3": Kind("MiniCPM3ForCausalLM", "minicpm3", {**PRE, **_LATENT}, more=_minicpm3),
}
