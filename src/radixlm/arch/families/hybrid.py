"""Mamba 1 and 2 (arXiv:2312.00752, 2405.21060) and hybrids with attention: Falcon Mamba, Jamba
(arXiv:2403.19887), Bamba, Granite hybrids, Falcon H1, Nemotron H (arXiv:2504.03624)."""

from __future__ import annotations

import math
from typing import Any

from radixlm.arch import spec
from radixlm.arch.config import Config
from radixlm.arch.config_defaults import CANONICAL
from radixlm.arch.families import builders as b
from radixlm.arch.families.granite import MOE_NAMES, multiplied
from radixlm.arch.names import LAYER, AnyOf, Named, Names
from radixlm.arch.recipes import Scaled, ScaleRows

Mixer = spec.Attention | spec.StateMixer | spec.ParallelHybrid


def mamba_names(prefix: str) -> Names:
    """The tensors of a Mamba 1 or 2 below ``prefix``."""
    parts = {"inp": "in_proj", "conv": "conv1d", "norm": "norm", "out": "out_proj"}
    parts |= {"x_proj": "x_proj", "dt_proj": "dt_proj", "a_log": "A_log", "d": "D"}
    parts |= {"dt_bias": "dt_bias", "dt_norm": "dt_layernorm", "b_norm": "b_layernorm"}
    return {f"state.{role}": prefix + stored for role, stored in parts.items()} | {
        "state.c_norm": prefix + "c_layernorm"
    }


def stacked(
    c: Config, blocks: list[spec.Block], norm: spec.Norm, names: Names, **fields: Any
) -> spec.Decoder:
    fields.setdefault("tied", bool(c.tie_word_embeddings))
    longest = c.max_position_embeddings
    return spec.Decoder(
        c.vocab_size, c.hidden_size, tuple(blocks), norm, longest, names=names, **fields
    )


def _rank(c: Config, key: str) -> int:
    """Rank of the time step; "auto" = hidden_size / 16."""
    rank = c.get(key, "auto")
    return int(-(-c.hidden_size // 16) if rank == "auto" else rank)


def _limit(c: Config) -> tuple[float, float]:
    low, high = c.get("time_step_limit", (0.0, math.inf))  # infinity may be stored as a string
    return float(low), float(high)


_BACKBONE: Names = {
    "embed": "backbone.embeddings",
    "norm": "backbone.norm_f",
    "norm1": "backbone.layers.{i}.norm",
    **mamba_names("backbone.layers.{i}.mixer."),
}


def mamba(c: Config) -> spec.Decoder:
    inner_norm = c.get("mixer_rms_eps")
    mixer = spec.Mamba1(
        c.get("intermediate_size") or c.expand * c.hidden_size,
        c.state_size,
        _rank(c, "time_step_rank"),
        c.conv_kernel,
        c.use_conv_bias,
        c.use_bias,
        None if inner_norm is None else spec.Norm(inner_norm, affine=False),
        act=b.activation(c),
    )
    norm = spec.Norm(c.layer_norm_epsilon)
    blocks = [spec.Block(mixer, None, norm)] * c.num_hidden_layers
    return stacked(c, blocks, norm, _BACKBONE)


def mamba2(c: Config) -> spec.Decoder:
    norm = spec.Norm(c.layer_norm_epsilon)
    if c.num_heads * c.head_dim != int(c.expand * c.hidden_size):
        raise c.error("num_heads", "times 'head_dim' is not 'expand' times 'hidden_size'")
    mixer = spec.Mamba2(
        c.num_heads,
        c.head_dim,
        c.state_size,
        c.n_groups,
        c.conv_kernel,
        norm,
        c.n_groups,
        conv_bias=c.use_conv_bias,
        bias=c.use_bias,
        out_bias=c.use_bias,
        dt_limit=_limit(c),
        act=b.activation(c),
    )
    blocks = [spec.Block(mixer, None, norm)] * c.num_hidden_layers
    return stacked(c, blocks, norm, _BACKBONE)


def _is_attention(c: Config, layer: int, otherwise: bool) -> bool:
    kinds = c.get("layers_block_type") or c.get("layer_types")
    if not kinds:
        return otherwise
    return kinds[layer] in ("attention", "full_attention")


def jamba(c: Config) -> spec.Decoder:
    state = spec.Mamba1(
        c.mamba_expand * c.hidden_size,
        c.mamba_d_state,
        _rank(c, "mamba_dt_rank"),
        c.mamba_d_conv,
        c.mamba_conv_bias,
        c.mamba_proj_bias,
        b.rms(c),
        act=b.activation(c),
    )
    attends = b.attention(c, rope=None)
    sparse = b.moe(c, inner=c.intermediate_size) if c.num_experts > 1 else b.mlp(c)

    def mixer(i: int) -> Mixer:
        is_attention = i % c.attn_layer_period == c.attn_layer_offset
        return attends if _is_attention(c, i, is_attention) else state

    def ffn(i: int) -> b.Ffn:
        return sparse if i % c.expert_layer_period == c.expert_layer_offset else b.mlp(c)

    feed = LAYER + "feed_forward."
    split = (feed + "experts.{e}.gate_proj", feed + "experts.{e}.up_proj")
    names: Names = {
        **mamba_names(LAYER + "mamba."),
        "norm": AnyOf("model.final_layernorm", "model.norm"),
        "norm2": LAYER + "pre_ff_layernorm",
        "ffn.up": (feed + "gate_proj", feed + "up_proj"),
        "ffn.down": feed + "down_proj",
        "moe.router": feed + "router",
        "moe.up": AnyOf(split, feed + "experts.gate_up_proj"),
        "moe.down": AnyOf(feed + "experts.{e}.down_proj", feed + "experts.down_proj"),
    }
    return b.build_decoder(c, mixer, ffn, names=names)


def _mamba2_of(c: Config, inner: int = 0, **fields: Any) -> spec.Mamba2:
    """``inner``: channels, mamba_expand times the model's unless given."""
    fields.setdefault("norm", b.rms(c))
    fields.setdefault("norm_groups", c.mamba_n_groups)
    fields.setdefault("out_bias", c.mamba_proj_bias)
    size = c.get("mamba_d_head", "auto")
    return spec.Mamba2(
        c.mamba_n_heads,
        (inner or c.mamba_expand * c.hidden_size) // c.mamba_n_heads if size == "auto" else size,
        c.mamba_d_state,
        c.mamba_n_groups,
        c.mamba_d_conv,
        conv_bias=c.mamba_conv_bias,
        bias=c.mamba_proj_bias,
        dt_limit=_limit(c),
        act=b.activation(c),
        **fields,
    )


def bamba_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The class reads partial_rotary_factor from rope_parameters alone."""
    return {key: value for key, value in raw.items() if key != "partial_rotary_factor"}


def bamba(c: Config) -> spec.Decoder:
    state, bias = _mamba2_of(c), c.attention_bias
    position = b.rope(c, b.head_dim(c), partial=True)
    attends = b.attention(c, rope=position, qkv_bias=bias, o_bias=bias)
    listed = c.get("attn_layer_indices") or ()
    feed = LAYER + "feed_forward."
    names: Names = {
        **mamba_names(LAYER + "mamba."),
        "norm": AnyOf("model.final_layernorm", "model.norm"),
        "norm2": LAYER + "pre_ff_layernorm",
        "ffn.up": (feed + "gate_proj", feed + "up_proj"),
        "ffn.down": feed + "down_proj",
    }

    def mixer(i: int) -> Mixer:
        return attends if _is_attention(c, i, i in listed) else state

    return b.build_decoder(c, mixer, b.mlp(c, bias=c.mlp_bias), names=names)


def granite_hybrid(c: Config) -> spec.Decoder:
    state, bias = _mamba2_of(c), c.attention_bias
    has_rope = c.get("position_embedding_type") == "rope"
    attends = b.attention(
        c,
        scale=c.attention_multiplier,
        rope=b.rope(c, b.head_dim(c)) if has_rope else None,
        qkv_bias=bias,
        o_bias=bias,
    )
    shared = spec.Mlp(c.shared_intermediate_size, b.activation(c))
    ffn: b.Ffn = shared
    names: Names = {**MOE_NAMES, **mamba_names(LAYER + "mamba.")}
    if c.num_experts:
        ffn = b.moe(c, inner=c.intermediate_size, score="softmax_topk", shared=shared)
    else:
        dense = {"ffn.up": MOE_NAMES["moe.shared.up"], "ffn.down": MOE_NAMES["moe.shared.down"]}
        names = {**names, **dense}

    def mixer(i: int) -> Mixer:
        return attends if _is_attention(c, i, False) else state

    return multiplied(c, mixer, ffn, names)


def falcon_h1(c: Config) -> spec.Decoder:
    """Both mixers in each layer; multipliers are multiplied into the rows of the weights."""
    inner = c.get("mamba_d_ssm") or c.mamba_expand * c.hidden_size
    state = _mamba2_of(
        c,
        inner,
        norm=b.rms(c) if c.mamba_rms_norm else None,
        gate_after_norm=c.mamba_norm_before_gate,
        out_bias=c.projectors_bias,
    )
    if inner != state.inner:
        raise c.error("mamba_d_ssm", "is not 'mamba_n_heads' times 'mamba_d_head'")
    bias = c.attention_bias
    attends = b.attention(c, qkv_bias=bias, o_bias=bias)
    heads, kv_heads = (n * attends.head_dim for n in (attends.heads, attends.kv_heads))
    groups, into = state.groups * state.state, c.attention_in_multiplier
    gate, x, in_b, out_c, dt = c.ssm_multipliers or (1.0,) * 5
    first, down = c.mlp_multipliers or (1.0, 1.0)
    attn, feed, ssm = LAYER + "self_attn.", LAYER + "feed_forward.", LAYER + "mamba."
    qkv = ((heads, 1.0), (kv_heads, c.key_multiplier), (kv_heads, 1.0))
    rows = ((inner, gate), (inner, x), (groups, in_b), (groups, out_c), (state.heads, dt))
    up = ((c.intermediate_size, first), (c.intermediate_size, 1.0))
    names: Names = {
        **mamba_names(ssm),
        "norm": AnyOf("model.final_layernorm", "model.norm"),
        "norm2": LAYER + "pre_ff_layernorm",
        "mixer.qkv": Named(tuple(f"{attn}{p}_proj" for p in "qkv"), ScaleRows(qkv, into)),
        "mixer.o": Named((attn + "o_proj",), Scaled(c.attention_out_multiplier)),
        "state.inp": Named((ssm + "in_proj",), ScaleRows(rows, c.ssm_in_multiplier)),
        "state.out": Named((ssm + "out_proj",), Scaled(c.ssm_out_multiplier)),
        "ffn.up": Named((feed + "gate_proj", feed + "up_proj"), ScaleRows(up)),
        "ffn.down": Named((feed + "down_proj",), Scaled(down)),
    }
    return b.build_decoder(
        c,
        lambda i: spec.ParallelHybrid(attends, state),
        b.mlp(c, bias=c.mlp_bias),
        embed_scale=c.embedding_multiplier,
        logit_scale=c.lm_head_multiplier,
        names=names,
    )


_NEMOTRON_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_LONE = "backbone.layers.{i}."
_LONE_MIXER = _LONE + "mixer."
_NEMOTRON: Names = {
    **mamba_names(_LONE_MIXER),
    "embed": AnyOf("backbone.embeddings", "model.embeddings"),
    "norm": "backbone.norm_f",
    "norm1": _LONE + "norm",
    "mixer.qkv": tuple(f"{_LONE_MIXER}{one}_proj" for one in "qkv"),
    "mixer.o": _LONE_MIXER + "o_proj",
    "ffn.up1": _LONE_MIXER + "up_proj",
    "ffn.down": _LONE_MIXER + "down_proj",
    "moe.router": _LONE_MIXER + "gate",
    "moe.correction": _LONE_MIXER + "gate.e_score_correction_bias",
    "moe.up": AnyOf(_LONE_MIXER + "experts.{e}.up_proj", _LONE_MIXER + "experts.up_proj"),
    "moe.down": AnyOf(_LONE_MIXER + "experts.{e}.down_proj", _LONE_MIXER + "experts.down_proj"),
    "moe.narrow": _LONE_MIXER + "fc1_latent_proj",
    "moe.widen": _LONE_MIXER + "fc2_latent_proj",
    "moe.shared.up1": _LONE_MIXER + "shared_experts.up_proj",
    "moe.shared.down": _LONE_MIXER + "shared_experts.down_proj",
}


_NEMOTRON_KEYS = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_expand": "expand",
    "mamba_dt_min": "time_step_min",
    "mamba_dt_max": "time_step_max",
    "mamba_conv_bias": "use_conv_bias",
}


def nemotron_h_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Older names of keys, which take precedence."""
    return raw | {new: raw[old] for old, new in _NEMOTRON_KEYS.items() if old in raw}


def nemotron_h(c: Config) -> spec.Decoder:
    """Layers of one branch each: Mamba 2, attention, feed-forward or experts."""
    kinds = c.get("layers_block_type")
    kinds = kinds or [_NEMOTRON_KINDS.get(one, one) for one in c.hybrid_override_pattern]
    return _lone_branches(c, [_lone_block(c, kind) for kind in kinds])


def nemotron_puzzle_config(raw: dict[str, Any]) -> dict[str, Any]:
    """With the number of layers."""
    layers = raw.get("block_configs")
    count = {"num_hidden_layers": len(layers)} if isinstance(layers, list) else {}
    return {**count, **nemotron_h_config(raw)}


def nemotron_h_puzzle(c: Config) -> spec.Decoder:
    """Nemotron H whose layers each have values of their own in ``block_configs``."""
    layers = c.block_configs
    if not isinstance(layers, list) or len(layers) != c.num_hidden_layers:
        raise c.error(
            "block_configs", f"must have an entry for each of {c.num_hidden_layers} layers"
        )

    def block(own: dict[str, Any]) -> spec.Block:
        values = {CANONICAL.get(key, key): value for key, value in nemotron_h_config(own).items()}
        return _lone_block(c.replace(**values), own["block_type"])

    return _lone_branches(c, [block(own) for own in layers])


def _lone_branches(c: Config, blocks: list[spec.Block]) -> spec.Decoder:
    norm = spec.Norm(c.layer_norm_epsilon)
    return stacked(c, blocks, norm, _NEMOTRON, tied=False)  # whatever the config says


def _lone_block(c: Config, kind: str) -> spec.Block:
    """A layer of Nemotron H."""
    norm, act = spec.Norm(c.layer_norm_epsilon), b.activation(c, "mlp_hidden_act")
    if kind in ("linear_attention", "mamba"):
        state = spec.Mamba2(
            c.mamba_num_heads,
            c.mamba_head_dim,
            c.ssm_state_size,
            c.n_groups,
            c.conv_kernel,
            norm,
            c.n_groups,
            conv_bias=c.use_conv_bias,
            bias=c.use_bias,
            out_bias=c.use_bias,
            dt_limit=(c.time_step_min, math.inf),  # the class reads no time_step_limit
            act=b.activation(c, "mamba_hidden_act"),
        )
        return spec.Block(state, None, norm)
    if kind in ("full_attention", "attention"):
        return spec.Block(b.attention(c, rope=None), None, norm)
    if kind == "mlp":
        dense = spec.Mlp(c.intermediate_size, act, gated=False, bias=c.mlp_bias)
        return spec.Block(None, dense, norm)
    if kind != "moe":
        raise c.error("layers_block_type", f"has the unknown type {kind!r}")
    if width := c.get("moe_latent_size", 0):
        c.refuse("mlp_bias", False)
    shared = spec.Mlp(c.moe_shared_expert_intermediate_size, act, gated=False, bias=c.mlp_bias)
    return spec.Block(None, b.corrected_moe(c, shared, act=act, gated=False, width=width), norm)
