"""Llama (arXiv:2302.13971) and models with its block: Mistral (arXiv:2310.06825), Ministral, Arcee,
Seed-OSS, SmolLM3, DiffLlama, Helium and others."""

from __future__ import annotations

import math

from radixlm.arch.config import Config
from radixlm.arch.families import builders as b
from radixlm.arch.families.mistral_native import native
from radixlm.arch.spec import Attention, AttentionExtras, Decoder, Norm
from radixlm.base.record import replace


def llama(c: Config) -> Decoder:
    bias = c.attention_bias
    return b.build_decoder(c, b.attention(c, qkv_bias=bias, o_bias=bias), b.mlp(c, bias=c.mlp_bias))


def mistral(c: Config) -> Decoder:
    return native(c, b.build_decoder(c, b.attention(c, window=c.sliding_window or 0)))


def ministral(c: Config) -> Decoder:
    if c.layer_types is None:
        return mistral(c)
    return native(c, b.build_decoder(c, lambda i: b.attention(c, window=b.window(c, i))))


def arcee(c: Config) -> Decoder:
    bias = c.attention_bias
    feed_forward = b.mlp(c, gated=False, bias=c.mlp_bias)
    return b.build_decoder(c, b.attention(c, qkv_bias=bias, o_bias=bias), feed_forward)


def seed_oss(c: Config) -> Decoder:
    mixer = b.attention(c, qkv_bias=c.attention_bias, o_bias=c.attention_out_bias)
    return b.build_decoder(c, mixer, b.mlp(c, bias=c.mlp_bias))


def smollm3(c: Config) -> Decoder:
    ropes = c.no_rope_layers or [
        (i + 1) % c.no_rope_layer_interval for i in range(c.num_hidden_layers)
    ]
    bias = c.attention_bias

    def mixer(i: int) -> Attention:
        position = b.rope(c, b.head_dim(c)) if ropes[i] else None
        slides = c.use_sliding_window and c.sliding_window and not ropes[i]
        span = b.window(c, i) if c.layer_types else c.sliding_window if slides else 0
        return b.attention(c, qkv_bias=bias, o_bias=bias, rope=position, window=span)

    return b.build_decoder(c, mixer, b.mlp(c, bias=c.mlp_bias))


def diff_llama(c: Config) -> Decoder:
    bias, dim = c.attention_bias, b.head_dim(c)
    if b.attention(c).kv_heads % 2:
        raise c.error("num_key_value_heads", "must be even")

    def mixer(i: int) -> Attention:
        first = 0.8 - 0.6 * math.exp(-0.3 * i)
        norm = Norm(c.rms_norm_eps, affine=False)
        extras = AttentionExtras(
            v_dim=2 * dim, diff_lambda_init=first, out_norm=norm, out_norm_heads=True
        )
        return b.attention(c, qkv_bias=bias, o_bias=bias, extras=extras)

    return b.build_decoder(c, mixer)


def teleflm(c: Config) -> Decoder:
    """Llama with maximal update parametrization (muP): scaled embeddings and logits."""
    described = llama(c)
    if not c.get("use_mup"):
        return described
    scale = c.get("output_mult", 1.0) / c.get("mup_scale_factor", 1.0)
    return replace(described, embed_scale=float(c.get("input_mult", 1.0)), logit_scale=scale)


def helium(c: Config) -> Decoder:
    position = b.rope(c, b.head_dim(c), interleaved=True)
    return b.build_decoder(
        c, b.attention(c, rope=position, qkv_bias=c.attention_bias), b.mlp(c, bias=c.mlp_bias)
    )


def jais2(c: Config) -> Decoder:
    bias = c.attention_bias
    norm = Norm(c.layer_norm_eps, "layer", bias=True)
    feed_forward = b.mlp(c, gated=False, bias=c.mlp_bias)
    return b.build_decoder(c, b.attention(c, qkv_bias=bias, o_bias=bias), feed_forward, norm=norm)


def cwm(c: Config) -> Decoder:
    def mixer(i: int) -> Attention:
        span = b.window(c, i) if c.layer_types else c.sliding_window if i % 4 else 0
        return b.attention(c, window=span or 0)

    return b.build_decoder(c, mixer, b.mlp(c, bias=c.mlp_bias))


def internlm3(c: Config) -> Decoder:
    qkv_bias, bias = c.get("qkv_bias", c.attention_bias), c.get("bias", c.mlp_bias)
    return b.build_decoder(c, b.attention(c, qkv_bias=qkv_bias, o_bias=bias), b.mlp(c, bias=bias))
