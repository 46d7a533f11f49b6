"""Attention with convolutions: ZAYA (arXiv:2510.04476) and Inkling."""

from __future__ import annotations

from typing import Any

from radixlm.arch import spec
from radixlm.arch.config import Config
from radixlm.arch.families import builders as b
from radixlm.arch.families.hybrid import stacked
from radixlm.arch.names import LAYER, AnyOf, Named, Names
from radixlm.arch.recipes import Experts, FirstRows, interleaved_middle, interleaved_rows
from radixlm.base.record import replace

_ATTENTION, _QKV = LAYER + "self_attn.", LAYER + "self_attn.qkv_proj."
_KINDS = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
_THETAS = {"full_attention": 5_000_000.0, "sliding_attention": 10_000.0}


def zaya_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The usual names of layer types."""
    params = {_KINDS.get(key, key): p for key, p in (raw.get("rope_parameters") or {}).items()}
    ropes: dict[str, Any] = {}
    for kind, theta in _THETAS.items():
        own = params[kind] if isinstance(params.get(kind), dict) else {}
        ropes[kind] = {"partial_rotary_factor": 0.5, "rope_theta": theta, **own}
    kinds = raw.get("layer_types")
    kinds = [_KINDS.get(kind, kind) for kind in kinds] if isinstance(kinds, list) else None
    return {**raw, "rope_parameters": ropes, "layer_types": kinds}


def _scales(role: str, stored: str) -> Names:
    """Learned factors of the residual and of a branch."""
    parts = {"stream": "residual", "branch": "hidden_states"}
    return {
        f"{role}.{part}_{what}": f"{LAYER}{stored}.{name}_{what}"
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


def zaya(c: Config) -> spec.Decoder:
    """Each token takes one expert or none; a router also reads the router's state of the layer
    before."""
    c.refuse("num_experts_per_tok", 1)
    dim, bias, norm = b.head_dim(c), c.attention_bias, b.rms(c)
    for key in ("cca_time0", "cca_time1"):
        if not isinstance(c.get(key), int) or not 1 <= c.get(key) <= 64:
            raise c.error(key, f"= {c.get(key)!r} must be a small positive integer")
    if dim * (c.num_key_value_heads or c.num_attention_heads) % 2:
        raise c.error("head_dim", f"= {dim} leaves no half of the values")
    first = b.moe(
        c,
        correction=True,
        zero_experts=1,
        zero_experts_are_identity=False,
        deep_router=spec.DeepRouter(c.router_hidden_size, norm, False),
    )
    chained = replace(first, deep_router=spec.DeepRouter(c.router_hidden_size, norm, True))

    def block(i: int) -> spec.Block:
        kind = c.layer_types[i] if c.layer_types else "full_attention"
        attends = b.attention(
            c,
            rope=b.rope(c, dim, kind, partial=True),
            qkv_bias=bias,
            o_bias=bias,
            window=b.window(c, i) if c.layer_types else 0,
        )
        mixer = spec.CompressedConvAttention(attends, (c.cca_time0, c.cca_time1))
        return spec.Block(mixer, chained if i else first, norm, affine_residual=True)

    blocks = [block(i) for i in range(c.num_hidden_layers)]
    bias = bool(c.lm_head_bias)
    return stacked(c, blocks, norm, ZAYA, embed_affine=True, head_bias=bias)


def inkling_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The usual names of layer types, and newer names of widths."""
    out, count = dict(raw), raw.get("num_hidden_layers", 66)
    if out.get("layer_types") is None:
        local = out.get("local_layer_ids")
        local = {i for i in range(count) if (i + 1) % 6} if local is None else set(local)
        out["layer_types"] = ["hybrid_sliding" if i in local else "hybrid" for i in range(count)]
    out["layer_types"] = [_KINDS.get(kind, kind) for kind in out["layer_types"]]
    if out.get("mlp_layer_types") is None:
        dense = out.get("dense_mlp_idx", 0)
        out["mlp_layer_types"] = ["dense" if i < dense else "sparse" for i in range(count)]
    if out.get("dense_intermediate_size") is not None:
        out["moe_intermediate_size"] = out.get("intermediate_size", 24576)
        out["intermediate_size"] = out["dense_intermediate_size"]
    for new_key, old_key in (
        ("sliding_window", "sliding_window_size"),
        ("conv_kernel_size", "sconv_kernel_size"),
        ("max_position_embeddings", "model_max_length"),
        ("logits_mup_width_multiplier", "embedding_multiplier"),
    ):
        if out.get(old_key) is not None:
            out[new_key] = out[old_key]
    return out


_ATTN, _LLM, _MLP = "model.llm.layers.{i}.attn.", "model.llm.layers.{i}.", LAYER + "mlp."
_WIDE = _LLM + "mlp."


def _either(part: str, stored: str) -> AnyOf:
    """A tensor of the attention under both naming schemes."""
    return AnyOf(_ATTENTION + part, _ATTN + stored)


def _inkling_names(c: Config) -> Names:
    shared, sinks = _MLP + "shared_experts.", Experts(c.n_shared_experts, 2)
    rows = FirstRows(spoken(c))
    return {
        "embed": AnyOf("model.embed_tokens", "model.llm.embed"),
        "embed_norm": AnyOf("model.embed_tokens.embed_norm", "model.llm.embed_norm"),
        "norm": AnyOf("model.norm", "model.llm.norm"),
        "head": AnyOf(*(Named((one,), rows) for one in ("lm_head", "model.llm.unembed"))),
        "norm1": AnyOf(LAYER + "input_layernorm", _LLM + "attn_norm"),
        "norm2": AnyOf(LAYER + "post_attention_layernorm", _LLM + "mlp_norm"),
        "mixer.qkv": AnyOf(
            tuple(f"{_ATTENTION}{one}_proj" for one in "qkv"),
            tuple(_ATTN + one for one in ("wq_du", "wk_dv", "wv_dv")),
        ),
        "mixer.o": _either("o_proj", "wo_ud"),
        "mixer.q_norm": _either("q_norm", "q_norm"),
        "mixer.k_norm": _either("k_norm", "k_norm"),
        "mixer.distance": _either("r_proj", "wr_du"),
        "mixer.profiles": _either("rel_logits_proj.proj", "rel_logits_proj.proj"),
        "mixer.k_conv": _either("k_sconv.conv1d", "k_sconv"),
        "mixer.v_conv": _either("v_sconv.conv1d", "v_sconv"),
        "mixer.out_conv": AnyOf(LAYER + "attn_sconv.conv1d", _LLM + "attn_sconv"),
        "mixer.ffn_conv": AnyOf(LAYER + "mlp_sconv.conv1d", _LLM + "mlp_sconv"),
        "ffn.up": AnyOf(
            (_MLP + "gate_proj", _MLP + "up_proj"), Named((_WIDE + "w13_dn",), interleaved_rows)
        ),
        "ffn.down": AnyOf(_MLP + "down_proj", _WIDE + "w2_md"),
        "ffn.out_scale": AnyOf(_MLP + "global_scale", _WIDE + "global_scale"),
        "moe.router": AnyOf(_MLP + "gate", _WIDE + "gate"),
        "moe.weight_scale": AnyOf(_MLP + "gate.global_scale", _WIDE + "gate.global_scale"),
        "moe.correction": AnyOf(_MLP + "gate.e_score_correction_bias", _WIDE + "gate.bias"),
        "moe.up": AnyOf(
            _MLP + "experts.gate_up_proj",
            Named((_WIDE + "experts.w13_weight",), interleaved_middle),
        ),
        "moe.down": AnyOf(_MLP + "experts.down_proj", _WIDE + "experts.w2_weight"),
        "moe.sink_up": AnyOf(
            Named((shared + "gate_proj", shared + "up_proj"), sinks),
            Named((_WIDE + "shared_experts.shared_w13_weight",), interleaved_middle),
        ),
        "moe.sink_down": AnyOf(shared + "down_proj", _WIDE + "shared_experts.shared_w2_weight"),
    }


def spoken(c: Config) -> int:
    """Tokens that may be sampled; the rows after them are padding."""
    return int(min(c.get("unpadded_vocab_size", c.vocab_size), c.vocab_size))


def inkling(c: Config) -> spec.Decoder:
    """Relative position bias; the shared experts' weights are normalized with the chosen ones'."""
    c.refuse("shared_expert_sink", True)
    norm, act, extent = b.rms(c), b.activation(c), c.rel_extent
    sparse = b.moe(
        c,
        score="sigmoid",
        correction=True,
        scale=c.route_scale,
        sinks=c.n_shared_experts,
    )
    dense = spec.Mlp(c.intermediate_size, act, out_scale=True)

    def block(i: int) -> spec.Block:
        span = b.window(c, i)
        dim = c.swa_head_dim if span else c.head_dim
        attends = b.attention(
            c,
            heads=c.swa_num_attention_heads if span else c.num_attention_heads,
            kv_heads=c.swa_num_key_value_heads if span else c.num_key_value_heads,
            head_dim=dim,
            rope=None,
            scale=1.0 / dim,
            window=span,
            qk_norm="head",
            qk_norm_spec=norm,
        )
        shape = (c.hidden_size, c.conv_kernel_size, c.d_rel, span or extent)
        grows = 0 if span else c.get("log_scaling_n_floor", 0)
        mixer = spec.RelativeAttention(attends, *shape, grows, c.log_scaling_alpha)
        return spec.Block(mixer, sparse if c.mlp_layer_types[i] == "sparse" else dense, norm)

    return stacked(
        c.replace(vocab_size=spoken(c)),
        [block(i) for i in range(c.num_hidden_layers)],
        norm,
        _inkling_names(c),
        tied=False,
        extra_vocab_rows=c.vocab_size - spoken(c),
        embed_norm=norm,
        embed_norm_text_only=True,
        logit_scale=1.0 / c.logits_mup_width_multiplier,
    )
