"""Attention behind convolutions: ZAYA."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.families.builders import (
    attention,
    family,
    head_dim,
    moe,
    published_form,
    rms,
    rope,
    window,
)
from radixlm.arch.families.hybrid import stacked
from radixlm.arch.names import LAYER, Names
from radixlm.arch.spec import Block, CompressedAttention, Decoder, DeepRouter

_ATTENTION, _QKV = LAYER + "self_attn.", LAYER + "self_attn.qkv_proj."
_KINDS = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
_THETAS = {"full_attention": 5_000_000.0, "sliding_attention": 10_000.0}


@published_form("zaya")
def _zaya_form(raw: dict[str, Any]) -> dict[str, Any]:
    """Layer types by their usual names."""
    given = {_KINDS.get(key, key): p for key, p in (raw.get("rope_parameters") or {}).items()}
    turns: dict[str, Any] = {}
    for kind, theta in _THETAS.items():
        own = given[kind] if isinstance(given.get(kind), dict) else {}
        turns[kind] = {"partial_rotary_factor": 0.5, "rope_theta": theta, **own}
    kinds = raw.get("layer_types")
    kinds = [_KINDS.get(kind, kind) for kind in kinds] if isinstance(kinds, list) else None
    return {**raw, "rope_parameters": turns, "layer_types": kinds}


def _scales(ours: str, theirs: str) -> Names:
    """Of one sum of the residual and a branch."""
    parts = {"stream": "residual", "branch": "hidden_states"}
    return {
        f"{ours}.{part}_{what}": f"{LAYER}{theirs}.{name}_{what}"
        for part, name in parts.items()
        for what in ("scale", "bias")
    }


ZAYA: Names = {
    "embed_affine.scale": "model.input_hidden_states_scale",
    "embed_affine.bias": "model.input_hidden_states_bias",
    "mixer.qk": (_QKV + "q_proj", _QKV + "k_proj"),
    "mixer.current": _QKV + "v_proj_current",
    "mixer.late": _QKV + "v_proj_delayed",
    "mixer.conv": _QKV + "conv_qk_depthwise",
    "mixer.grouped": _QKV + "conv_qk_grouped",
    "mixer.key_scale": _ATTENTION + "qk_norm.temp",
    **_scales("affine1", "post_attention_residual_scale"),
    **_scales("affine2", "post_mlp_residual_scale"),
    "moe.deep_router.narrow": LAYER + "mlp.gate.down_proj",
    "moe.deep_router.before": LAYER + "mlp.gate.router_states_scale",
    "moe.deep_router.norm": LAYER + "mlp.gate.router_mlp.norm",
    "moe.deep_router.first": LAYER + "mlp.gate.router_mlp.fc1",
    "moe.deep_router.second": LAYER + "mlp.gate.router_mlp.fc2",
    "moe.deep_router.out": LAYER + "mlp.gate.router_mlp.out_proj",
    "moe.correction": LAYER + "mlp.gate.balancing_biases",
}


@family("ZayaForCausalLM")
def zaya(c: Config) -> Decoder:
    """Each token takes one expert, or none; routers hand what they saw on to the next layer's."""
    c.refuse("num_experts_per_tok", 1)
    dim, bias, norm = head_dim(c), c.attention_bias, rms(c)
    for key in ("cca_time0", "cca_time1"):
        if not isinstance(c.get(key), int) or not 1 <= c.get(key) <= 64:
            raise c.error(key, f"= {c.get(key)!r} must be a small positive integer")
    if dim * (c.num_key_value_heads or c.num_attention_heads) % 2:
        raise c.error("head_dim", f"= {dim} leaves no half of the values")
    first = moe(
        c,
        correction=True,
        zero_experts=1,
        zero_gives=False,
        deep_router=DeepRouter(c.router_hidden_size, norm, False),
    )
    chained = replace(first, deep_router=DeepRouter(c.router_hidden_size, norm, True))

    def block(i: int) -> Block:
        kind = c.layer_types[i] if c.layer_types else "full_attention"
        attends = attention(
            c,
            rope=rope(c, dim, kind, partial=True),
            qkv_bias=bias,
            o_bias=bias,
            window=window(c, i) if c.layer_types else 0,
        )
        mixer = CompressedAttention(attends, (c.cca_time0, c.cca_time1))
        return Block(mixer, chained if i else first, norm, affine_residual=True)

    blocks = [block(i) for i in range(c.num_hidden_layers)]
    bias = bool(c.lm_head_bias)
    return stacked(c, blocks, norm, ZAYA, embed_affine=True, head_bias=bias)
