"""K2 Horizon (also as xLLM) and Spark 2.5: Llama with gates on what the attention heads read."""

from __future__ import annotations

import math

from radixlm.arch.config import Config
from radixlm.arch.families import builders as b
from radixlm.arch.names import LAYER, SPLIT_QKV, AnyOf, Named, Names
from radixlm.arch.recipes import PerHead, Scaled
from radixlm.arch.spec import AttentionExtras, Decoder, Mlp, Norm, Rope, RopeScaling

_ATTENTION = LAYER + "self_attn."
_GATE = _ATTENTION + "gate_proj"


def spark2_5(c: Config) -> Decoder:
    """A gate for each head; layers with a window have a rope of their own."""
    count, bias = c.num_hidden_layers, c.attention_bias
    kinds = c.layer_types or [("full" if i % 4 == 3 else "sliding") for i in range(count)]
    kinds = [kind.removesuffix("_attention") + "_attention" for kind in kinds]
    layers, dim = c.replace(layer_types=kinds), b.head_dim(c)
    act = c.get("gate_attn_act_mode", "sigmoid")
    if act not in ("sigmoid", "silu"):
        raise c.error("gate_attn_act_mode", f"= {act!r} must be 'sigmoid' or 'silu'")
    has_gate = c.get("headwise_attn_output_gate", True)
    extras = AttentionExtras(gate="head", gate_act=act, gate_bias=bias) if has_gate else None
    names: Names = {
        "embed": AnyOf("model.embedding", "model.embed_tokens"),
        "mixer.qkv": AnyOf(_ATTENTION + "q_k_v_proj", SPLIT_QKV),
        "mixer.gate": _ATTENTION + "g_proj",
        "mixer.o": _ATTENTION + "out_proj",
    }

    def mixer(i: int) -> b.Mixer:
        has_types = "rope_type" not in c.rope_parameters
        rope = b.rope(c, dim, kinds[i] if has_types else "", partial=True)
        window = b.window(layers, i)
        return b.attention(c, rope=rope, window=window, qkv_bias=bias, o_bias=bias, extras=extras)

    return b.build_decoder(c, mixer, b.mlp(c, bias=c.mlp_bias), names=names)


def _horizon_rope(c: Config, dim: int) -> Rope:
    """The first ``rope_head_dim`` / 2 pairs (i, i + dim / 2) rotate."""
    turned = c.get("rope_head_dim") or dim
    if turned == dim:
        return b.rope(c, dim)
    p = c.rope_parameters
    if p["rope_type"] != "default" or not 0 < turned < dim or turned % 2:
        raise c.error("rope_head_dim", f"= {turned!r} must be even, below {dim}, and not scaled")
    share = RopeScaling("proportional", (("partial_rotary_factor", turned / dim),))
    return Rope(dim, float(p["rope_theta"]) ** (dim / turned), share)


def k2_horizon(c: Config) -> Decoder:
    """Gates of each channel, norms of each head, and experts that have a correction bias."""
    for key in ("mova_num_experts", "num_values"):
        c.refuse(key, None, 0)
    c.refuse("layernorm_num_groups", None, 1)
    c.refuse("router_score_func", "sigmoid", "softmax")
    dim, heads, kv_heads = b.head_dim(c), c.num_attention_heads, c.num_key_value_heads
    gate = c.get("attention_gate_func")
    if gate is None and c.get("apply_attn_gate"):
        gate = c.get("attn_gate_func", "silu")
    if gate not in (None, "silu", "softplus"):
        raise c.error("attention_gate_func", f"= {gate!r} must be 'silu' or 'softplus'")
    # softplus with a slope of log(2): softplus(log(2) * x) / log(2)
    stretch = math.log(2) if gate == "softplus" else 1.0
    extras = AttentionExtras(gate="channel", gate_act=gate, out_scale=1 / stretch) if gate else None
    norm, bias = Norm(c.rms_norm_eps), c.attention_bias
    mixer = b.attention(
        c,
        rope=_horizon_rope(c, dim),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="each" if c.get("query_key_norm", False) else "",
        qk_norm_spec=norm,
        window=(c.get("sliding_window") or 0) if c.get("use_sliding_window", False) else 0,
        extras=extras,
    )
    every, dense = c.get("decoder_sparse_step", 1), c.get("mlp_only_layers") or []
    shared = Mlp(c.get("moe_intermediate_size", 0) * (c.get("num_shared_experts") or 0), "silu")

    def ffn(i: int) -> b.Ffn:
        if not c.get("num_experts") or i in dense or (i + 1) % every:
            return b.mlp(c)
        return b.moe(
            c,
            score=c.get("router_score_func", "softmax"),
            correction=bool(c.get("moe_gate_bias", False)),
            renorm=c.get("norm_topk_prob", False),
            scale=float(c.get("router_scaling_factor") or 1.0),
            shared=shared if shared.inner else None,
        )

    names: Names = {
        "mixer.q_norm": Named((_ATTENTION + "q_norm",), PerHead(heads)),
        "mixer.k_norm": Named((_ATTENTION + "k_norm",), PerHead(kv_heads or heads)),
        "mixer.gate": Named((_GATE,), Scaled(stretch)) if gate == "softplus" else _GATE,
        "moe.correction": LAYER + "mlp.gate.bias",
    }
    return b.build_decoder(c, mixer, ffn, names=names)
