"""Latent attention to what an index chooses, on several residual streams: HY 4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.families.builders import family, mlp, moe, plain
from radixlm.arch.families.deepseek import latent
from radixlm.arch.names import LAYER, AnyOf, Names
from radixlm.arch.spec import Decoder, Index, LatentAttention, Mlp, Norm, Streams

_PARTS = ("fn", "base", "scale")
_HEAD = "model.hc_head.hc_"
_STREAMS: Names = {
    **{f"streams1.{part}": f"{LAYER}attn_hc.{part}" for part in _PARTS},
    **{f"streams2.{part}": f"{LAYER}ffn_hc.{part}" for part in _PARTS},
    **{f"streams.end_weights.{part}": _HEAD + part for part in _PARTS},
}
_OLD, _MLP, _ATTENTION = LAYER + "hc_pre.hc_", LAYER + "mlp.", LAYER + "self_attn."
_SHARED = _MLP + "shared_experts."
_HY_V4: Names = {  # transformers' names after those of the published checkpoint
    **{
        f"streams1.{part}": AnyOf(f"{_OLD}attn_layer.hc_{part}", f"{LAYER}attn_hc.{part}")
        for part in _PARTS
    },
    **{
        f"streams2.{part}": AnyOf(f"{_OLD}mlp_layer.hc_{part}", f"{LAYER}ffn_hc.{part}")
        for part in _PARTS
    },
    **{
        f"streams.end_weights.{part}": AnyOf(f"model.hc_pre.hc_head.hc_head_{part}", _HEAD + part)
        for part in _PARTS
    },
    "mixer.sinks": AnyOf(_ATTENTION + "learnable_sink_param", _ATTENTION + "sinks"),
    "mixer.gate": AnyOf(_ATTENTION + "linear_gate", _ATTENTION + "gate_proj"),
    "ffn.up": AnyOf(
        *((_MLP + gate, _MLP + "up_proj") for gate in ("gate_proj", "linear_gate")),
    ),
    "moe.shared.up": AnyOf(
        *((_SHARED + gate, _SHARED + "up_proj") for gate in ("gate_proj", "linear_gate")),
    ),
}


def index_of(c: Config, norm: Norm, **fields: bool) -> Index:
    """The index of config.index_n_heads, index_head_dim and index_topk."""
    for key in ("index_n_heads", "index_head_dim", "index_topk", "q_lora_rank"):
        if not isinstance(c.get(key), int) or c.get(key) < 1:
            raise c.error(key, f"= {c.get(key)!r} must be a positive integer")
    if c.index_head_dim < c.qk_rope_head_dim:
        raise c.error("index_head_dim", "must hold 'qk_rope_head_dim'")
    return Index(c.index_n_heads, c.index_head_dim, c.index_topk, norm=norm, **fields)


def limit_of(c: Config) -> float:
    """config.swiglu_limit; CheckpointError for one that would close every gate."""
    if not c.swiglu_limit > 0:
        raise c.error("swiglu_limit", f"= {c.swiglu_limit!r} must be above 0")
    return float(c.swiglu_limit)


def streams_of(c: Config, **fields: Any) -> Streams:
    """The residual streams of config.hc_mult."""
    if not c.hc_mult > 0:
        raise c.error("hc_mult", f"= {c.hc_mult!r} must be a positive integer")
    return Streams(c.hc_mult, Norm(c.rms_norm_eps, affine=False), float(c.hc_eps), **fields)


def kinds_of(c: Config, key: str, *known: str) -> list[str]:
    """The list config[key], one of the ``known`` words a layer."""
    kinds = c.get(key)
    if not isinstance(kinds, list) or len(kinds) != c.num_hidden_layers:
        raise c.error(key, f"must have an entry for each of the {c.num_hidden_layers} layers")
    strange = next((kind for kind in kinds if kind not in known), None)
    if strange is not None:
        raise c.error(key, f"has the unknown type {strange!r}; known: {', '.join(known)}")
    return kinds


@family("HYV4ForCausalLM")
def hy_v4(c: Config) -> Decoder:
    """Layers may share the choice of the last one with an index; the routed experts are limited."""
    c.refuse("hidden_act", "silu", "swish")
    count, limit = c.num_hidden_layers, limit_of(c)
    whole = replace(latent(c, interleaved=False), sinks=True, gate="channel")
    norm = Norm(c.rms_norm_eps, "layer", bias=True)
    index = index_of(c, norm, interleaved=False, turns_last=True)
    sharing = ["shared" if i and (i - 1) % 4 else "full" for i in range(count)]
    c = c.replace(
        indexer_types=c.indexer_types or sharing,
        mlp_layer_types=c.mlp_layer_types or ["dense"] + ["sparse"] * (count - 1),
    )
    shares = kinds_of(c, "indexer_types", "full", "shared")
    if shares[0] == "shared":
        raise c.error("indexer_types", "has a shared choice at the first layer")
    shared = c.moe_intermediate_size * c.n_shared_experts
    sparse = moe(
        c,
        score="sigmoid",
        correction=True,
        renorm=c.norm_topk_prob,
        scale=c.routed_scaling_factor,
        groups=(c.n_group, c.topk_group),
        shared=Mlp(shared, "silu") if shared else None,
        limit=limit,
    )

    def mixer(i: int) -> LatentAttention:
        return replace(whole, index=replace(index, is_shared=shares[i] == "shared"))

    has_experts = kinds_of(c, "mlp_layer_types", "dense", "sparse")
    streams = streams_of(c, gain=c.hc_magnitude)
    return plain(
        c,
        mixer,
        lambda i: sparse if has_experts[i] == "sparse" else mlp(c),
        names=_HY_V4,
        streams=streams,
    )
