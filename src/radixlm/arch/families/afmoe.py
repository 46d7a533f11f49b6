"""AFMoE (Arcee Trinity): gated attention, sandwich norms, sigmoid routing."""

from __future__ import annotations

from radixlm.arch.config import Config
from radixlm.arch.families import builders as b
from radixlm.arch.names import LAYER, Named
from radixlm.arch.recipes import GatedQkv
from radixlm.arch.spec import Attention, AttentionExtras, Decoder, Mlp

_ATTENTION = LAYER + "self_attn."


def afmoe(c: Config) -> Decoder:
    bias = c.attention_bias
    shared = c.moe_intermediate_size * c.num_shared_experts
    sparse = b.moe(
        c,
        score="sigmoid",
        correction=True,
        renorm=True,
        scale=c.route_scale,
        shared=Mlp(shared, b.activation(c)) if shared else None,
    )

    def mixer(i: int) -> Attention:
        every = c.global_attn_every_n_layers
        span = b.window(c, i) if c.layer_types else c.sliding_window if (i + 1) % every else 0
        position = b.rope(c, b.head_dim(c)) if span else None
        # the gate has no bias: beside projections that have one it is a projection of its own
        return b.attention(
            c,
            rope=position,
            qkv_bias=bias,
            o_bias=bias,
            qk_norm="head",
            qk_norm_spec=b.rms(c),
            window=span,
            gate="" if bias else "head",
            extras=AttentionExtras(gate="channel") if bias else None,
        )

    fused = Named(
        tuple(f"{_ATTENTION}{part}_proj" for part in ("q", "gate", "k", "v")),
        GatedQkv(c.num_attention_heads, b.head_dim(c)),
    )
    return b.build_decoder(
        c,
        mixer,
        lambda i: b.mlp(c) if i < c.num_dense_layers else sparse,
        layout="sandwich",
        embed_scale=c.hidden_size**0.5 if c.mup_enabled else 1.0,
        names={
            "norm2": LAYER + "post_attention_layernorm",
            "norm3": LAYER + "pre_mlp_layernorm",
            "norm4": LAYER + "post_mlp_layernorm",
            **({"mixer.gate": _ATTENTION + "gate_proj"} if bias else {"mixer.qkv": fused}),
            "moe.router": LAYER + "mlp.router.gate",
            "moe.correction": LAYER + "mlp.expert_bias",
        },
    )
