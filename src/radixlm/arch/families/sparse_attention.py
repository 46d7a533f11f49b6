"""Sparse attention: HY 4 (latent, with hyper-connections), dots 3 (latent), and MiniMax M3, whose
indexer chooses blocks of tokens."""

from __future__ import annotations

from typing import Any

from radixlm.arch import spec
from radixlm.arch.config import Config
from radixlm.arch.families import builders as b
from radixlm.arch.families.deepseek import latent
from radixlm.arch.names import LAYER, AnyOf, Named, Names
from radixlm.arch.recipes import RankScaled
from radixlm.base.record import replace

_PARTS = ("fn", "base", "scale")
_HEAD = "model.hc_head.hc_"
STREAMS: Names = {
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
        f"streams.end_weights.{part}": AnyOf(
            f"model.hc_pre.hc_head.hc_head_{part}",
            f"model.hc_head.hc_pre.hc_head_{part}",  # as transformers saves it
            _HEAD + part,
        )
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


def positive(c: Config, *keys: str) -> None:
    """CheckpointError unless all of them are positive integers."""
    for key in keys:
        value = c.get(key)
        if not isinstance(value, int) or value < 1:
            raise c.error(key, f"= {value!r} must be a positive integer")


def index_of(c: Config, norm: spec.Norm, **fields: Any) -> spec.Indexer:
    """The indexer of config.index_n_heads, index_head_dim and index_topk."""
    positive(c, "index_n_heads", "index_head_dim", "index_topk", "q_lora_rank")
    if c.index_head_dim < c.qk_rope_head_dim:
        raise c.error("index_head_dim", "must hold 'qk_rope_head_dim'")
    return spec.Indexer(c.index_n_heads, c.index_head_dim, c.index_topk, norm=norm, **fields)


def limit_of(c: Config) -> float:
    """config.swiglu_limit; CheckpointError for one that would close every gate."""
    if not c.swiglu_limit > 0:
        raise c.error("swiglu_limit", f"= {c.swiglu_limit!r} must be above 0")
    return float(c.swiglu_limit)


def streams_of(c: Config, **fields: Any) -> spec.HyperConnections:
    """The hyper-connections of config.hc_mult."""
    positive(c, "hc_mult")
    return spec.HyperConnections(
        c.hc_mult, spec.Norm(c.rms_norm_eps, affine=False), float(c.hc_eps), **fields
    )


def kinds_of(c: Config, key: str, *known: str) -> list[str]:
    """The list config[key], with one of the ``known`` names for each layer."""
    kinds = c.get(key)
    if not isinstance(kinds, list) or len(kinds) != c.num_hidden_layers:
        raise c.error(key, f"must have an entry for each of the {c.num_hidden_layers} layers")
    strange = next((kind for kind in kinds if kind not in known), None)
    if strange is not None:
        raise c.error(key, f"has the unknown type {strange!r}; known: {', '.join(known)}")
    return kinds


def hy_v4(c: Config) -> spec.Decoder:
    """Layers may reuse the choice of the last layer with an indexer; routed experts are clamped."""
    count, limit = c.num_hidden_layers, limit_of(c)
    whole = replace(latent(c, interleaved=False), sinks=True, gate="channel")
    norm = spec.Norm(c.rms_norm_eps, "layer", bias=True)
    index = index_of(c, norm, interleaved=False, rope_on_tail=True)
    sharing = ["shared" if i and (i - 1) % 4 else "full" for i in range(count)]
    c = c.replace(
        indexer_types=c.indexer_types or sharing,
        mlp_layer_types=c.mlp_layer_types or ["dense"] + ["sparse"] * (count - 1),
    )
    shares = kinds_of(c, "indexer_types", "full", "shared")
    if shares[0] == "shared":
        raise c.error("indexer_types", "has a shared choice at the first layer")
    shared = spec.Mlp(c.moe_intermediate_size * c.n_shared_experts, b.activation(c))
    # hidden_act is not that of the routed experts
    sparse = b.corrected_moe(c, shared, act="silu", limit=limit)

    def mixer(i: int) -> spec.LatentAttention:
        return replace(whole, indexer=replace(index, is_shared=shares[i] == "shared"))

    has_experts = kinds_of(c, "mlp_layer_types", "dense", "sparse")
    streams = streams_of(c, gain=c.hc_magnitude)
    return b.build_decoder(
        c,
        mixer,
        lambda i: sparse if has_experts[i] == "sparse" else b.mlp(c),
        names=_HY_V4,
        streams=streams,
    )


_DOTS3_KINDS = ("indexed_attention", "full_attention", "sliding_attention")
_DOTS3_LAYER = ("num_attention_heads", "num_key_value_heads", "q_lora_rank", "kv_lora_rank")
_DOTS3_DIMS = ("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_DOTS3_SLIDING = {  # of layers with a window, where the config does not say
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "head_dim": 256,
    "qk_nope_head_dim": 192,
    "v_head_dim": 128,
}


def dots3_note(c: Config) -> spec.Decoder:
    """Window layers have their own latent sizes; latents are scaled to the width."""
    kinds, windows = _dots3_kinds(c), c.sliding_window or c.get("sliding_window_size", 512)
    of_layer, norm = _dots3_layers(c, kinds), spec.Norm(c.rms_norm_eps)

    def mixer(i: int) -> spec.LatentAttention:
        own = c.replace(**of_layer[i], rope_parameters=_dots3_rope(c, kinds[i]))
        if own.num_attention_heads != own.num_key_value_heads or not own.q_lora_rank:
            raise c.error("num_key_value_heads", "must be the heads, and 'q_lora_rank' be given")
        made = replace(latent(own, interleaved=True), norm=norm, rope_norm=norm, gate="head")
        made = replace(made, scale=(made.nope_dim + made.rope_dim) ** -0.5)
        if kinds[i] == "sliding_attention":
            return replace(made, window=windows)
        is_chosen = kinds[i] == "indexed_attention"
        layer_norm = spec.Norm(1e-6, "layer", bias=True)
        return (
            replace(made, indexer=index_of(own, layer_norm, interleaved=True))
            if is_chosen
            else made
        )

    shared = c.get("moe_shared_expert_intermediate_size", c.shared_experts_intermediate_size)
    sparse = b.corrected_moe(c, spec.Mlp(c.n_shared_experts * shared, b.activation(c)))
    scaled = RankScaled(c.hidden_size)
    names: Names = {
        "mixer.gate": _ATTENTION + "g_proj",
        "mixer.k_rope_norm": _ATTENTION + "k_rope_only_layernorm",
        "mixer.q_a_norm": Named((_ATTENTION + "q_a_layernorm",), scaled),
        "mixer.kv_a_norm": Named((_ATTENTION + "kv_a_layernorm",), scaled),
    }
    has_experts = _dots3_sparse(c)
    return b.build_decoder(c, mixer, lambda i: sparse if has_experts[i] else b.mlp(c), names=names)


def _dots3_kinds(c: Config) -> list[str]:
    """The type of every layer; published configs call layers with an indexer "full_attention"."""
    use_index = c.get("use_dsa", None if c.is_explicit("per_layer_config") else True)
    full = "full_attention" if use_index is False else "indexed_attention"
    slides = c.get("use_sliding_window", True)
    if c.layer_types is None:
        is_full = [not slides or i < 2 or i % 4 == 1 for i in range(c.num_hidden_layers)]
        return [full if one else "sliding_attention" for one in is_full]
    kinds = kinds_of(c, "layer_types", *_DOTS3_KINDS)
    if use_index is None:
        return kinds
    return [kind if kind == "sliding_attention" else full for kind in kinds]


def _dots3_layers(c: Config, kinds: list[str]) -> list[dict[str, Any]]:
    """The values of a layer that replace the config's."""
    changed = c.get("per_layer_config")
    if changed is None:
        own = {key: c.get("swa_" + key, value) for key, value in _DOTS3_SLIDING.items()}
        rope_dim = own["head_dim"] - own["qk_nope_head_dim"]
        own["qk_rope_head_dim"] = c.get("swa_qk_rope_head_dim", rope_dim)
        return [own if kind == "sliding_attention" else {} for kind in kinds]
    by_number = {int(i): changes for i, changes in changed.items()}  # the keys are "02", "03" ..
    layers = [dict(by_number.get(i, {})) for i in range(len(kinds))]
    known = (*_DOTS3_LAYER, *_DOTS3_DIMS)
    strange = next((key for layer in layers for key in layer if key not in known), None)
    if strange is not None:
        raise c.error("per_layer_config", f"changes {strange!r}; it may change: {', '.join(known)}")
    return layers


def _dots3_rope(c: Config, kind: str) -> dict[str, Any]:
    """The rotation of a layer type."""
    found: dict[str, Any] = c.rope_parameters
    if kind in found:
        return dict(found[kind])
    if kind == "sliding_attention" and not (
        c.is_explicit("rope_parameters") or c.is_explicit("rope_scaling")
    ):
        return {**found, "rope_theta": c.get("swa_rope_theta", 50000.0)}
    return found


def _dots3_sparse(c: Config) -> list[bool]:
    """Which layers have experts."""
    if c.mlp_layer_types is not None:
        return [kind == "sparse" for kind in kinds_of(c, "mlp_layer_types", "dense", "sparse")]
    first, step = c.get("first_k_dense_replace", 1), c.get("moe_layer_freq", 1)
    layers = range(c.num_hidden_layers)
    listed = isinstance(step, list)
    return [i >= first and bool(step[i] if listed else i % step == 0) for i in layers]


_BLOCK_MOE = LAYER + "block_sparse_moe."
_M3_KEYS = {  # of published configs, in an object of their own
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}
_M3: Names = {
    **{
        f"mixer.index.{role}": AnyOf(_ATTENTION + "indexer." + part, _ATTENTION + "index_" + part)
        for role, part in (("q", "q_proj"), ("k", "k_proj"), *((f"{x}_norm",) * 2 for x in "qk"))
    },
    "moe.router": AnyOf(_BLOCK_MOE + "gate", _MLP + "gate"),
    "moe.correction": AnyOf(
        _BLOCK_MOE + "e_score_correction_bias",
        _BLOCK_MOE + "gate.e_score_correction_bias",
        _MLP + "gate.e_score_correction_bias",
    ),
    "moe.up": AnyOf(
        (_BLOCK_MOE + "experts.{e}.w1", _BLOCK_MOE + "experts.{e}.w3"),
        _MLP + "experts.gate_up_proj",
    ),
    "moe.down": AnyOf(_BLOCK_MOE + "experts.{e}.w2", _MLP + "experts.down_proj"),
    "moe.shared.up": AnyOf(
        *(
            (at + "shared_experts.gate_proj", at + "shared_experts.up_proj")
            for at in (_BLOCK_MOE, _MLP)
        ),
        *(at + "shared_experts.gate_up_proj" for at in (_BLOCK_MOE, _MLP)),
    ),
    "moe.shared.down": AnyOf(*(f"{at}shared_experts.down_proj" for at in (_BLOCK_MOE, _MLP))),
}


def minimax_m3(c: Config) -> spec.Decoder:
    """Layers that read the blocks that an indexer chooses."""
    c = _m3_keys(c)
    plain_one, dense, norm = minimax_m3_parts(c)
    index = spec.BlockIndexer(
        c.index_n_heads,
        c.index_head_dim,
        c.index_block_size,
        c.index_topk_blocks,
        c.index_local_blocks,
        norm,
    )
    chosen = replace(plain_one, extras=spec.AttentionExtras(indexer=index))
    sparse = b.moe(
        c,
        inner=c.intermediate_size,
        act="swiglu_oai",
        score="sigmoid",
        correction=True,
        renorm=True,
        scale=c.routed_scaling_factor,
        shared=replace(dense, inner=c.shared_intermediate_size),
        limit=dense.limit,
    )
    kinds, ffns = c.layer_types, c.mlp_layer_types
    return b.build_decoder(
        c,
        lambda i: chosen if kinds[i] == "minimax_m3_sparse" else plain_one,
        lambda i: sparse if ffns[i] == "sparse" else dense,
        norm,
        names=_M3,
    )


def minimax_m3_parts(c: Config) -> tuple[spec.Attention, spec.Mlp, spec.Norm]:
    """Attention to all tokens, the feed-forward without experts, and the norm."""
    c.refuse("hidden_act", "silu", "swigluoai")
    c.refuse("swiglu_alpha", 1.702)
    norm, position = b.rms(c, offset=1.0), b.rope(c, b.head_dim(c), partial=True)
    mixer = b.attention(c, rope=position, qk_norm="head", qk_norm_spec=norm)
    return mixer, spec.Mlp(c.dense_intermediate_size, "swiglu_oai", limit=limit_of(c)), norm


def _m3_keys(c: Config) -> Config:
    """The config with its published keys under the class's names."""
    count, own = c.num_hidden_layers, c.get("sparse_attention_config", {})
    values = {key: own[other] for key, other in _M3_KEYS.items() if other in own}
    is_sparse = own.get("sparse_attention_freq", [0] * count)
    values["layer_types"] = c.layer_types or [
        "minimax_m3_sparse" if one else "full_attention" for one in is_sparse
    ]
    values["mlp_layer_types"] = c.mlp_layer_types or [
        "sparse" if one else "dense" for one in c.get("moe_layer_freq", [1] * count)
    ]
    c = c.replace(**values)
    kinds_of(c, "layer_types", "minimax_m3_sparse", "full_attention")
    kinds_of(c, "mlp_layer_types", "sparse", "dense")
    positive(c, "index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks")
    c.divide("num_attention_heads", "index_n_heads")
    if c.index_head_dim < b.rope(c, b.head_dim(c), partial=True).dim:
        raise c.error("index_head_dim", "must be at least the rotated channels")
    return c
