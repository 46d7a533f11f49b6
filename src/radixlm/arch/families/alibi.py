"""Models without rotation: BLOOM (arXiv:2211.05100) and MPT with ALiBi, XGLM (arXiv:2112.10668)
with sinusoidal positions, and the first GPT with learned ones."""

import math

from radixlm.arch.config import Config
from radixlm.arch.families.builders import activation, attention, build_decoder
from radixlm.arch.names import Named, Names
from radixlm.arch.recipes import GroupedQkv, transposed
from radixlm.arch.spec import AttentionExtras, Decoder, Mlp, Norm

_H = "transformer.h.{i}."
# GPT and GPT-2 call a linear map of [in, out] a convolution
CONV_LAYER: Names = {
    "mixer.qkv": Named((_H + "attn.c_attn",), transposed),
    "mixer.o": Named((_H + "attn.c_proj",), transposed),
    "ffn.up1": Named((_H + "mlp.c_fc",), transposed),
    "ffn.down": Named((_H + "mlp.c_proj",), transposed),
}
_BLOCK = "transformer.blocks.{i}."


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """ALiBi (arXiv:2108.12409): a geometric sequence of slopes. Where the number of heads is not a
    power of two, every other slope of the next finer sequence follows."""
    power = 2 ** math.floor(math.log2(heads))
    base = 2.0 ** -(2.0 ** -(math.log2(power) - 3))
    slopes = [base**n for n in range(1, power + 1)]
    finer = 2.0 ** -(2.0 ** -(math.log2(2 * power) - 3))
    slopes += [finer**n for n in range(1, 2 * (heads - power), 2)]
    return tuple(slopes)


def bloom(c: Config) -> Decoder:
    heads, dim = c.num_attention_heads, c.divide("hidden_size", "num_attention_heads")
    extras = AttentionExtras(alibi_slopes=alibi_slopes(heads))
    norm = Norm(c.layer_norm_epsilon, "layer", bias=True)
    mixer = attention(
        c, kv_heads=heads, head_dim=dim, rope=None, qkv_bias=True, o_bias=True, extras=extras
    )
    return build_decoder(
        c,
        mixer,
        Mlp(4 * c.hidden_size, "gelu_tanh", gated=False, bias=True),
        norm=norm,
        # normalized inputs as residuals, with factors of one, or the usual ones
        layout="scaled_post" if c.apply_residual_connection_post_layernorm else "pre",
        embed_norm=norm,
        names={
            "embed": "transformer.word_embeddings",
            "embed_norm": "transformer.word_embeddings_layernorm",
            "norm": "transformer.ln_f",
            "norm1": _H + "input_layernorm",
            "norm2": _H + "post_attention_layernorm",
            "mixer.qkv": Named((_H + "self_attention.query_key_value",), GroupedQkv(heads, dim)),
            "mixer.o": _H + "self_attention.dense",
            "ffn.up1": _H + "mlp.dense_h_to_4h",
            "ffn.down": _H + "mlp.dense_4h_to_h",
        },
    )


def _mpt_slopes(heads: int) -> tuple[float, ...]:
    power = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** -(n * 8 / power) for n in range(1, power + 1)]  # not alibi_bias_max
    if power != heads:
        slopes = [*slopes[1::2], *slopes[::2]][:heads]
    return tuple(slopes)


def mpt(c: Config) -> Decoder:
    c.refuse("logit_scale")
    how = c.attn_config
    if not how.get("alibi", True) or how.get("qk_ln") or how.get("prefix_lm"):
        raise c.error("attn_config", "asks for other positions than ALiBi, qk_ln or prefix_lm")
    heads = c.num_attention_heads
    extras = AttentionExtras(alibi_slopes=_mpt_slopes(heads), clip_qkv=_clip(how))
    scale = how.get("softmax_scale")
    return build_decoder(
        c,
        attention(c, kv_heads=heads, rope=None, scale=scale, extras=extras),
        Mlp(4 * c.hidden_size, "gelu", gated=False),
        norm=Norm(c.layer_norm_epsilon, "layer"),
        names={
            "embed": "transformer.wte",
            "norm": "transformer.norm_f",
            "norm1": _BLOCK + "norm_1",
            "norm2": _BLOCK + "norm_2",
            "mixer.qkv": _BLOCK + "attn.Wqkv",
            "mixer.o": _BLOCK + "attn.out_proj",
            "ffn.up1": _BLOCK + "ffn.up_proj",
            "ffn.down": _BLOCK + "ffn.down_proj",
        },
    )


def _clip(how: dict[str, float]) -> float:
    return float(how.get("clip_qkv") or 0.0)


def xglm(c: Config) -> Decoder:
    c.refuse("add_cross_attention", False)
    layer = "model.layers.{i}."
    mixer = attention(c, kv_heads=c.num_attention_heads, rope=None, qkv_bias=True, o_bias=True)
    return build_decoder(
        c,
        mixer,
        Mlp(c.ffn_dim, activation(c, "activation_function"), gated=False, bias=True),
        norm=Norm(1e-5, "layer", bias=True),
        embed_scale=c.hidden_size**0.5 if c.scale_embedding else 1.0,
        positions=(0, 2),
        sinusoidal_positions=True,
        names={
            "norm": "model.layer_norm",
            "norm1": layer + "self_attn_layer_norm",
            "norm2": layer + "final_layer_norm",
            "mixer.o": layer + "self_attn.out_proj",
            "ffn.up1": layer + "fc1",
            "ffn.down": layer + "fc2",
        },
    )


def openai_gpt(c: Config) -> Decoder:
    # its "gelu" is the tanh approximation
    act = "gelu_tanh" if c.afn == "gelu" else activation(c, "afn")
    mixer = attention(c, kv_heads=c.num_attention_heads, rope=None, qkv_bias=True, o_bias=True)
    return build_decoder(
        c,
        mixer,
        Mlp(4 * c.hidden_size, act, gated=False, bias=True),
        norm=Norm(c.layer_norm_epsilon, "layer", bias=True),
        layout="post_sum",
        final_norm=Norm(0.0, "none", affine=False),
        positions=(c.max_position_embeddings, 0),
        names={
            "embed": "transformer.tokens_embed",
            "positions": "transformer.positions_embed",
            "norm1": _H + "ln_1",
            "norm2": _H + "ln_2",
            **CONV_LAYER,
        },
    )
