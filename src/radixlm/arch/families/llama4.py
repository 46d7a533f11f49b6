"""Llama 4, Ministral 3, NanoChat, BitNet (arXiv:2504.12285), Apertus (arXiv:2509.14233) and
HunYuan: Llama's block with one change each."""

from __future__ import annotations

from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.families import builders as b
from radixlm.arch.families.mistral_native import native
from radixlm.arch.names import LAYER, AnyOf, Named, Names
from radixlm.arch.recipes import transposed
from radixlm.arch.spec import Attention, AttentionExtras, Decoder, LogNScaling, Mlp, Norm, Rope
from radixlm.base.record import replace

_FEED, _ATTENTION, _MLP = LAYER + "feed_forward.", LAYER + "self_attn.", LAYER + "mlp."


def llama4_config(raw: dict[str, Any]) -> dict[str, Any]:
    """``attn_temperature_tuning`` used to be a number."""
    tuning = raw.get("attn_temperature_tuning")
    is_count = isinstance(tuning, int) and tuning > 1
    return {**raw, "attn_temperature_tuning": True} if is_count else raw


def llama4(c: Config) -> Decoder:
    """Layers with rotation see their chunk; the others see everything, with queries scaled by
    position."""
    step, count = c.no_rope_layer_interval, c.num_hidden_layers
    ropes = c.no_rope_layers or [(i + 1) % step for i in range(count)]
    every = c.interleave_moe_layer_step
    sparse_at = c.moe_layers if c.moe_layers is not None else range(every - 1, count, every)
    position = b.rope(c, b.head_dim(c), interleaved=True)
    grows = LogNScaling(c.attn_scale, c.floor_scale, 1) if c.attn_temperature_tuning else None
    bias = c.attention_bias

    def mixer(i: int) -> Attention:
        has_rope = bool(ropes[i])
        kinds = c.layer_types
        is_chunked = kinds[i] == "chunked_attention" if kinds else has_rope
        extras = AttentionExtras(
            attention_chunk_size=c.attention_chunk_size or 0 if is_chunked else 0,
            norm_after_rope=True,
            logn_scaling=None if has_rope else grows,
        )
        is_normed = c.use_qk_norm and has_rope
        return b.attention(
            c,
            rope=position if has_rope else None,
            qkv_bias=bias,
            o_bias=bias,
            qk_norm="head" if is_normed else "",
            qk_norm_spec=Norm(c.rms_norm_eps, affine=False) if is_normed else None,
            extras=extras,
        )

    shared = Mlp(c.intermediate_size, b.activation(c))
    sparse = b.moe(c, inner=c.intermediate_size, score="sigmoid", scale_input=True, shared=shared)
    dense = Mlp(c.intermediate_size_mlp, b.activation(c))
    return b.build_decoder(c, mixer, lambda i: sparse if i in sparse_at else dense, names=_LLAMA4)


_LLAMA4: Names = {
    "ffn.up": (_FEED + "gate_proj", _FEED + "up_proj"),
    "ffn.down": _FEED + "down_proj",
    "moe.router": _FEED + "router",
    "moe.up": AnyOf(
        Named((_FEED + "experts.gate_up_proj",), transposed),
        (_FEED + "experts.{e}.gate_proj", _FEED + "experts.{e}.up_proj"),  # quantized
    ),
    "moe.down": AnyOf(
        Named((_FEED + "experts.down_proj",), transposed), _FEED + "experts.{e}.down_proj"
    ),
    "moe.shared.up": (_FEED + "shared_expert.gate_proj", _FEED + "shared_expert.up_proj"),
    "moe.shared.down": _FEED + "shared_expert.down_proj",
}


def ministral3(c: Config) -> Decoder:
    p = c.rope_parameters
    beta, period = p.get("llama_4_scaling_beta"), p.get("original_max_position_embeddings")
    extras = AttentionExtras(logn_scaling=LogNScaling(beta, float(period))) if beta else None
    mixer = b.attention(c, window=c.sliding_window or 0, extras=extras)
    return native(c, b.build_decoder(c, mixer))


def nanochat(c: Config) -> Decoder:
    norm, bias = Norm(c.rms_norm_eps, affine=False), c.attention_bias
    position = b.rope(c, b.head_dim(c))
    extras = AttentionExtras(norm_after_rope=True)
    mixer = b.attention(
        c,
        rope=Rope(position.dim, position.theta, position.scaling, negative_angles=True),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        qk_norm_spec=norm,
        extras=extras,
    )
    names: Names = {"ffn.up1": _MLP + "fc1", "ffn.down": _MLP + "fc2"}
    return b.build_decoder(
        c,
        mixer,
        b.mlp(c, gated=False),
        norm=norm,
        embed_norm=norm,
        logit_softcap=c.final_logit_softcapping or 0.0,
        names=names,
    )


def bitnet(c: Config) -> Decoder:
    bias = c.attention_bias
    mixer = b.attention(c, qkv_bias=bias, o_bias=bias, extras=AttentionExtras(out_norm=b.rms(c)))
    ffn = Mlp(c.intermediate_size, b.activation(c), sub_norm=b.rms(c))
    names: Names = {
        "mixer.out_norm": _ATTENTION + "attn_sub_norm",
        "ffn.sub_norm": _MLP + "ffn_sub_norm",
    }
    return b.build_decoder(c, mixer, ffn, names=names)


def apertus(c: Config) -> Decoder:
    bias, act = c.attention_bias, "xielu" if c.hidden_act == "xielu" else b.activation(c)
    mixer = b.attention(c, qkv_bias=bias, o_bias=bias, qk_norm="head", qk_norm_spec=b.rms(c))
    names: Names = {
        "norm1": LAYER + "attention_layernorm",
        "norm2": LAYER + "feedforward_layernorm",
        **{f"ffn.act.{one}": f"{_MLP}act_fn.{one}" for one in ("alpha_p", "alpha_n", "beta")},
        "ffn.act.eps": _MLP + "act_fn.eps",
    }
    spoken = c.get("output_vocab_size") or c.vocab_size  # the others are codes of media
    return b.build_decoder(
        c.replace(vocab_size=spoken),
        mixer,
        Mlp(c.intermediate_size, act, gated=False),
        names=names,
        extra_vocab_rows=c.vocab_size - spoken,
    )


def _hunyuan_attention(c: Config) -> Attention:
    """q and k are normalized after the rotation; "dynamic" scaling with alpha only changes the
    base."""
    p, dim, bias = dict(c.rope_parameters), b.head_dim(c), c.attention_bias
    listed = (p.pop(key, None) for key in ("mrope_section", "xdrope_section"))
    sections = tuple(int(one) for one in next((one for one in listed if one), ()))
    p["rope_type"] = {"xdrope": "dynamic"}.get(p["rope_type"], p["rope_type"])
    if p["rope_type"] == "dynamic" and p.get("alpha"):
        position = Rope(dim, float(p["rope_theta"] * p["alpha"] ** (dim / (dim - 2))))
    else:
        position = b.rope(c.replace(rope_parameters=p), dim)
    if sections and (len(sections) not in (3, 4) or 2 * sum(sections) != dim):
        raise c.error("rope_parameters", f"sections {sections} must be 3 or 4 parts of {dim // 2}")
    if sections:
        position = replace(position, mrope_sections=sections, mrope_by_channel=True)
    return b.attention(
        c,
        rope=position,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        qk_norm_spec=b.rms(c),
        extras=AttentionExtras(norm_after_rope=True),
    )


_HUNYUAN: Names = {
    "mixer.q_norm": _ATTENTION + "query_layernorm",
    "mixer.k_norm": _ATTENTION + "key_layernorm",
    "moe.router": AnyOf(_MLP + "gate.wg", _MLP + "gate"),
    "moe.shared.up": (_MLP + "shared_mlp.gate_proj", _MLP + "shared_mlp.up_proj"),
    "moe.shared.down": _MLP + "shared_mlp.down_proj",
}


def hunyuan_dense(c: Config) -> Decoder:
    return b.build_decoder(c, _hunyuan_attention(c), names=_HUNYUAN)


def hunyuan_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Counts that are lists by layer with equal entries become numbers."""
    form = dict(raw)
    for key in ("num_experts", "moe_topk", "num_experts_per_tok", "moe_intermediate_size"):
        value = raw.get(key)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            form[key] = value[0]
    return form


def hunyuan_moe(c: Config) -> Decoder:
    shared = b.mlp(c)

    def ffn(i: int) -> b.Ffn:
        return b.moe(c, inner=c.intermediate_size, renorm=True, shared=shared)

    return b.build_decoder(c, _hunyuan_attention(c), ffn, names=_HUNYUAN)
