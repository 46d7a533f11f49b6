"""GPT-J, CodeGen, GPT-Neo, GPT-NeoX Japanese, GPT-BigCode, BioGPT and Persimmon."""

from __future__ import annotations

from radixlm.arch.config import Config
from radixlm.arch.families.builders import activation, attention, build_decoder, mlp, rope
from radixlm.arch.names import LAYER, Named
from radixlm.arch.recipes import GroupedQkv, SlicedQkv
from radixlm.arch.spec import Attention, Decoder, Mlp, Norm, Rope
from radixlm.base.record import replace

_H = "transformer.h.{i}."
_EMBEDDINGS = {"embed": "transformer.wte", "positions": "transformer.wpe"}
_NORMS = {"norm": "transformer.ln_f", "norm1": _H + "ln_1", "norm2": _H + "ln_2"}


def _inner(c: Config, key: str) -> Mlp:
    inner = c.get(key) or 4 * c.hidden_size
    return Mlp(inner, activation(c, "activation_function"), gated=False, bias=True)


def gptj(c: Config) -> Decoder:
    heads, dim = c.num_attention_heads, c.divide("hidden_size", "num_attention_heads")
    position = Rope(c.get("rotary_dim") or dim, 10000.0, interleaved=True)
    return build_decoder(
        c,
        attention(c, kv_heads=heads, head_dim=dim, rope=position),
        _inner(c, "n_inner"),
        norm=Norm(c.layer_norm_epsilon, "layer", bias=True),
        layout="parallel",
        head_bias=True,
        names={
            **_EMBEDDINGS,
            **_NORMS,
            "mixer.qkv": tuple(f"{_H}attn.{part}_proj" for part in "qkv"),
            "mixer.o": _H + "attn.out_proj",
            "ffn.up1": _H + "mlp.fc_in",
            "ffn.down": _H + "mlp.fc_out",
        },
    )


def codegen(c: Config) -> Decoder:
    fused = Named((_H + "attn.qkv_proj",), SlicedQkv(4, ("q", "v", "k")))
    described = gptj(c)
    return replace(described, names={**described.names, "mixer.qkv": fused})


def gpt_bigcode(c: Config) -> Decoder:
    c.refuse("add_cross_attention", False)
    heads, dim = c.num_attention_heads, c.divide("hidden_size", "num_attention_heads")
    mixer = attention(
        c,
        kv_heads=1 if c.multi_query else heads,
        head_dim=dim,
        rope=None,
        qkv_bias=True,
        o_bias=True,
        scale=None if c.scale_attn_weights else 1.0,
    )
    return build_decoder(
        c,
        mixer,
        _inner(c, "n_inner"),
        norm=Norm(c.layer_norm_epsilon, "layer", bias=True),
        positions=(c.max_position_embeddings, 0),
        names={
            **_EMBEDDINGS,
            **_NORMS,
            "mixer.qkv": Named((_H + "attn.c_attn",), GroupedQkv(mixer.kv_heads, dim)),
            "mixer.o": _H + "attn.c_proj",
            "ffn.up1": _H + "mlp.c_fc",
            "ffn.down": _H + "mlp.c_proj",
        },
    )


def gpt_neo(c: Config) -> Decoder:
    types = c.attention_types or [[["global", "local"], c.num_hidden_layers // 2]]
    kinds = [kind for pattern, times in types for _ in range(times) for kind in pattern]
    kinds = c.get("attention_layers", kinds)
    if len(kinds) != c.num_hidden_layers:
        raise c.error("attention_types", f"names {len(kinds)} of {c.num_hidden_layers} layers")

    def mixer(i: int) -> Attention:
        span = c.window_size if kinds[i] == "local" else 0
        heads = c.num_attention_heads
        return attention(c, kv_heads=heads, rope=None, o_bias=True, scale=1.0, window=span)

    return build_decoder(
        c,
        mixer,
        _inner(c, "intermediate_size"),
        norm=Norm(c.layer_norm_epsilon, "layer", bias=True),
        positions=(c.max_position_embeddings, 0),
        names={
            **_EMBEDDINGS,
            **_NORMS,
            "mixer.qkv": tuple(f"{_H}attn.attention.{part}_proj" for part in "qkv"),
            "mixer.o": _H + "attn.attention.out_proj",
            "ffn.up1": _H + "mlp.c_fc",
            "ffn.down": _H + "mlp.c_proj",
        },
    )


def biogpt(c: Config) -> Decoder:
    layer = "biogpt.layers.{i}."
    mixer = attention(c, kv_heads=c.num_attention_heads, rope=None, qkv_bias=True, o_bias=True)
    return build_decoder(
        c,
        mixer,
        mlp(c, gated=False, bias=True),
        norm=Norm(1e-5, "layer", bias=True),
        positions=(c.max_position_embeddings + 2, 2),
        embed_scale=c.hidden_size**0.5 if c.scale_embedding else 1.0,
        names={
            "embed": "biogpt.embed_tokens",
            "positions": "biogpt.embed_positions",
            "norm": "biogpt.layer_norm",
            "head": "output_projection",
            "norm1": layer + "self_attn_layer_norm",
            "norm2": layer + "final_layer_norm",
            "mixer.qkv": tuple(f"{layer}self_attn.{part}_proj" for part in "qkv"),
            "mixer.o": layer + "self_attn.out_proj",
            "ffn.up1": layer + "fc1",
            "ffn.down": layer + "fc2",
        },
    )


def persimmon(c: Config) -> Decoder:
    heads, dim = c.num_attention_heads, c.divide("hidden_size", "num_attention_heads")
    norm, layer = Norm(c.layer_norm_eps, "layer", bias=True), LAYER + "self_attn."
    return build_decoder(
        c,
        attention(
            c,
            kv_heads=heads,
            head_dim=dim,
            rope=rope(c, dim, partial=True),
            qkv_bias=True,
            o_bias=True,
            qk_norm="head" if c.qk_layernorm else "",
            qk_norm_spec=norm if c.qk_layernorm else None,
        ),
        mlp(c, gated=False, bias=True),
        norm=norm,
        names={
            "norm": "model.final_layernorm",
            "mixer.qkv": Named((layer + "query_key_value",), GroupedQkv(heads, dim)),
            "mixer.o": layer + "dense",
            "mixer.q_norm": layer + "q_layernorm",
            "mixer.k_norm": layer + "k_layernorm",
            "ffn.up1": LAYER + "mlp.dense_h_to_4h",
            "ffn.down": LAYER + "mlp.dense_4h_to_h",
        },
    )


def gpt_neox_japanese(c: Config) -> Decoder:
    """Only the last layer's attention has a bias, on its output."""
    layer, last = "gpt_neox_japanese.layers.{i}.", c.num_hidden_layers - 1
    heads, dim = c.num_attention_heads, c.divide("hidden_size", "num_attention_heads")
    position = rope(c, dim, partial=True)
    qkv = Named((layer + "attention.query_key_value",), GroupedQkv(heads, dim))
    return build_decoder(
        c,
        lambda i: attention(c, kv_heads=heads, head_dim=dim, rope=position, o_bias=i == last),
        Mlp(int(c.hidden_size * c.intermediate_multiple_size), activation(c), gated=False),
        norm=Norm(c.layer_norm_eps, "layer", bias=True),
        names={
            "embed": "gpt_neox_japanese.embed_in",
            "norm": "gpt_neox_japanese.final_layer_norm",
            "head": "embed_out",
            "norm1": layer + "input_layernorm",
            "norm2": layer + "post_attention_layernorm",
            "mixer.qkv": qkv,
            "mixer.o": layer + "attention.dense",
            "mixer.o.bias": layer + "attention.dense_bias",
            "ffn.up1": layer + "mlp.dense_h_to_4h",
            "ffn.down": layer + "mlp.dense_4h_to_h",
        },
    )
