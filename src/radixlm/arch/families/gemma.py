"""Gemma 1 to 3 (text): norms that store weight - 1, scaled embeddings, sandwiched norms."""

from __future__ import annotations

from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.families.builders import (
    attention,
    family,
    head_dim,
    mlp,
    plain,
    rms,
    rope,
    window,
)
from radixlm.arch.names import SANDWICH
from radixlm.arch.spec import Attention, Decoder, Mlp


def _scaled(c: Config, **parts: Any) -> Decoder:
    c.refuse("use_bidirectional_attention", False)
    return plain(c, norm=rms(c, offset=1.0), embed_scale=c.hidden_size**0.5, **parts)


@family("GemmaForCausalLM")
def gemma(c: Config) -> Decoder:
    # Old checkpoints say "gelu" where their authors meant its tanh approximation.
    feed_forward = Mlp(c.intermediate_size, "gelu_tanh") if c.hidden_act == "gelu" else mlp(c)
    bias = c.attention_bias
    return _scaled(c, mixer=attention(c, qkv_bias=bias, o_bias=bias), ffn=feed_forward)


def _alternating(c: Config, layer: int, every: int) -> int:
    """Window of a layer where each ``every``-th sees everything."""
    if c.layer_types is not None:
        return window(c, layer)
    return int(c.sliding_window) if (layer + 1) % every else 0


def _attention(c: Config, every: int, layer: int, **fields: Any) -> Attention:
    bias = c.attention_bias
    return attention(
        c,
        qkv_bias=bias,
        o_bias=bias,
        scale=c.query_pre_attn_scalar**-0.5,
        window=_alternating(c, layer, every),
        **fields,
    )


@family("Gemma2ForCausalLM")
def gemma2(c: Config) -> Decoder:
    return _scaled(
        c,
        mixer=lambda i: _attention(c, 2, i, softcap=c.attn_logit_softcapping or 0.0),
        ffn=mlp(c, act="hidden_activation"),
        layout="sandwich",
        logit_softcap=c.final_logit_softcapping or 0.0,
        names=SANDWICH,
    )


@family("VaultGemmaForCausalLM")
def vault_gemma(c: Config) -> Decoder:
    return _scaled(
        c,
        mixer=lambda i: _attention(c, 2, i, softcap=c.attn_logit_softcapping or 0.0),
        ffn=mlp(c, act="hidden_activation"),
        logit_softcap=c.final_logit_softcapping or 0.0,
        names={"norm2": SANDWICH["norm3"]},
    )


@family("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
def gemma3(c: Config) -> Decoder:
    # attn_logit_softcapping is a leftover of Gemma 2 in these configs: the model does not use it.
    every = c.sliding_window_pattern

    def mixer(i: int) -> Attention:
        kind = "sliding_attention" if _alternating(c, i, every) else "full_attention"
        position = rope(c, head_dim(c), kind)
        norm = rms(c, offset=1.0)
        return _attention(c, every, i, rope=position, qk_norm="head", qk_norm_spec=norm)

    return _scaled(
        c,
        mixer=mixer,
        ffn=mlp(c, act="hidden_activation"),
        layout="sandwich",
        logit_softcap=c.final_logit_softcapping or 0.0,
        names=SANDWICH,
    )
