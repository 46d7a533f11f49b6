"""Mixtures of experts: Laguna, Beam, MiMo V2, HY 3, Flint, Kolibri, Aria, Phi-3.5 MoE
(arXiv:2404.14219) and DBRX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.families import builders as b
from radixlm.arch.families.mixtral import W1_W3_W2
from radixlm.arch.names import LAYER, SANDWICH, AnyOf, Named, Names
from radixlm.arch.recipes import Experts, RepeatInterleave, transposed
from radixlm.arch.spec import Attention, AttentionExtras, Decoder, LogNScaling, Mlp, Moe, Norm, Rope
from radixlm.base.record import replace

_MLP = LAYER + "mlp."


def by_layer_type(c: Config, sparse: Moe, dense: Mlp | None = None) -> Callable[[int], b.Ffn]:
    """Experts in layers of type "sparse" in config.mlp_layer_types; without it, in all but the
    first."""
    kinds = c.get("mlp_layer_types")
    plain_ffn = dense or b.mlp(c)
    return lambda i: sparse if (kinds[i] == "sparse" if kinds else i > 0) else plain_ffn


def laguna(c: Config) -> Decoder:
    c.refuse("moe_apply_router_weight_on_input", False)
    heads, bias = c.get("num_attention_heads_per_layer"), c.attention_bias
    is_by_head = c.get("gating", True) in (True, "per-head")
    extras = AttentionExtras(gate="head" if is_by_head else "channel", gate_act="softplus")

    def mixer(i: int) -> Attention:
        kind = c.layer_types[i] if c.layer_types else "full_attention"
        return b.attention(
            c,
            heads=heads[i] if heads else c.num_attention_heads,
            rope=b.rope(c, b.head_dim(c), kind, partial=True),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm="head",
            qk_norm_spec=b.rms(c),
            window=b.window(c, i) if c.layer_types else 0,
            extras=extras,
        )

    sparse = b.moe(
        c,
        score="sigmoid",
        correction=True,
        renorm=True,
        scale=c.moe_routed_scaling_factor,
        router_softcap=c.moe_router_logit_softcapping,
        shared=Mlp(c.shared_expert_intermediate_size, b.activation(c)),
    )
    correction = "e_score_correction_bias"
    names: Names = {
        "mixer.gate": LAYER + "self_attn.g_proj",
        "moe.correction": AnyOf(f"{_MLP}gate.{correction}", f"{_MLP}experts.{correction}"),
        "moe.shared.up": _shared("shared_expert", "shared_experts"),
        "moe.shared.down": AnyOf(
            _MLP + "shared_expert.down_proj", _MLP + "shared_experts.down_proj"
        ),
    }
    return b.build_decoder(c, mixer, by_layer_type(c, sparse), names=names)


def _shared(*prefixes: str) -> AnyOf:
    return AnyOf(*((f"{_MLP}{one}.gate_proj", f"{_MLP}{one}.up_proj") for one in prefixes))


def beam(c: Config) -> Decoder:
    """Layers without rotation scale queries by position; gates have a bias for each head. The
    residual is the mean of all branches so far."""
    dim, count = b.head_dim(c), c.num_hidden_layers
    if c.layer_types is None:
        c = c.replace(layer_types=[*(_sixth(i) for i in range(count - 1)), "full_attention"])

    def mixer(i: int) -> Attention:
        kind = "sliding_attention" if b.is_sliding(c, i) else "full_attention"
        has_rope = c.rope_parameters[kind] is not None
        grows = None if has_rope else LogNScaling(0.1, 2048.0, 1, is_power=True)
        extras = AttentionExtras(gate="channel", gate_bias=True, logn_scaling=grows)
        return b.attention(
            c,
            rope=b.rope(c, dim, kind) if has_rope else None,
            qkv_bias=c.attention_bias,
            o_bias=c.attention_bias,
            qk_norm="head",
            qk_norm_spec=b.rms(c),
            window=b.window(c, i),
            extras=extras,
        )

    sparse = b.corrected_moe(c)
    kinds = c.mlp_layer_types or ["dense"] * 3 + ["sparse"] * c.num_hidden_layers
    bias = Named((LAYER + "self_attn.gate_bias",), RepeatInterleave(dim))
    described = b.build_decoder(
        c,
        mixer,
        lambda i: sparse if kinds[i] == "sparse" else b.mlp(c),
        layout="sandwich",
        logit_softcap=c.final_logit_softcapping or 0.0,
        names={**SANDWICH, "mixer.gate.bias": bias},
    )
    blocks = (replace(block, weights=_means(2 * i + 2)) for i, block in enumerate(described.blocks))
    return replace(described, blocks=tuple(blocks))


def _sixth(layer: int) -> str:
    return "sliding_attention" if (layer + 1) % 6 else "full_attention"


def _means(n: int) -> tuple[float, float, float, float]:
    """Factors of the residual and the n-th branch, then of the residual and the next branch."""
    first, second = ((n - 1) / n) ** 0.5, (n / (n + 1)) ** 0.5
    return first, n**-0.5, second, (n + 1) ** -0.5


def mimo_v2(c: Config) -> Decoder:
    """Window layers have twice the KV heads, and sinks; values are narrower than keys."""
    extras = AttentionExtras(v_dim=c.v_head_dim, v_scale=c.get("attention_value_scale", 1.0))
    before = c.get("sliding_window_size")  # of older configs: tokens before the one that looks
    span = c.sliding_window if before is None else before + 1
    bias, kinds = c.attention_bias, c.layer_types

    def mixer(i: int) -> Attention:
        kind = kinds[i] if kinds else _mimo_kind(i)
        slides = kind == "sliding_attention"
        return b.attention(
            c,
            kv_heads=c.num_key_value_heads * (2 if slides else 1),
            rope=b.rope(c, b.head_dim(c), kind, partial=True),
            qkv_bias=bias,
            window=span if slides else 0,
            sinks=slides,
            extras=extras,
        )

    sparse = b.corrected_moe(c)
    sinks = AnyOf(LAYER + "self_attn.attention_sink_bias", LAYER + "self_attn.sinks")
    return b.build_decoder(c, mixer, by_layer_type(c, sparse), names={"mixer.sinks": sinks})


def _mimo_kind(i: int) -> str:
    return "full_attention" if i == 0 or (i + 1) % 6 == 0 else "sliding_attention"


def hy_v3(c: Config) -> Decoder:
    bias = c.attention_bias
    shared = c.moe_intermediate_size * c.num_shared_experts
    sparse = b.moe(
        c,
        score="sigmoid",
        correction=True,
        renorm=True,
        scale=c.router_scaling_factor,
        shared=Mlp(shared, b.activation(c), bias=c.mlp_bias) if shared else None,
    )
    correction = "e_score_correction_bias"
    names: Names = {
        "moe.router": AnyOf(_MLP + "gate", _MLP + "router.gate"),
        "moe.correction": AnyOf(f"{_MLP}{correction}", f"{_MLP}expert_bias"),
        "moe.shared.up": _shared("shared_experts", "shared_mlp"),
        "moe.shared.down": AnyOf(_MLP + "shared_experts.down_proj", _MLP + "shared_mlp.down_proj"),
    }
    mixer = b.attention(c, qkv_bias=bias, o_bias=bias, qk_norm="head", qk_norm_spec=b.rms(c))
    return b.build_decoder(
        c, mixer, by_layer_type(c, sparse, b.mlp(c, bias=c.mlp_bias)), names=names
    )


def _turning_windows(
    c: Config, last: Callable[[int], bool], **fields: Any
) -> Callable[[int], Attention]:
    """Layers with a window have rotation, full layers have none."""
    bias = c.get("attention_bias", False)

    def mixer(i: int) -> Attention:
        span = b.window(c, i) if c.layer_types else 0 if last(i) else c.sliding_window
        position = b.rope(c, b.head_dim(c)) if span else None
        return b.attention(
            c,
            qkv_bias=bias,
            o_bias=bias,
            rope=position,
            window=span,
            qk_norm="head",
            qk_norm_spec=b.rms(c),
            **fields,
        )

    return mixer


def flint(c: Config) -> Decoder:
    shared = Mlp(c.shared_expert_intermediate_size, b.activation(c))
    sparse = b.moe(c, score="sigmoid", renorm=c.norm_topk_prob, shared=shared)
    dense_at = c.mlp_only_layers if c.mlp_only_layers is not None else (0, 1)
    names: Names = {
        "mixer.sinks": AnyOf(LAYER + "self_attn.softmax_offset", LAYER + "self_attn.sinks"),
        "moe.shared.up": _shared("shared_expert"),
        "moe.shared.down": _MLP + "shared_expert.down_proj",
    }

    def ffn(i: int) -> b.Ffn:
        return sparse if i not in dense_at and (i + 1) % c.decoder_sparse_step == 0 else b.mlp(c)

    last = c.num_hidden_layers - 1
    mixer = _turning_windows(c, lambda i: i < 2 or i % 4 == 1 or i == last, sinks=True)
    return b.build_decoder(c, mixer, ffn, names=names)


def kolibri(c: Config) -> Decoder:
    """The correction is added to the logits: their order is that of the sigmoids."""
    sparse = b.moe(
        c,
        score="sigmoid_topk",
        correction=True,
        renorm=c.norm_topk_prob,
        shared=Mlp(c.shared_expert_intermediate_size, b.activation(c)),
    )
    mixer = _turning_windows(c, lambda i: (i + 1) % 5 == 0)
    names: Names = {
        "norm2": AnyOf(LAYER + "post_attn_norm", LAYER + "post_self_attn_layernorm"),
        "norm3": LAYER + "post_attention_layernorm",
        "norm4": AnyOf(LAYER + "post_ffn_norm", LAYER + "post_mlp_layernorm"),
        "moe.correction": AnyOf(
            LAYER + "moe.router.expert_bias", _MLP + "gate.e_score_correction_bias"
        ),
    }
    return b.build_decoder(c, mixer, sparse, layout="sandwich", names=names)


def aria(c: Config) -> Decoder:
    bias = c.attention_bias
    shared = Mlp(c.intermediate_size * c.moe_num_shared_experts, b.activation(c), bias=c.mlp_bias)
    names: Names = {
        "moe.router": AnyOf(_MLP + "router", _MLP + "gate"),
        "moe.up": AnyOf(
            Named((_MLP + "experts.fc1.weight",), transposed),
            Named((_MLP + "experts.gate_up_proj",), transposed),
        ),
        "moe.down": AnyOf(
            Named((_MLP + "experts.fc2.weight",), transposed),
            Named((_MLP + "experts.down_proj",), transposed),
        ),
    }
    # hidden_act is the shared expert's alone
    sparse = b.moe(c, inner=c.intermediate_size, act="silu", score="softmax_topk", shared=shared)
    return b.build_decoder(c, b.attention(c, qkv_bias=bias, o_bias=bias), sparse, names=names)


def phimoe(c: Config) -> Decoder:
    """Sparsemixer takes two experts, whatever num_experts_per_tok is."""
    bias, p = c.attention_bias, c.rope_parameters
    if p.get("rope_type") != "default":
        both = {p.get("short_mscale"), p.get("long_mscale"), p.get("attention_factor")} - {None}
        if len(both) > 1:
            raise c.error("rope_parameters", "with two different mscales is not supported")
    names: Names = {**W1_W3_W2, "moe.router": AnyOf(W1_W3_W2["moe.router"], _MLP + "router")}
    sparse = b.moe(c, inner=c.intermediate_size, score="sparsemixer", jitter=c.router_jitter_noise)
    return b.build_decoder(
        c,
        b.attention(c, qkv_bias=bias, o_bias=bias, window=c.sliding_window or 0),
        replace(sparse, top_k=2),
        norm=Norm(c.rms_norm_eps, "layer", bias=True),
        head_bias=c.lm_head_bias,
        names=names,
    )


def dbrx(c: Config) -> Decoder:
    block = "transformer.blocks.{i}."
    how, feed = c.attn_config, c.ffn_config
    if feed.get("moe_normalize_expert_weights", 1.0) not in (None, 1, 1.0):
        raise c.error("ffn_config", "normalises expert weights by another norm than the sum")
    dim = c.divide("hidden_size", "num_attention_heads")
    position = b.rope(c, dim)
    if not (c.is_explicit("rope_parameters") or c.is_explicit("rope_theta")):
        position = Rope(dim, float(how.get("rope_theta") or position.theta))
    experts, inner = feed.get("moe_num_experts", 4), feed["ffn_hidden_size"]
    mixer = b.attention(
        c,
        kv_heads=how.get("kv_n_heads", 1),
        head_dim=dim,
        rope=position,
        extras=AttentionExtras(clip_qkv=float(how.get("clip_qkv") or 0.0)),
    )
    sparse = Moe(
        experts,
        feed.get("moe_top_k", 1),
        inner,
        b.activation(c.replace(act=(feed.get("ffn_act_fn") or {}).get("name", "silu")), "act"),
        renorm=feed.get("moe_normalize_expert_weights", 1.0) is not None,
    )
    glu, norms = block + "ffn.experts.mlp.", block + "norm_attn_norm."
    names: Names = {
        "embed": "transformer.wte",
        "norm": "transformer.norm_f",
        "norm1": norms + "norm_1",
        "norm2": norms + "norm_2",
        "mixer.qkv": norms + "attn.Wqkv",
        "mixer.o": norms + "attn.out_proj",
        "moe.router": block + "ffn.router.layer",
        "moe.up": Named((glu + "w1", glu + "v1"), Experts(experts, 2)),
        "moe.down": Named((glu + "w2",), Experts(experts, 1, is_transposed=True)),
    }
    return b.build_decoder(c, mixer, sparse, norm=Norm(1e-5, "layer"), names=names)
