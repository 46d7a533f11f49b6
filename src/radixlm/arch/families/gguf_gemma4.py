"""Gemma 4 in GGUF files: names of tensors, and keys of config.json."""

from __future__ import annotations

from typing import Any

from radixlm.arch.families.gguf_kind import experts
from radixlm.arch.gguf import GgufHeader, read_row
from radixlm.base.errors import CheckpointError

NAMES = {
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps": "experts.gate_up_proj",
    **{f"ffn_{x}_exps": f"experts.{{}}.{x}_proj" for x in ("gate", "up", "down")},
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale": "layer_scalar",
}
# stored without ".weight" in checkpoints
BARE = ("experts.gate_up_proj", "layer_scalar")


def gemma4(h: GgufHeader) -> dict[str, Any]:
    """Sliding and full layers have heads of their own sizes. A table of frequencies says which
    channels of full layers are rotated."""
    count, pattern = h.count("block_count"), h.own("attention.sliding_window_pattern")
    if not isinstance(pattern, list) or len(pattern) != count:
        raise CheckpointError(f"{h.path}: gemma4.attention.sliding_window_pattern is no list")
    full_dim, own_dim = h.count("attention.key_length"), h.count("attention.key_length_swa")
    table = h.tensors.get("per_layer_token_embd.weight")
    inner = h.own("feed_forward_length")
    return {
        "layer_types": [f"{'sliding' if one else 'full'}_attention" for one in pattern],
        "head_dim": own_dim,
        "global_head_dim": full_dim,
        **_kv_heads(h, pattern),
        "num_kv_shared_layers": h.own("attention.shared_kv_layers", 0),
        "use_double_wide_mlp": isinstance(inner, list) and len(set(inner)) > 1,
        "hidden_size_per_layer_input": h.own("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": None if table is None else table.shape[0],
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": h.own("final_logit_softcapping"),
        "rope_scaling": None,
        "rope_theta": None,
        "rope_parameters": _ropes(h, full_dim, own_dim),
        **_experts(h),
    }


def _kv_heads(h: GgufHeader, pattern: list[bool]) -> dict[str, Any]:
    counts, full = h.own("attention.head_count_kv"), pattern.index(False)
    if not isinstance(counts, list):
        counts = [counts] * len(pattern)
    own = counts[pattern.index(True)] if True in pattern else counts[0]
    return {
        "num_key_value_heads": own,
        "num_global_key_value_heads": None if counts[full] == own else counts[full],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in h.tensors,
    }


def _ropes(h: GgufHeader, full_dim: int, own_dim: int) -> dict[str, Any]:
    rotated = full_dim
    if "rope_freqs.weight" in h.tensors:
        rotated = 2 * sum(one < 1e29 for one in read_row(h, "rope_freqs.weight"))
    return {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": h.own("rope.freq_base", 1000000.0),
            "partial_rotary_factor": rotated / full_dim,
        },
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": h.own("rope.freq_base_swa", 10000.0),
            "partial_rotary_factor": h.own("rope.dimension_count_swa", own_dim) / own_dim,
        },
    }


def _experts(h: GgufHeader) -> dict[str, Any]:
    if "blk.0.ffn_gate_inp.weight" not in h.tensors:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        **experts(h),
        "top_k_experts": h.count("expert_used_count"),
    }
