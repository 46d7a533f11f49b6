"""GGUF architectures whose layers keep states (delta nets, short convolutions): names of their
tensors, keys of config.json, and what llama.cpp's converters did to the tensors, undone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from radixlm.arch.families.gguf_kind import Change, experts, layers_with
from radixlm.arch.gguf import GgufHeader

DELTA = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_out": "linear_attn.out_proj",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "post_attention_norm": "post_attention_layernorm",
}
_LFM2_MIXERS = {
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{f"attn_{x}_norm": f"self_attn.{x}_layernorm" for x in "qk"},
    "attn_output": "self_attn.out_proj",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    **{f"shortconv.{x}": f"conv.{x}" for x in ("in_proj", "conv", "out_proj")},
}
_W = {"gate": "w1", "up": "w3", "down": "w2"}
LFM2 = {
    **_LFM2_MIXERS,
    **{f"ffn_{x}": f"feed_forward.{w}" for x, w in _W.items()},
    **{f"ffn_{x}_exps": f"feed_forward.experts.{{}}.{w}" for x, w in _W.items()},
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b": "feed_forward.expert_bias",
}


def negative_logarithm(value: Any) -> Any:
    """A -> A_log."""
    return (-value.float()).log()


def with_middle(value: Any) -> Any:
    """Taps [channels, width] -> [channels, 1, width]."""
    return value[:, None] if value.ndim == 2 else value


def convolved(_: GgufHeader) -> Mapping[str, Change]:
    """Of short convolutions."""
    return {"shortconv.conv.weight": with_middle}


def delta_changes(h: GgufHeader) -> Mapping[str, Change]:
    """Of delta nets whose value heads are grouped as in the checkpoint."""
    return {"ssm_a": negative_logarithm, "ssm_conv1d.weight": with_middle}


def tiled_delta_changes(h: GgufHeader) -> Mapping[str, Change]:
    """Of delta nets whose value heads lie [head of the group][group]: they become
    [group][head of the group]."""
    groups, heads = h.count("ssm.group_count"), h.count("ssm.time_step_rank")
    keys = 2 * groups * h.count("ssm.state_size")

    def rows(value: Any, first: int = 0) -> Any:
        whole = value.clone()
        tiled = value[first:].reshape(heads // groups, groups, -1, *value.shape[1:])
        whole[first:] = tiled.swapaxes(0, 1).reshape(value[first:].shape)
        return whole

    return {
        "attn_qkv.weight": lambda value: rows(value, keys),
        **{f"{name}.weight": rows for name in ("attn_gate", "ssm_beta", "ssm_alpha")},
        "ssm_dt.bias": rows,
        "ssm_a": lambda value: rows(negative_logarithm(value)),
        "ssm_conv1d.weight": lambda value: with_middle(rows(value, keys)),
        "ssm_out.weight": lambda value: rows(value.T).T.contiguous(),
    }


def _layer_types(h: GgufHeader, other: str) -> list[str]:
    attends = layers_with(h, "attn_k.weight")
    return ["full_attention" if one else other for one in attends]


def delta_net(h: GgufHeader) -> dict[str, Any]:
    """Gated delta nets with some full attention, rotated in part; experts where there are any."""
    heads, rotated = h.count("ssm.time_step_rank"), h.count("rope.dimension_count")
    kinds = _layer_types(h, "linear_attention")
    moe = {}
    if h.own("expert_count"):
        moe = {
            **experts(h),
            "shared_expert_intermediate_size": h.count("expert_shared_feed_forward_length"),
            "norm_topk_prob": True,
        }
    return {
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "linear_num_key_heads": h.count("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": h.count("ssm.state_size"),
        "linear_value_head_dim": h.count("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": h.count("ssm.conv_kernel"),
        "partial_rotary_factor": rotated / h.count("attention.key_length"),
        "attention_bias": any(name.endswith("attn_q.bias") for name in h.tensors),
        **moe,
    }


def lfm2(h: GgufHeader) -> dict[str, Any]:
    """Short convolutions and attention; the header lists KV heads by layer, 0 for the former."""
    kv_heads = h.own("attention.head_count_kv")
    most = max(kv_heads) if isinstance(kv_heads, list) and kv_heads else kv_heads
    return {
        "num_key_value_heads": most,
        "head_dim": h.count("embedding_length") // h.count("attention.head_count"),
        "layer_types": _layer_types(h, "conv"),
        "conv_L_cache": h.count("shortconv.l_cache"),
        "conv_bias": "blk.0.shortconv.conv.bias" in h.tensors,
        "norm_eps": h.own("attention.layer_norm_rms_epsilon", 1e-5),
        "block_auto_adjust_ff_dim": False,
        "tie_embedding": "output.weight" not in h.tensors,
    }


def lfm2_moe(h: GgufHeader) -> dict[str, Any]:
    """LFM2 with experts, chosen with a correction, behind some dense layers."""
    return {
        **lfm2(h),
        **experts(h),
        "num_dense_layers": h.own("leading_dense_block_count", 0),
        "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in h.tensors),
        "norm_topk_prob": True,
        "routed_scaling_factor": h.own("expert_weights_scale", 1.0),
    }
