"""CTRL (arXiv:1909.05858) with sinusoidal positions, JetMoe (arXiv:2404.07413) with experts in the
attention, and Doge with dynamic mask attention."""

from radixlm.arch.config import Config
from radixlm.arch.families import builders as b
from radixlm.arch.names import LAYER, Names
from radixlm.arch.spec import AttentionExtras, Decoder, Mlp, Norm
from radixlm.base.record import replace

_LAYER = "transformer.h.{i}."
_ATTENTION = _LAYER + "multi_head_attention."


def ctrl(c: Config) -> Decoder:
    names: Names = {
        "embed": "transformer.w",
        "norm": "transformer.layernorm",
        "norm1": _LAYER + "layernorm1",
        "norm2": _LAYER + "layernorm2",
        "mixer.qkv": tuple(f"{_ATTENTION}W{one}" for one in "qkv"),
        "mixer.o": _ATTENTION + "dense",
        "ffn.up1": _LAYER + "ffn.0",
        "ffn.down": _LAYER + "ffn.2",
    }
    return b.build_decoder(
        c,
        b.attention(c, rope=None, qkv_bias=True, o_bias=True),
        Mlp(c.dff, "relu", gated=False, bias=True),
        Norm(1e-6, "layer", bias=True),
        final_norm=Norm(c.layer_norm_epsilon, "layer", bias=True),
        embed_scale=c.hidden_size**0.5,
        positions=(c.max_position_embeddings, 0),
        sinusoidal_positions=True,
        sinusoid_steps=c.hidden_size // 2,
        head_bias=True,
        names=names,
    )


def jetmoe(c: Config) -> Decoder:
    heads = c.num_key_value_heads * c.num_experts_per_tok
    at, ffn = LAYER + "self_attention.", LAYER + "mlp."
    names: Names = {
        "mixer.kv": at + "kv_proj",
        "mixer.router": at + "experts.router.layer",
        "mixer.q_experts": at + "experts.input_linear.weight",
        "mixer.o_experts": at + "experts.output_linear.weight",
        "mixer.bias": at + "experts.bias",
        "moe.router": ffn + "router.layer",
        "moe.up": ffn + "input_linear.weight",
        "moe.down": ffn + "output_linear.weight",
        "moe.out_bias": ffn + "bias",
    }
    return b.build_decoder(
        c,
        b.attention(
            c, heads=heads, head_dim=c.kv_channels, extras=AttentionExtras(experts=c.num_experts)
        ),
        b.moe(
            c,
            inner=c.intermediate_size,
            act=b.activation(c, "activation_function"),
            score="softmax_topk",
            out_bias=True,
        ),
        Norm(1e-6),  # of the blocks, which do not follow rms_norm_eps
        final_norm=Norm(c.rms_norm_eps),
        names=names,
    )


def doge(c: Config) -> Decoder:
    """Dynamic mask attention (arXiv:2508.02124). Doge's experts are not supported: in a prompt the
    class routes each token by the scores of others."""
    c.refuse("is_moe", False)
    c.refuse("sliding_window")
    if not isinstance(c.keep_window_size, int) or c.keep_window_size < 1:
        raise c.error("keep_window_size", f"= {c.keep_window_size!r} must be a positive integer")
    bias, attn = c.attention_bias, LAYER + "self_attn."
    mixer = b.attention(
        c,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        qk_norm_spec=b.rms(c),
        extras=AttentionExtras(dynamic_mask_topk=c.keep_window_size),
    )
    names: Names = {
        "mixer.values.step": attn + "dt_proj",
        "mixer.values.rate": attn + "A",
        "block.kept1": LAYER + "input_residual",
        "block.kept2": LAYER + "post_attention_residual",
    }
    described = b.build_decoder(c, mixer, b.mlp(c, bias=c.mlp_bias), names=names)
    blocks = tuple(replace(block, residual_channels=True) for block in described.blocks)
    return replace(described, blocks=blocks)
