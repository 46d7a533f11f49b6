"""GGUF architectures with experts whose layers keep no states."""

from __future__ import annotations

from typing import Any

from radixlm.arch.families.gguf_kind import (
    ATTENTION,
    PRE,
    Kind,
    Kinds,
    corrected_experts,
    experts,
    has,
    layer_norm,
    layers_with,
    num_layers,
    partial_of_heads,
    rows_of,
)
from radixlm.arch.families.gguf_rope import rope_scaling
from radixlm.arch.gguf import GgufHeader
from radixlm.base.errors import CheckpointError


def _experts_at(at: str) -> dict[str, str]:
    return {f"ffn_{x}_exps": f"{at}.experts.{{}}.{x}_proj" for x in ("gate", "up", "down")}


def _shared_at(at: str) -> dict[str, str]:
    return {f"ffn_{x}_shexp": f"{at}.{x}_proj" for x in ("gate", "up", "down")}


QWEN_MOE = {
    **PRE,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **_experts_at("mlp"),
    **_shared_at("mlp.shared_expert"),
}
_MIXTRAL = {
    **PRE,
    "ffn_gate_inp": "block_sparse_moe.gate",
    **{
        f"ffn_{x}_exps": f"block_sparse_moe.experts.{{}}.{w}"
        for x, w in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
}
_GPT_OSS = {
    **ATTENTION,
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    **_experts_at("mlp"),
}
DEEPSEEK_MOE = {
    **QWEN_MOE,
    **_shared_at("mlp.shared_experts"),
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
}
_GLM4_MOE = {**DEEPSEEK_MOE, "post_attention_norm": "post_attention_layernorm"}
_ERNIE_MOE = {**DEEPSEEK_MOE, "exp_probs_b": "mlp.moe_statics.e_score_correction_bias"}
_MINIMAX_M2 = {**_MIXTRAL, "exp_probs_b": "block_sparse_moe.e_score_correction_bias"}
_EXAONE_MOE = {**DEEPSEEK_MOE, "exp_probs_b": "mlp.e_score_correction_bias"}
_HUNYUAN = {
    **PRE,
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
    "ffn_gate_inp": "mlp.gate.wg",
    **_experts_at("mlp"),
    **_shared_at("mlp.shared_mlp"),
}
_HY_V3 = {
    **DEEPSEEK_MOE,
    **_shared_at("mlp.shared_mlp"),
    "ffn_gate_inp": "mlp.router.gate",
    "exp_probs_b": "mlp.expert_bias",
}
_AFMOE = {
    **DEEPSEEK_MOE,
    "attn_gate": "self_attn.gate_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_gate_inp": "mlp.router.gate",
    "exp_probs_b": "mlp.expert_bias",
}
_LLAMA4 = {
    **PRE,
    **{f"ffn_{x}": f"feed_forward.{x}_proj" for x in ("gate", "up", "down")},
    "ffn_gate_inp": "feed_forward.router",
    **_experts_at("feed_forward"),
    **_shared_at("feed_forward.shared_expert"),
}


def _qwen_moe(h: GgufHeader) -> dict[str, Any]:
    shared = h.own("expert_shared_feed_forward_length")
    return {
        **experts(h),
        "norm_topk_prob": not shared,
        **({"shared_expert_intermediate_size": shared} if shared else {}),
    }


def _gpt_oss(h: GgufHeader) -> dict[str, Any]:
    """What the model has and the header has no key for: bounds of YaRN that are not rounded, and
    the end of a tool call, which ends the text too."""
    scaling, tokens = rope_scaling(h), h.metadata.get("tokenizer.ggml.tokens")
    ends = [h.metadata.get("tokenizer.ggml.eos_token_id")]
    if isinstance(tokens, list) and "<|call|>" in tokens:
        ends.append(tokens.index("<|call|>"))
    return {
        **experts(h),
        "rope_scaling": None if scaling is None else {**scaling, "truncate": False},
        "eos_token_id": [one for one in ends if isinstance(one, int)] or None,
    }


def _olmoe(h: GgufHeader) -> dict[str, Any]:
    return {**experts(h), "norm_topk_prob": bool(h.own("expert_weights_norm", False))}


def _deepseek(h: GgufHeader) -> dict[str, Any]:
    """The first DeepSeek MoE never renormalizes."""
    return {**corrected_experts(h), "norm_topk_prob": False, "scoring_func": "softmax"}


def _glm4_moe(h: GgufHeader) -> dict[str, Any]:
    has_norms = has(h, "attn_q_norm.weight")
    return {**corrected_experts(h), **partial_of_heads(h), "use_qk_norm": has_norms}


def _ernie_moe(h: GgufHeader) -> dict[str, Any]:
    return {
        **experts(h),
        "moe_num_shared_experts": h.own("expert_shared_count", 0),
        "moe_layer_start_index": h.own("leading_dense_block_count", 0),
        "moe_layer_end_index": h.count("block_count") - 1,
        "moe_layer_interval": h.own("interleave_moe_layer_step", 1),
    }


def _minimax_m2(h: GgufHeader) -> dict[str, Any]:
    keys = experts(h)
    inner = {"intermediate_size": keys["moe_intermediate_size"], "use_qk_norm": True}
    return {**keys, **partial_of_heads(h), **inner}


def slides(h: GgufHeader) -> list[str] | None:
    """The kinds of the layers, where the header tells which have a window."""
    pattern = h.own("attention.sliding_window_pattern")
    if not isinstance(pattern, list) or len(pattern) < num_layers(h):
        return None
    return [f"{'sliding' if one else 'full'}_attention" for one in pattern[: num_layers(h)]]


def _sparse(h: GgufHeader) -> list[str]:
    sparse = layers_with(h, "ffn_gate_inp.weight")
    return ["sparse" if one else "dense" for one in sparse]


def _exaone_moe(h: GgufHeader) -> dict[str, Any]:
    return {
        **corrected_experts(h),
        "num_shared_experts": h.own("expert_shared_count", 0),
        "layer_types": slides(h),
        "mlp_layer_types": _sparse(h),
    }


def _hy_v3(h: GgufHeader) -> dict[str, Any]:
    shared, keys = h.own("expert_shared_feed_forward_length") or 0, corrected_experts(h)
    return {
        **keys,
        "num_shared_experts": shared // keys["moe_intermediate_size"],
        "mlp_layer_types": _sparse(h),
        "router_scaling_factor": keys["routed_scaling_factor"],
    }


def _afmoe(h: GgufHeader) -> dict[str, Any]:
    """Three of four layers slide; the embedding is scaled, as all published models do."""
    keys, count = corrected_experts(h), num_layers(h)
    every = h.own("attention.sliding_window_pattern")
    every = every if isinstance(every, int) and every > 0 else 4
    full = [(i + 1) % every == 0 for i in range(count)]
    return {
        **keys,
        "num_shared_experts": h.own("expert_shared_count", 0),
        "num_dense_layers": keys["first_k_dense_replace"],
        "route_scale": keys["routed_scaling_factor"],
        "mup_enabled": True,
        "layer_types": slides(h) or [f"{'full' if one else 'sliding'}_attention" for one in full],
    }


def _cohere2_moe(h: GgufHeader) -> dict[str, Any]:
    chosen = {1: "softmax", 2: "sigmoid"}.get(h.own("expert_gating_func", 1))
    if chosen is None:
        raise CheckpointError(f"{h.path}: {h.architecture}.expert_gating_func is unknown")
    return {
        **layer_norm(h),
        **experts(h),
        "intermediate_size": rows_of(h, "ffn_up_exps"),
        "prefix_dense_intermediate_size": rows_of(h, "ffn_up"),
        "expert_selection_fn": chosen,
        "norm_topk_prob": bool(h.own("expert_weights_norm", False)),
        "num_shared_experts": h.own("expert_shared_count", 0),
        "shared_expert_combination_strategy": "average",
        "logit_scale": h.own("logit_scale", 1.0),
        "prefix_dense_sliding_window_pattern": 1,
        "rms_norm_eps": None,
        "layer_types": slides(h),
        "mlp_layer_types": _sparse(h),
        "tie_word_embeddings": "output.weight" not in h.tensors,
    }


def _llama4(h: GgufHeader) -> dict[str, Any]:
    """What all published models have and the file has no keys for: chunks of 8192 tokens, scaled
    queries, and norms of q and k in all but the model of 128 experts."""
    count, sparse = h.count("block_count"), layers_with(h, "ffn_gate_inp.weight")
    return {
        **experts(h),
        "intermediate_size": rows_of(h, "ffn_up_exps"),
        "intermediate_size_mlp": rows_of(h, "ffn_up") or h.count("feed_forward_length"),
        "moe_layers": [i for i, one in enumerate(sparse) if one],
        "no_rope_layers": [int((i + 1) % 4 != 0) for i in range(count)],
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "attn_scale": 0.1,
        "floor_scale": 8192,
        "use_qk_norm": h.count("expert_count") != 128,
    }


MIXTRAL = Kind("MixtralForCausalLM", "mixtral", _MIXTRAL, is_permuted=True, more=experts)
KINDS: Kinds = {
    "qwen2moe": Kind("Qwen2MoeForCausalLM", "qwen2_moe", QWEN_MOE, more=_qwen_moe),
    "qwen3moe": Kind("Qwen3MoeForCausalLM", "qwen3_moe", QWEN_MOE, more=_qwen_moe),
    "gpt-oss": Kind("GptOssForCausalLM", "gpt_oss", _GPT_OSS, more=_gpt_oss),
    "olmoe": Kind("OlmoeForCausalLM", "olmoe", QWEN_MOE, more=_olmoe),
    "deepseek": Kind(
        "DeepseekForCausalLM", "deepseek", DEEPSEEK_MOE, is_permuted=True, more=_deepseek
    ),
    "dots1": Kind("Dots1ForCausalLM", "dots1", DEEPSEEK_MOE, more=corrected_experts),
    "glm4moe": Kind("Glm4MoeForCausalLM", "glm4_moe", _GLM4_MOE, more=_glm4_moe),
    "ernie4_5-moe": Kind("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", _ERNIE_MOE, more=_ernie_moe),
    "minimax-m2": Kind("MiniMaxM2ForCausalLM", "minimax_m2", _MINIMAX_M2, more=_minimax_m2),
    "hunyuan-dense": Kind("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", _HUNYUAN),
    "hunyuan-moe": Kind("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", _HUNYUAN, more=experts),
    "hy_v3": Kind("HYV3ForCausalLM", "hy_v3", _HY_V3, more=_hy_v3),
    "exaone-moe": Kind("ExaoneMoeForCausalLM", "exaone_moe", _EXAONE_MOE, more=_exaone_moe),
    "afmoe": Kind("AfmoeForCausalLM", "afmoe", _AFMOE, more=_afmoe),
    "cohere2moe": Kind("Cohere2MoeForCausalLM", "cohere2_moe", DEEPSEEK_MOE, more=_cohere2_moe),
    "llama4": Kind("Llama4ForCausalLM", "llama4_text", _LLAMA4, more=_llama4),
    "qwen3vlmoe": Kind("Qwen3MoeForCausalLM", "qwen3_moe", QWEN_MOE, more=_qwen_moe),
}
