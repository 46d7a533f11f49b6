"""Models on several residual streams whose attention reads what is summed up of many tokens: the
text model of GLM 5.3."""

from __future__ import annotations

from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.families.builders import family, moe, plain
from radixlm.arch.families.linear import KIMI
from radixlm.arch.families.sparse import (
    STREAMS,
    index_of,
    kinds_of,
    limit_of,
    streams_of,
)
from radixlm.arch.names import LAYER, AnyOf, Names
from radixlm.arch.spec import Decoder, DeltaNet, LatentAttention, Mlp, Norm

_INDEX = LAYER + "self_attn.indexer.index_kpool_compress_"


def either(*tables: Names) -> Names:
    """A table with the spellings of all tables, in their order."""
    roles = dict.fromkeys(role for table in tables for role in table)
    return {
        role: AnyOf(*dict.fromkeys(table[role] for table in tables if role in table))
        for role in roles
    }


def old_streams(layer: str, head: str) -> Names:
    """Where published checkpoints keep what joins branches to the streams."""
    parts = ("fn", "base", "scale")
    names = {f"streams1.{part}": f"{layer}hc_attn_{part}" for part in parts}
    names |= {f"streams2.{part}": f"{layer}hc_ffn_{part}" for part in parts}
    return names | {f"streams.end_weights.{part}": f"{head}hc_head_{part}" for part in parts}


_GLM5_NEXT: Names = {
    **KIMI,
    **either(STREAMS, old_streams(LAYER, "model.")),
    "mixer.index.share": _INDEX + "gate",
    "mixer.index.share_of_place": _INDEX + "ape",
}


@family("Glm5NextForCausalLM")
def glm5_next(c: Config) -> Decoder:
    """Delta nets that forget by channel, and latent attention without positions to pools of tokens
    that an index chooses."""
    c.refuse("hidden_act", "silu", "swish")
    c, limit = _glm5_keys(c), limit_of(c)
    norm, heads, dim = Norm(c.rms_norm_eps), c.linear_num_heads, c.linear_head_dim
    state = DeltaNet(
        heads,
        heads,
        dim,
        dim,
        c.linear_conv_kernel_dim,
        norm,
        gate_act="sigmoid",
        channel_decay=True,
        decay_floor=float(c.get("linear_lower_bound", 0.0)),
    )
    kinds, shares = c.layer_types, c.indexer_types
    key_norm = Norm(1e-6, "layer", bias=True)

    def mixer(i: int) -> LatentAttention | DeltaNet:
        if kinds[i] == "linear_attention":
            return state
        is_shared = shares[i] == "shared"
        index = index_of(c, key_norm, interleaved=False, pool=c.index_kpool, is_shared=is_shared)
        return LatentAttention(
            c.num_attention_heads,
            c.qk_nope_head_dim,
            0,
            c.v_head_dim,
            c.kv_lora_rank,
            c.q_lora_rank,
            None,
            norm,
            c.qk_nope_head_dim**-0.5,
            c.attention_bias,
            index,
        )

    shared = c.moe_intermediate_size * c.n_shared_experts
    sparse = moe(
        c,
        score="sigmoid",
        correction=True,
        renorm=c.norm_topk_prob,
        scale=c.routed_scaling_factor,
        groups=(c.n_group, c.topk_group),
        shared=Mlp(shared, "silu", limit=limit) if shared else None,
        limit=limit,
    )
    dense, has_experts = Mlp(c.intermediate_size, "silu", limit=limit), c.mlp_layer_types
    return plain(
        c,
        mixer,
        lambda i: sparse if has_experts[i] == "sparse" else dense,
        names=_GLM5_NEXT,
        streams=streams_of(c, rounds=c.hc_sinkhorn_iters, ends="mean"),
    )


def _glm5_keys(c: Config) -> Config:
    """The config with its published keys under the names that its class gives them; CheckpointError
    for a layer that shares a choice which is not there, and for pools that cannot be."""
    count, own = c.num_hidden_layers, c.get("linear_attn_config") or {}
    held = {"linear_head_dim": "head_dim", "linear_num_heads": "num_heads"}
    held |= {"linear_conv_kernel_dim": "short_conv_kernel_size"}
    held |= {"linear_lower_bound": "gate_lower_bound"}
    values: dict[str, Any] = {ours: own[key] for ours, key in held.items() if key in own}
    if own and own.get("safe_gate", True) and values.get("linear_lower_bound", 0) is None:
        values["linear_lower_bound"] = -5.0
    kinds = c.layer_types or ["indexed_attention" if i % 4 == 3 else "" for i in range(count)]
    values["layer_types"] = kinds = [_GLM5_KINDS.get(kind, kind) for kind in kinds]
    sparse = ["dense"] * min(3, count) + ["sparse"] * (count - 3)
    values["mlp_layer_types"] = c.mlp_layer_types or sparse
    values["indexer_types"] = shares = c.indexer_types or _glm5_shares(c)
    c = c.replace(**values)
    kinds_of(c, "layer_types", "indexed_attention", "linear_attention")
    kinds_of(c, "mlp_layer_types", "dense", "sparse")
    kinds_of(c, "indexer_types", "full", "shared")
    for i in range(count):
        behind = i and kinds[i - 1] == "indexed_attention" and shares[i - 1] == "full"
        if kinds[i] == "indexed_attention" and shares[i] == "shared" and not behind:
            raise c.error("indexer_types", f"layer {i} shares a choice that none makes before it")
    if not isinstance(c.index_kpool, int) or c.index_kpool < 1 or c.index_topk % c.index_kpool:
        raise c.error("index_kpool", f"= {c.index_kpool!r} must divide 'index_topk'")
    if c.index_kpool > 1:  # without, the first tokens would see nothing
        c.refuse("index_kpool_always_select_tail", True)
    c.refuse("qk_rope_head_dim", 0)
    floor = c.get("linear_lower_bound")
    if floor is not None and not floor < 0:
        raise c.error("linear_lower_bound", f"= {floor!r} must be below 0")
    return c


_GLM5_KINDS = {"full_attention": "indexed_attention", "": "linear_attention"}


def _glm5_shares(c: Config) -> list[str]:
    """Which layers share the choice of the one before, by a pattern or every so many."""
    pattern = c.get("index_topk_pattern")
    if pattern is not None:
        return [{"F": "full", "S": "shared"}.get(one, one) for one in pattern]
    every, offset = max(c.get("index_topk_freq", 1), 1), c.get("index_skip_topk_offset", 2)
    turns = (max(i - offset + 1, 0) % every for i in range(c.num_hidden_layers))
    return ["shared" if turn else "full" for turn in turns]
