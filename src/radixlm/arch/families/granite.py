"""Granite and its variants: multipliers on embeddings, attention, residuals and logits."""

from __future__ import annotations

from collections.abc import Callable

from radixlm.arch.config import Config
from radixlm.arch.families import builders as b
from radixlm.arch.names import LAYER, AnyOf, Named, Names
from radixlm.arch.recipes import Scaled
from radixlm.arch.spec import Attention, Decoder, Mlp, Moe
from radixlm.base.record import replace


def multiplied(
    c: Config, mixer: b.Mixer | Callable[[int], b.Mixer], ffn: b.Ffn, names: Names | None = None
) -> Decoder:
    """The multipliers of the embeddings, the residual branches and the logits."""
    return b.build_decoder(
        c,
        mixer,
        ffn,
        residual=c.residual_multiplier,
        embed_scale=c.embedding_multiplier,
        logit_scale=1 / c.logits_scaling,
        names=names,
    )


def _attention(c: Config) -> Attention:
    bias = c.attention_bias
    return b.attention(c, scale=c.attention_multiplier, qkv_bias=bias, o_bias=bias)


def _sinking(c: Config) -> Callable[[int], Attention]:
    """Attention by layer, with sinks, windows and a rotation base for each layer (0 = no
    rotation)."""
    thetas = c.layer_rope_theta

    def mixer(i: int) -> Attention:
        span = b.window(c, i) if c.layer_types else c.sliding_window if i % 4 else 0
        position = b.rope(c, b.head_dim(c))
        if thetas:
            position = replace(position, theta=float(thetas[i] or position.theta))
        has_rope = not thetas or thetas[i]
        return replace(_attention(c), sinks=True, window=span, rope=position if has_rope else None)

    return mixer


def _experts(c: Config, shared: int = 0) -> Moe:
    share = Mlp(shared, b.activation(c)) if shared else None
    return b.moe(c, inner=c.intermediate_size, score="softmax_topk", shared=share)


_MOE = LAYER + "block_sparse_moe."
MOE_NAMES: Names = {
    "moe.router": AnyOf(_MOE + "router.layer", _MOE + "router"),
    "moe.up": AnyOf(
        _MOE + "input_linear",
        _MOE + "experts.gate_up_proj",
        (_MOE + "experts.{e}.gate_proj", _MOE + "experts.{e}.up_proj"),  # quantized
    ),
    "moe.down": AnyOf(
        *(_MOE + name for name in ("output_linear", "experts.down_proj", "experts.{e}.down_proj"))
    ),
    "moe.shared.up": AnyOf(
        LAYER + "shared_mlp.input_linear",
        (LAYER + "shared_mlp.gate_proj", LAYER + "shared_mlp.up_proj"),  # GGUF
    ),
    "moe.shared.down": LAYER + "shared_mlp.output_linear",
}


def granite(c: Config) -> Decoder:
    return multiplied(c, _attention(c), b.mlp(c, bias=c.mlp_bias))


def granite_moe(c: Config) -> Decoder:
    return multiplied(c, _attention(c), _experts(c), MOE_NAMES)


def granite_moe_shared(c: Config) -> Decoder:
    return multiplied(c, _attention(c), _experts(c, c.shared_intermediate_size), MOE_NAMES)


def granite_swa(c: Config) -> Decoder:
    return multiplied(c, _sinking(c), b.mlp(c, bias=c.mlp_bias))


def granite_moe_swa(c: Config) -> Decoder:
    return multiplied(c, _sinking(c), _experts(c, c.shared_intermediate_size), MOE_NAMES)


def hyperclova_x(c: Config) -> Decoder:
    scale = c.get("attention_multiplier", b.head_dim(c) ** -0.5)
    described = multiplied(c, replace(_attention(c), scale=scale), b.mlp(c, bias=c.mlp_bias))
    described = replace(described, logit_scale=c.logits_scaling)
    if not c.use_post_norm:
        return described
    # The norm after a branch cancels a factor before it, so its weight is multiplied instead.
    blocks = tuple(replace(block, layout="sandwich", residual=1.0) for block in described.blocks)
    factor = Scaled(c.residual_multiplier)
    names: Names = {
        "norm2": Named((LAYER + "post_norm1",), factor),
        "norm3": LAYER + "post_attention_layernorm",
        "norm4": Named((LAYER + "post_norm2",), factor),
    }
    return replace(described, blocks=blocks, names=names)
