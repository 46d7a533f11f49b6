"""Granite in GGUF files: dense, with experts, and hybrids with Mamba 2; Bamba, which llama.cpp
takes for one of these, and MiniCPM, which has the same multipliers."""

from __future__ import annotations

from typing import Any

from radixlm.arch.families.gguf_kind import PRE, Kind, Kinds, experts, layers_with, rows_of
from radixlm.arch.families.gguf_mamba import (
    PARALLEL,
    head_changes,
    mixer_kinds,
    prefixed_keys,
    scan,
)
from radixlm.arch.gguf import GgufHeader

_GRANITE_MOE = {
    **PRE,
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **{f"ffn_{x}_exps": f"block_sparse_moe.experts.{{}}.{x}_proj" for x in ("gate", "up", "down")},
    **{f"ffn_{x}_shexp": f"shared_mlp.{x}_proj" for x in ("gate", "up")},
    "ffn_down_shexp": "shared_mlp.output_linear",
}
# dense layers of hybrids have the names of shared experts
_HYBRID_DENSE = {
    "ffn_gate": "shared_mlp.gate_proj",
    "ffn_up": "shared_mlp.up_proj",
    "ffn_down": "shared_mlp.output_linear",
}


def _granite(h: GgufHeader) -> dict[str, Any]:
    keys = {"attention": "attention.scale", "embedding": "embedding_scale"}
    keys["residual"] = "residual_scale"
    return {
        "logits_scaling": h.own("logit_scale", 1.0),
        **{f"{name}_multiplier": h.own(key) for name, key in keys.items()},
    }


def _granite_moe(h: GgufHeader) -> dict[str, Any]:
    shared = h.own("expert_shared_feed_forward_length", 0)
    return {**_granite(h), **experts(h), "shared_intermediate_size": shared}


def _minicpm(h: GgufHeader) -> dict[str, Any]:
    """As Granite, with the usual scale of scores."""
    return {**_granite(h), "attention_multiplier": _head_dim(h) ** -0.5}


def _hybrid(h: GgufHeader) -> Kind:
    """Bamba has none of Granite's multipliers, and rotates; Granite's hybrids do not."""
    if h.own("embedding_scale") is None and h.own("attention.scale") is None:
        return Kind(
            "BambaForCausalLM",
            "bamba",
            PARALLEL,
            is_permuted=True,
            more=_bamba,
            changes=head_changes,
        )
    has_experts = bool(h.own("expert_count"))
    return Kind(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        {**_GRANITE_MOE, **scan("mamba", True), **({} if has_experts else _HYBRID_DENSE)},
        is_permuted=True,
        more=_granite_hybrid,
        changes=head_changes,
    )


def _granite_hybrid(h: GgufHeader) -> dict[str, Any]:
    shared = h.own("expert_shared_feed_forward_length") or h.count("feed_forward_length")
    return {
        **_granite(h),
        **(experts(h) if h.own("expert_count") else {"num_experts": 0}),
        **prefixed_keys(h),
        "shared_intermediate_size": shared,
        "layer_types": mixer_kinds(h, "mamba", "attention"),
        "position_embedding_type": "rope" if h.own("rope.scaling.finetuned") else "nope",
    }


def _bamba(h: GgufHeader) -> dict[str, Any]:
    attends = layers_with(h, "attn_k.weight")
    share = h.count("rope.dimension_count") / _head_dim(h)
    rope = {"rope_type": "default", "rope_theta": h.own("rope.freq_base", 10000.0)}
    return {
        **prefixed_keys(h),
        "attn_layer_indices": [i for i, one in enumerate(attends) if one],
        "head_dim": _head_dim(h),
        "rope_scaling": None,
        "rope_theta": None,
        "rope_parameters": {**rope, "partial_rotary_factor": share},
    }


def _head_dim(h: GgufHeader) -> int:
    heads = h.count("attention.head_count")
    return (rows_of(h, "attn_q") or h.count("embedding_length")) // heads


KINDS: Kinds = {
    "granite": Kind("GraniteForCausalLM", "granite", PRE, is_permuted=True, more=_granite),
    "granitemoe": Kind(
        "GraniteMoeSharedForCausalLM",
        "granitemoeshared",
        _GRANITE_MOE,
        is_permuted=True,
        more=_granite_moe,
    ),
    "granitehybrid": _hybrid,
    "minicpm": Kind("GraniteForCausalLM", "granite", PRE, is_permuted=True, more=_minicpm),
}
