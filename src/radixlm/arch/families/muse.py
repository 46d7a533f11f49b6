"""Muse: gated attention with queries and keys normalized without weights, and separate norms after
the branches; Spark adds gated residuals, and experts on fewer channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.families import builders as b
from radixlm.arch.names import LAYER, SANDWICH, Named, Names
from radixlm.arch.recipes import Scaled
from radixlm.arch.spec import Attention, AttentionExtras, Decoder, Norm
from radixlm.base.record import replace

_MLP = LAYER + "mlp."
SPARK: Names = {
    "block.gate1": LAYER + "post_attention_residual_gate.gate",
    "block.gate2": LAYER + "post_feedforward_residual_gate.gate",
    "moe.narrow": _MLP + "pre_expert_proj",
    "moe.width_norm": _MLP + "pre_expert_norm",
    "moe.expert_norm": _MLP + "experts.post_expert_norm",
    "moe.widen": _MLP + "post_expert_proj",
}


def _fourth(c: Config, layer: int) -> bool:
    """Whether the layer is a fourth one, counted from the last."""
    return bool((c.num_hidden_layers - 1 - layer) % 4 == 0)


def _muse(
    c: Config,
    ffn: b.Ffn | Callable[[int], b.Ffn],
    extras: AttentionExtras,
    post_norms: tuple[Norm, Norm],
    names: Names,
    **fields: Any,
) -> Decoder:
    """``fields`` are further fields of every block."""
    dim, bias, bare = b.head_dim(c), c.attention_bias, Norm(c.rms_norm_eps, affine=False)
    thetas, position = c.layer_rope_theta, b.rope(c, dim)
    cap = float(c.final_logit_softcapping)

    def mixer(i: int) -> Attention:
        sees_all = _fourth(c, i)
        has_rope = bool(thetas[i]) if thetas is not None else not sees_all
        return b.attention(
            c,
            rope=position if has_rope else None,
            qkv_bias=bias,
            o_bias=bias,
            scale=dim**-0.5 * c.qk_scale_factor,
            window=b.window(c, i) if c.layer_types else 0 if sees_all else c.sliding_window,
            qk_norm="head",
            qk_norm_spec=bare,
            extras=extras,
        )

    described = b.build_decoder(
        c,
        mixer,
        ffn,
        b.rms(c, offset=1.0),
        "sandwich",
        final_norm=b.rms(c),
        embed_norm=bare,
        embed_norm_text_only=True,
        logit_scale=c.output_multiplier,
        logit_softcap=cap,
        names={**SANDWICH, **names},
    )
    blocks = (replace(block, post_norms=post_norms, **fields) for block in described.blocks)
    return replace(described, blocks=tuple(blocks))


def muse_glimmer(c: Config) -> Decoder:
    behind = Norm(c.post_norm_eps, offset=1.0)
    gated = AttentionExtras(gate="channel")
    return _muse(c, b.mlp(c, act="hidden_activation"), gated, (behind, behind), {})


def muse_spark(c: Config) -> Decoder:
    behind = Norm(c.post_norm_eps, offset=1.0, scales_input=True)
    sparse = b.moe(
        c,
        score="sigmoid",
        correction=True,
        renorm=True,
        scale=c.routed_scaling_factor,
        width=c.moe_hidden_size,
        width_norm=b.rms(c, offset=1.0),
        expert_norm=behind,
    )
    kinds, dense = c.mlp_layer_types, b.mlp(c)
    bare = Norm(c.rms_norm_eps, affine=False)
    return _muse(
        c,
        lambda i: dense if kinds and kinds[i] == "dense" else sparse,
        AttentionExtras(gate="channel", out_norm=bare, out_norm_heads=True),
        (Norm(c.post_norm_eps, affine=False), behind),
        {**SPARK, "moe.router": Named((_MLP + "gate",), Scaled(c.output_multiplier))},
        gate_temperature=float(c.residual_gate_temperature),
    )
