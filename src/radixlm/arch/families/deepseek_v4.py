"""DeepSeek V4 and the text model of GLM 5 Next: hyper-connections, and attention to compressed runs
of tokens."""

from __future__ import annotations

from typing import Any

from radixlm.arch import spec
from radixlm.arch.config import Config
from radixlm.arch.families.builders import (
    activation,
    build_decoder,
    corrected_moe,
    moe,
    rope,
)
from radixlm.arch.families.linear import KIMI, channel_delta
from radixlm.arch.families.sparse_attention import (
    STREAMS,
    index_of,
    kinds_of,
    limit_of,
    positive,
    streams_of,
)
from radixlm.arch.names import LAYER, AnyOf, Names
from radixlm.base.record import replace

_INDEX = LAYER + "self_attn.indexer.index_kpool_compress_"


def either(*tables: Names) -> Names:
    """A table with the alternatives of all ``tables``, in their order."""
    roles = dict.fromkeys(role for table in tables for role in table)
    return {
        role: AnyOf(*dict.fromkeys(table[role] for table in tables if role in table))
        for role in roles
    }


def old_streams(layer: str, head: str) -> Names:
    """The names that published checkpoints give to the hyper-connections."""
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


def glm5_next(c: Config) -> spec.Decoder:
    """KDA delta nets, and latent attention without positions to pools of tokens that an indexer
    chooses."""
    c, limit = _glm5_keys(c), limit_of(c)
    norm = spec.Norm(c.rms_norm_eps)
    fades = channel_delta(c, c.linear_num_heads, c.linear_head_dim, c.linear_conv_kernel_dim)
    state = replace(fades, decay_floor=float(c.get("linear_lower_bound", 0.0)))
    kinds, shares = c.layer_types, c.indexer_types
    key_norm = spec.Norm(1e-6, "layer", bias=True)

    def mixer(i: int) -> spec.LatentAttention | spec.DeltaNet:
        if kinds[i] == "linear_attention":
            return state
        is_shared = shares[i] == "shared"
        index = index_of(c, key_norm, interleaved=False, pool=c.index_kpool, is_shared=is_shared)
        return spec.LatentAttention(
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

    act, has_experts = activation(c), c.mlp_layer_types
    shared = spec.Mlp(c.moe_intermediate_size * c.n_shared_experts, act, limit=limit)
    # hidden_act is not that of the routed experts
    sparse = corrected_moe(c, shared, act="silu", limit=limit)
    dense = spec.Mlp(c.intermediate_size, act, limit=limit)
    return build_decoder(
        c,
        mixer,
        lambda i: sparse if has_experts[i] == "sparse" else dense,
        names=_GLM5_NEXT,
        streams=streams_of(c, rounds=c.hc_sinkhorn_iters, ends="mean"),
    )


def _glm5_keys(c: Config) -> Config:
    """The config with its published keys under the class's names. CheckpointError for a layer that
    reuses a choice before there is one, and for invalid pools."""
    count, own = c.num_hidden_layers, c.get("linear_attn_config") or {}
    held = {"linear_head_dim": "head_dim", "linear_num_heads": "num_heads"}
    held |= {"linear_conv_kernel_dim": "short_conv_kernel_size"}
    held |= {"linear_lower_bound": "gate_lower_bound"}
    values: dict[str, Any] = {new_key: own[key] for new_key, key in held.items() if key in own}
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
    """Which layers reuse the choice of the layer before, by a pattern or a period."""
    pattern = c.get("index_topk_pattern")
    if pattern is not None:
        return [{"F": "full", "S": "shared"}.get(one, one) for one in pattern]
    every, offset = max(c.get("index_topk_freq", 1), 1), c.get("index_skip_topk_offset", 2)
    shares = (max(i - offset + 1, 0) % every for i in range(c.num_hidden_layers))
    return ["shared" if one else "full" for one in shares]


def _v4_names(layer: str, attn: str, ffn: str, parts: dict[str, str]) -> Names:
    """The tensors of a layer, under the names in ``parts``."""
    own = {role: f"{layer}{attn}.{parts[stored]}" for role, stored in _V4_PARTS.items()}
    sums = f"{layer}{attn}.compressor."
    index = f"{layer}{attn}.{parts['index']}"
    for role, stored in _V4_SUMS.items():
        own[f"mixer.sums.{role}"] = sums + parts[stored]
        own[f"mixer.index.sums.{role}"] = index + parts["index_sums"] + parts[stored]
    own |= {"mixer.index.q": index + parts["wq_b"], "mixer.index.weights": index + parts["weights"]}
    shared, gate = f"{layer}{ffn}.shared_experts.", f"{layer}{ffn}.gate"
    names: dict[str, Any] = {
        **own,
        "norm1": layer + parts["attn_norm"],
        "norm2": layer + parts["ffn_norm"],
        "moe.router": gate,
        "moe.correction": f"{gate}.{parts['correction']}",
        "moe.experts_of_token": gate + ".tid2eid",
        "moe.shared.up": (shared + parts["w1"], shared + parts["w3"]),
        "moe.shared.down": shared + parts["w2"],
    }
    return names


_V4_PARTS = {"mixer.q_a": "wq_a", "mixer.q_a_norm": "q_norm", "mixer.q_b": "wq_b"}
_V4_PARTS |= {"mixer.kv": "wkv", "mixer.kv_norm": "kv_norm", "mixer.o_a": "wo_a"}
_V4_PARTS |= {"mixer.o_b": "wo_b", "mixer.sinks": "sink"}
_V4_SUMS = {"kv": "wkv", "share": "wgate", "share_of_place": "ape", "norm": "norm"}
_V4_SAME = ("wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "wo_a", "wo_b", "wgate", "ape", "norm")
_V4_OURS = {one: one for one in (*_V4_SAME, "attn_norm", "ffn_norm", "w1", "w2", "w3")} | {
    "sink": "attn_sink",
    "correction": "bias",
    "weights": "weights_proj",
    "index": "indexer.",
    "index_sums": "compressor.",
}
_V4_THEIRS = {
    "wq_a": "q_a_proj",
    "q_norm": "q_a_norm",
    "wq_b": "q_b_proj",
    "wkv": "kv_proj",
    "kv_norm": "kv_norm",
    "wo_a": "o_a_proj",
    "wo_b": "o_b_proj",
    "sink": "sinks",
    "wgate": "gate_proj",
    "ape": "position_bias",
    "norm": "kv_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "correction": "e_score_correction_bias",
    "weights": "scorer.weights_proj",
    "index": "compressor.indexer.",
    "index_sums": "",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}
_BARE = LAYER.removeprefix("model.")
_V4: Names = {
    **either(
        _v4_names(_BARE, "attn", "ffn", _V4_OURS),
        _v4_names(LAYER, "attn", "ffn", _V4_OURS),
        _v4_names(LAYER, "attn", "ffn", {**_V4_OURS, "kv_norm": "norm"}),
        _v4_names(LAYER, "self_attn", "mlp", _V4_THEIRS),
    ),
    **either(old_streams(_BARE, ""), old_streams(LAYER, "model."), STREAMS),
    "moe.up": AnyOf(
        *((f"{at}ffn.experts.{{e}}.w1", f"{at}ffn.experts.{{e}}.w3") for at in (_BARE, LAYER)),
        LAYER + "mlp.experts.gate_up_proj",
    ),
    "moe.down": AnyOf(
        *(f"{at}ffn.experts.{{e}}.w2" for at in (_BARE, LAYER)), LAYER + "mlp.experts.down_proj"
    ),
    "embed": AnyOf("model.embed_tokens", "embed"),
    "norm": AnyOf("model.norm", "norm"),
    "head": AnyOf("lm_head", "head"),
}
_V4_RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
_V4_KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention"}
_V4_KINDS |= {128: "heavily_compressed_attention"}


def deepseek_v4(c: Config) -> spec.Decoder:
    """Attention to a window and to compressed entries of earlier tokens, all or those that an
    indexer chooses. The first layers look up their experts by token id."""
    c.refuse("scoring_func", "sqrtsoftplus", "softmax", "sigmoid")
    c, limit, act = _v4_keys(c), limit_of(c), activation(c)
    positive(c, "sliding_window", "q_lora_rank", "o_groups", "o_lora_rank", "head_dim")
    kinds, tables, norm = c.layer_types, c.mlp_layer_types, spec.Norm(c.rms_norm_eps)
    if c.num_attention_heads * c.head_dim % c.o_groups:
        raise c.error("o_groups", "must divide the channels of all heads")

    def mixer(i: int) -> spec.CompressedSparseAttention:
        sums = _v4_sums(c, kinds[i])
        return spec.CompressedSparseAttention(
            c.num_attention_heads,
            c.head_dim,
            _v4_rope(c, "compress" if sums else "main", sums),
            c.sliding_window,
            c.q_lora_rank,
            norm,
            c.o_groups,
            c.o_lora_rank,
            sums,
        )

    sparse = moe(
        c,
        act=act,
        score=c.scoring_func,
        renorm=True,
        scale=c.routed_scaling_factor,
        shared=spec.Mlp(c.moe_intermediate_size, act, bias=c.mlp_bias, limit=limit),
        limit=limit,
    )
    by_token = replace(sparse, hash_vocab=c.vocab_size)
    chosen = replace(sparse, correction=True)
    return build_decoder(
        c,
        mixer,
        lambda i: by_token if tables[i] == "hash_moe" else chosen,
        names=_V4,
        streams=streams_of(c, rounds=c.hc_sinkhorn_iters),
    )


def _v4_keys(c: Config) -> Config:
    """The config with older keys under the class's names."""
    count, ratios = c.num_hidden_layers, c.get("compress_ratios")
    kinds = c.layer_types
    if kinds is None and ratios is not None:
        kinds = [_V4_KINDS.get(ratio, f"{ratio} tokens in one") for ratio in ratios]
    if kinds is None:
        is_fine = [i >= 2 and i % 2 for i in range(count)]
        kinds = [_V4_KINDS[4] if one else _V4_KINDS[128] for one in is_fine]
    hashed = c.get("num_hash_layers", 3)
    tables = c.mlp_layer_types or ["hash_moe" if i < hashed else "moe" for i in range(count)]
    rates = {**_V4_RATES, **c.get("compress_rates", {})}
    for kind, key in zip(_V4_RATES, ("compress_rate_csa", "compress_rate_hca"), strict=True):
        rates[kind] = c.get(key, rates[kind])
        if not isinstance(rates[kind], int) or rates[kind] < 1:
            raise c.error("compress_rates", f"{rates[kind]!r} must be a positive integer")
    rope_dim = c.get("qk_rope_head_dim")
    share = 64 / 512 if rope_dim is None else rope_dim / c.head_dim
    c = c.replace(
        layer_types=list(kinds[:count]),
        mlp_layer_types=list(tables[:count]),
        compress_rates=rates,
        partial_rotary_factor=c.get("partial_rotary_factor", share),
    )
    kinds_of(c, "layer_types", *_V4_KINDS.values())
    kinds_of(c, "mlp_layer_types", "hash_moe", "moe")
    return c


def _v4_sums(c: Config, kind: str) -> spec.KVCompression | None:
    """The compression of a layer of this kind."""
    if kind == "sliding_attention":
        return None
    if kind == "heavily_compressed_attention":
        return spec.KVCompression(c.compress_rates[kind], overlaps=False)
    positive(c, "index_n_heads", "index_head_dim", "index_topk")
    sizes = (c.index_n_heads, c.index_head_dim, c.index_topk)
    return spec.KVCompression(c.compress_rates[kind], True, *sizes)


def _v4_rope(c: Config, kind: str, sums: spec.KVCompression | None) -> spec.Rope:
    """The rotation of layers with compression ("compress") and of the others ("main")."""
    params: dict[str, Any] = c.rope_parameters
    if isinstance(params.get("main"), dict) and isinstance(params.get("compress"), dict):
        p = {**params[kind]}
    elif kind == "main":
        p = {"rope_type": "default", "rope_theta": c.rope_theta}
    else:
        p = {**params, "rope_theta": c.compress_rope_theta}
        if p["rope_type"] == "yarn":  # angles alone change, not their sizes
            p.setdefault("attention_factor", 1.0)
    p["partial_rotary_factor"] = p.get("partial_rotary_factor") or c.partial_rotary_factor
    made = rope(c.replace(rope_parameters=p), c.head_dim, partial=True, interleaved=True)
    if made.depends_on_length:
        raise c.error("rope_parameters", "of sums may not depend on the length of the text")
    if sums is not None and sums.heads and sums.dim < made.dim:
        raise c.error("index_head_dim", "must be at least the rotated channels")
    return made
