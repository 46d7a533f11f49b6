"""GPT-2, GPT-NeoX (arXiv:2204.06745), OPT (arXiv:2205.01068), Falcon (arXiv:2311.16867), gpt-oss
and the decoder of ModernBERT."""

from __future__ import annotations

from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.families import builders as b
from radixlm.arch.families.alibi import CONV_LAYER, alibi_slopes
from radixlm.arch.names import LAYER, AnyOf, Named, Names
from radixlm.arch.recipes import (
    GroupedQkv,
    interleaved,
    interleaved_middle,
    interleaved_transposed,
    transposed,
)
from radixlm.arch.spec import Attention, AttentionExtras, Decoder, HeadLayer, Layout, Mlp, Norm
from radixlm.base.record import replace

_H = "transformer.h.{i}."


def gpt2(c: Config) -> Decoder:
    c.refuse("add_cross_attention", False)
    dim = c.divide("hidden_size", "num_attention_heads")
    scale = dim**-0.5 if c.scale_attn_weights else 1.0
    base = b.attention(c, kv_heads=c.num_attention_heads, rope=None, qkv_bias=True, o_bias=True)

    def mixer(i: int) -> Attention:
        shrink = i + 1 if c.scale_attn_by_inverse_layer_idx else 1
        return replace(base, head_dim=dim, scale=scale / shrink)

    inner = c.n_inner or 4 * c.hidden_size
    return b.build_decoder(
        c,
        mixer,
        Mlp(inner, b.activation(c, "activation_function"), gated=False, bias=True),
        norm=Norm(c.layer_norm_epsilon, "layer", bias=True),
        positions=(c.max_position_embeddings, 0),
        names={
            "embed": "transformer.wte",
            "positions": "transformer.wpe",
            "norm": "transformer.ln_f",
            "norm1": _H + "ln_1",
            "norm2": _H + "ln_2",
            **CONV_LAYER,
        },
    )


def gpt_neox_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The classes have their own names for the base and the share of the rotation."""
    out = {k: v for k, v in raw.items() if k not in ("rope_theta", "partial_rotary_factor")}
    if raw.get("rotary_emb_base") is not None:
        out["rope_theta"] = raw["rotary_emb_base"]
    return out


def gpt_neox(c: Config) -> Decoder:
    layer = "gpt_neox.layers.{i}."
    heads, dim = c.num_attention_heads, c.divide("hidden_size", "num_attention_heads")
    bias = c.attention_bias
    return b.build_decoder(
        c,
        b.attention(
            c,
            kv_heads=heads,
            head_dim=dim,
            rope=b.rope(c, dim, partial=True),
            qkv_bias=bias,
            o_bias=bias,
        ),
        Mlp(c.intermediate_size, b.activation(c), gated=False, bias=True),
        norm=Norm(c.layer_norm_eps, "layer", bias=True),
        layout="parallel2" if c.use_parallel_residual else "pre",
        names={
            "embed": "gpt_neox.embed_in",
            "norm": "gpt_neox.final_layer_norm",
            "head": AnyOf("embed_out", "lm_head"),
            "norm1": layer + "input_layernorm",
            "norm2": layer + "post_attention_layernorm",
            "mixer.qkv": Named((layer + "attention.query_key_value",), GroupedQkv(heads, dim)),
            "mixer.o": layer + "attention.dense",
            "ffn.up1": layer + "mlp.dense_h_to_4h",
            "ffn.down": layer + "mlp.dense_4h_to_h",
        },
    )


def falcon(c: Config) -> Decoder:
    """Three layouts: 40B (grouped heads), 7B (one KV head, parallel), 1B (one KV head for each
    head)."""
    kv_heads = c.get("num_kv_heads") or c.num_attention_heads
    if not c.new_decoder_architecture and c.multi_query:
        kv_heads = 1
    dim = c.divide("hidden_size", "num_attention_heads")
    layout, norms = _falcon_norms(c)
    # the slopes join the scores before they are scaled
    slopes = tuple(slope * dim**-0.5 for slope in alibi_slopes(c.num_attention_heads))
    return b.build_decoder(
        c,
        b.attention(
            c,
            kv_heads=kv_heads,
            head_dim=dim,
            rope=None if c.alibi else b.rope(c, dim),
            qkv_bias=c.bias,
            o_bias=c.bias,
            extras=AttentionExtras(alibi_slopes=slopes) if c.alibi else None,
        ),
        Mlp(
            c.get("ffn_hidden_size") or 4 * c.hidden_size,
            b.activation(c, "activation"),
            gated=False,
            bias=c.bias,
        ),
        norm=Norm(c.layer_norm_epsilon, "layer", bias=True),
        layout=layout,
        names={
            **norms,
            "embed": "transformer.word_embeddings",
            "norm": "transformer.ln_f",
            "mixer.qkv": Named((_H + "self_attention.query_key_value",), GroupedQkv(kv_heads, dim)),
            "mixer.o": _H + "self_attention.dense",
            "ffn.up1": _H + "mlp.dense_h_to_4h",
            "ffn.down": _H + "mlp.dense_4h_to_h",
        },
    )


def _falcon_norms(c: Config) -> tuple[Layout, Names]:
    two = {"norm1": _H + "input_layernorm", "norm2": _H + "post_attention_layernorm"}
    if c.new_decoder_architecture:
        c.refuse("parallel_attn", True)
        c.refuse("num_ln_in_parallel_attn", 1, 2)
        if c.get("num_ln_in_parallel_attn", 2) == 2:
            return "parallel2", {"norm1": _H + "ln_attn", "norm2": _H + "ln_mlp"}
        return "parallel", two
    c.refuse("num_ln_in_parallel_attn", 1)
    return ("parallel" if c.parallel_attn else "pre"), two


def opt(c: Config) -> Decoder:
    """OPT 350M has its norms after the branches, and a narrower token table."""
    is_before = c.get("do_layer_norm_before", True)
    width = c.get("word_embed_proj_dim", c.hidden_size)
    has_last = is_before and not c.get("_remove_final_layer_norm")
    top, layer = "model.decoder.", "model.decoder.layers.{i}."
    bias, dim = c.enable_bias, c.divide("hidden_size", "num_attention_heads")
    return b.build_decoder(
        c,
        b.attention(
            c,
            kv_heads=c.num_attention_heads,
            head_dim=dim,
            rope=None,
            qkv_bias=bias,
            o_bias=bias,
        ),
        Mlp(c.ffn_dim, b.activation(c, "activation_function"), gated=False, bias=bias),
        norm=Norm(
            1e-5,
            "layer",
            bias=c.layer_norm_elementwise_affine,
            affine=c.layer_norm_elementwise_affine,
        ),
        layout="pre" if is_before else "post_sum",
        final_norm=None if has_last else Norm(1e-5, "none", affine=False),
        positions=(c.max_position_embeddings + 2, 2),
        embed_dim=0 if width == c.hidden_size else width,
        names={
            "embed_in": top + "project_in",
            "embed_out": top + "project_out",
            "embed": top + "embed_tokens",
            "positions": top + "embed_positions",
            "norm": top + "final_layer_norm",
            "norm1": layer + "self_attn_layer_norm",
            "norm2": layer + "final_layer_norm",
            "mixer.qkv": tuple(f"{layer}self_attn.{part}_proj" for part in "qkv"),
            "mixer.o": layer + "self_attn.out_proj",
            "ffn.up1": layer + "fc1",
            "ffn.down": layer + "fc2",
        },
    )


def modernbert_decoder_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The class has its own names for the rotation bases of both layer types."""
    if raw.get("rope_parameters"):
        return raw
    scaling = raw.get("rope_scaling") or {"rope_type": "default"}
    form = {key: value for key, value in raw.items() if key != "rope_scaling"}
    form["rope_parameters"] = {
        kind: {"rope_theta": raw.get(key, usual), **scaling}
        for kind, key, usual in (
            ("full_attention", "global_rope_theta", 160000.0),
            ("sliding_attention", "local_rope_theta", 10000.0),
        )
    }
    return form


def modernbert_decoder(c: Config) -> Decoder:
    """Causal ModernBERT: normalized embeddings, no norm before the first attention, a dense layer
    before the head."""
    layer, count, bias = "model.layers.{i}.", c.num_hidden_layers, c.attention_bias
    norm = Norm(c.norm_eps, "layer", bias=c.norm_bias)
    every = c.get("global_attn_every_n_layers", 3)
    kinds = c.layer_types or [
        "sliding_attention" if i % every else "full_attention" for i in range(count)
    ]
    span = c.get("sliding_window") or (c.get("local_attention") or 0) // 2

    def mixer(i: int) -> Attention:
        position = b.rope(c, b.head_dim(c), kinds[i])
        reach = span if kinds[i] == "sliding_attention" else 0
        return b.attention(c, rope=position, qkv_bias=bias, o_bias=bias, window=reach)

    names: Names = {
        "embed": "model.embeddings.tok_embeddings",
        "embed_norm": "model.embeddings.norm",
        "norm": "model.final_norm",
        "norm1": AnyOf(layer + "attn_norm", layer + "mlp_norm"),
        "norm2": layer + "mlp_norm",
        "mixer.qkv": tuple(f"{layer}attn.{part}_proj" for part in "qkv"),
        "mixer.o": layer + "attn.Wo",
        "ffn.up": layer + "mlp.Wi",
        "ffn.down": layer + "mlp.Wo",
        "head_dense": "lm_head.dense",
        "head_norm": "lm_head.norm",
        "head": "decoder",
    }
    described = b.build_decoder(
        c,
        mixer,
        b.mlp(c, bias=c.mlp_bias, act="hidden_activation"),
        norm,
        embed_norm=norm,
        head_bias=c.decoder_bias,
        head_layer=HeadLayer(b.activation(c, "classifier_activation"), norm, c.classifier_bias),
        names=names,
    )
    first, *rest = described.blocks
    return replace(described, blocks=(replace(first, layout="prenorm_ffn_only"), *rest))


def gpt_oss(c: Config) -> Decoder:
    c.refuse("swiglu_alpha", 1.702)
    limit, bias = float(c.swiglu_limit), c.attention_bias
    if limit <= 0:
        raise c.error("swiglu_limit", f"= {limit} must be positive")

    def mixer(i: int) -> Attention:
        span = b.window(c, i) if c.layer_types else 0 if i % 2 else c.sliding_window
        position = b.rope(c, b.head_dim(c))
        return b.attention(c, rope=position, qkv_bias=bias, o_bias=bias, sinks=True, window=span)

    return b.build_decoder(
        c,
        mixer,
        b.moe(
            c,
            inner=c.intermediate_size,
            act="swiglu_oai",
            score="softmax_topk",
            bias=True,
            limit=0.0 if limit == 7.0 else limit,  # 7: the activation's own
        ),
        names=_GPT_OSS,
    )


_EXPERTS = LAYER + "mlp.experts."
_EXPERT = _EXPERTS + "{e}."
_GPT_OSS: Names = {
    "moe.router": AnyOf(LAYER + "mlp.router", LAYER + "mlp.router.linear"),
    "moe.up": AnyOf(
        Named((_EXPERTS + "gate_up_proj_blocks",), interleaved_middle),  # MXFP4
        Named((_EXPERTS + "gate_up_proj",), interleaved_transposed),
        Named((_EXPERT + "gate_up_proj",), interleaved_middle),  # Quark
        Named((_EXPERTS + "gate_up_projs.{e}",), interleaved_middle),  # Unsloth
        (_EXPERT + "gate_proj", _EXPERT + "up_proj"),
    ),
    "moe.down": AnyOf(
        _EXPERTS + "down_proj_blocks",
        Named((_EXPERTS + "down_proj",), transposed),
        _EXPERT + "down_proj",
        _EXPERTS + "down_projs.{e}",
    ),
    "moe.up_bias": AnyOf(
        Named((_EXPERTS + "gate_up_proj_bias",), interleaved),
        Named((_EXPERT + "gate_up_proj.bias",), interleaved),
        Named((_EXPERTS + "gate_up_projs.{e}.bias",), interleaved),
        (_EXPERT + "gate_proj.bias", _EXPERT + "up_proj.bias"),
    ),
    "moe.down_bias": AnyOf(
        _EXPERTS + "down_proj_bias", _EXPERT + "down_proj.bias", _EXPERTS + "down_projs.{e}.bias"
    ),
}
