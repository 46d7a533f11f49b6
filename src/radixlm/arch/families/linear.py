"""Linear attention and short convolutions with some full attention: Qwen3-Next, Qwen 3.5, Lara
Mini, OLMo hybrid, Kimi Linear (arXiv:2510.26692), MiniMax (arXiv:2501.08313), LFM2 and 3,
RecurrentGemma (arXiv:2404.07839)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from radixlm.arch import spec
from radixlm.arch.config import Config
from radixlm.arch.families import builders as b
from radixlm.arch.families.deepseek import latent
from radixlm.arch.families.mixtral import W1_W3_W2
from radixlm.arch.families.moe import by_layer_type
from radixlm.arch.families.qwen import sparse_layers
from radixlm.arch.names import LAYER, AnyOf, Named, Names
from radixlm.arch.recipes import GroupedParts, flat
from radixlm.base.record import replace

_LINEAR, _ATTENTION, _MLP = LAYER + "linear_attn.", LAYER + "self_attn.", LAYER + "mlp."
Mixer = spec.Attention | spec.LatentAttention | spec.StateMixer


def _full_at(c: Config) -> Callable[[int], bool]:
    """Layers with full attention: by config.layer_types, or each full_attention_interval-th."""
    kinds, every = c.layer_types, c.get("full_attention_interval", 4)
    if not isinstance(every, int) or every < 1:
        raise c.error("full_attention_interval", f"= {every!r} must be a positive integer")
    return lambda i: kinds[i] == "full_attention" if kinds else (i + 1) % every == 0


def delta_net(c: Config, norm: spec.Norm | None = None, beta_scale: float = 1.0) -> spec.DeltaNet:
    """Gated DeltaNet of the config's linear layers."""
    return spec.DeltaNet(
        c.linear_num_key_heads,
        c.linear_num_value_heads,
        c.linear_key_head_dim,
        c.linear_value_head_dim,
        c.linear_conv_kernel_dim,
        norm or spec.Norm(c.rms_norm_eps),
        beta_scale,
        act=b.activation(c),
    )


def channel_delta(c: Config, heads: int, dim: int, width: int) -> spec.DeltaNet:
    """A delta net with a decay for each channel (KDA) and a sigmoid gate."""
    norm, act = b.rms(c), b.activation(c)
    return spec.DeltaNet(
        heads, heads, dim, dim, width, norm, gate_act="sigmoid", channel_decay=True, act=act
    )


DELTA: Names = {
    "state.conv": _LINEAR + "conv1d",
    "state.a_log": _LINEAR + "A_log",
    "state.dt_bias": _LINEAR + "dt_bias",
    "state.norm": _LINEAR + "norm",
    "state.out": _LINEAR + "out_proj",
    "state.qkv": _LINEAR + "in_proj_qkv",
    "state.gate": _LINEAR + "in_proj_z",
    "state.beta": _LINEAR + "in_proj_b",
    "state.decay": _LINEAR + "in_proj_a",
    "moe.shared.up": (_MLP + "shared_expert.gate_proj", _MLP + "shared_expert.up_proj"),
    "moe.shared.down": _MLP + "shared_expert.down_proj",
}


def gated_attention(c: Config) -> spec.Attention:
    """Half of the q projection gates the output; norms store weight - 1."""
    bias, position = c.attention_bias, b.rope(c, b.head_dim(c), partial=True)
    return b.attention(
        c,
        rope=position,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        qk_norm_spec=b.rms(c, offset=1.0),
        gate="head",
    )


def _qwen(c: Config, ffn: b.Ffn | Callable[[int], b.Ffn], names: Names) -> spec.Decoder:
    attends, state, is_full = gated_attention(c), delta_net(c), _full_at(c)
    return b.build_decoder(
        c, lambda i: attends if is_full(i) else state, ffn, b.rms(c, offset=1.0), names=names
    )


def qwen3_next(c: Config) -> spec.Decoder:
    shared = spec.Mlp(c.shared_expert_intermediate_size, b.activation(c))
    sparse = b.moe(c, renorm=c.norm_topk_prob, shared=shared, shared_gate=True)
    has_experts = sparse_layers(c)
    heads, ratio = c.linear_num_key_heads, c.linear_num_value_heads // c.linear_num_key_heads
    key, value = c.linear_key_head_dim, ratio * c.linear_value_head_dim
    qkvz, ba = (_LINEAR + "in_proj_qkvz",), (_LINEAR + "in_proj_ba",)
    sizes, pair = (key, key, value, value), (ratio, ratio)
    names: Names = {
        **DELTA,
        "state.qkv": AnyOf(Named(qkvz, GroupedParts(heads, sizes, (0, 1, 2))), DELTA["state.qkv"]),
        "state.gate": AnyOf(Named(qkvz, GroupedParts(heads, sizes, (3,))), DELTA["state.gate"]),
        "state.beta": Named(ba, GroupedParts(heads, pair, (0,))),
        "state.decay": Named(ba, GroupedParts(heads, pair, (1,))),
    }
    return _qwen(c, lambda i: sparse if has_experts(i) else b.mlp(c), names)


def qwen3_5(c: Config) -> spec.Decoder:
    return _qwen(c, b.mlp(c), DELTA)


def qwen3_5_moe(c: Config) -> spec.Decoder:
    shared = spec.Mlp(c.shared_expert_intermediate_size, b.activation(c))
    return _qwen(c, b.moe(c, renorm=True, shared=shared, shared_gate=True), DELTA)


_LARA = ("linear", "sliding", "linear", "full", "sliding")  # where config.layer_types is missing


def lara_mini(c: Config) -> spec.Decoder:
    """Delta nets, windows with positions, and full attention without. The parts of ``state`` are
    rows of one matrix, or stored apart."""
    state, bias = delta_net(c), c.attention_bias
    kinds = c.layer_types or [f"{_LARA[i % 5]}_attention" for i in range(c.num_hidden_layers)]
    sliding = b.attention(
        c,
        rope=b.rope(c, b.head_dim(c)),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        qk_norm_spec=b.rms(c),
        window=c.sliding_window,
    )
    mixers: dict[str, Mixer] = {
        "linear_attention": state,
        "sliding_attention": sliding,
        "full_attention": replace(sliding, rope=None, window=0),
    }
    if unknown := set(kinds) - mixers.keys():
        raise c.error("layer_types", f"has the unknown type {unknown.pop()!r}")
    key, value = state.k_heads * state.k_dim, state.v_heads * state.v_dim
    sizes, whole = (key, key, value, value, state.v_heads, state.v_heads), (_LINEAR + "in_proj",)
    parts = {"qkv": (0, 1, 2), "gate": (3,), "beta": (4,), "decay": (5,)}
    names: Names = {
        **DELTA,
        "state.norm": AnyOf(_LINEAR + "out_norm", _LINEAR + "norm"),
        **{
            role: AnyOf(Named(whole, GroupedParts(1, sizes, take)), DELTA[role])
            for role, take in ((f"state.{part}", take) for part, take in parts.items())
        },
    }
    shared = spec.Mlp(c.shared_expert_intermediate_size, b.activation(c))
    sparse = b.moe(c, renorm=c.norm_topk_prob, shared=shared)
    return b.build_decoder(c, lambda i: mixers[kinds[i]], sparse, names=names)


_BEFORE = ("input_layernorm", "attention_layer_norm", "post_attention_layernorm")


def olmo_hybrid_config(raw: dict[str, Any]) -> dict[str, Any]:
    """A theta of null means no rotation."""
    params = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = params.get("rope_theta", raw.get("rope_theta", 0)) if isinstance(params, dict) else 0
    return {**raw, "is_rotated": theta is not None}


def olmo_hybrid(c: Config) -> spec.Decoder:
    """Attention layers have norms after their branches, the others before."""
    scale = 2.0 if c.linear_allow_neg_eigval else 1.0
    state, bias = delta_net(c, norm=spec.Norm(1e-5), beta_scale=scale), c.attention_bias
    position = b.rope(c, b.head_dim(c)) if c.get("is_rotated", True) else None
    attends = b.attention(
        c, rope=position, qkv_bias=bias, o_bias=bias, qk_norm="row", qk_norm_spec=b.rms(c)
    )
    parts = {"conv": "conv1d", "a_log": "A_log", "dt_bias": "dt_bias", "norm": "o_norm"}
    parts |= {"out": "o_proj", "gate": "g_proj", "beta": "b_proj", "decay": "a_proj"}
    is_full = _full_at(c)
    convs = tuple(f"{_LINEAR}{one}_conv1d" for one in "qkv")
    names: Names = {
        **{f"state.{role}": _LINEAR + stored for role, stored in parts.items()},
        "state.qkv": tuple(f"{_LINEAR}{one}_proj" for one in "qkv"),
        "state.conv": AnyOf(convs, _LINEAR + "conv1d"),
        # the layers of the two kinds have different ones of these
        "norm1": AnyOf(*(LAYER + one for one in (*_BEFORE, "feedforward_layer_norm"))),
        "norm2": AnyOf(
            LAYER + "post_feedforward_layernorm",
            LAYER + "feedforward_layer_norm",
            LAYER + "post_attention_layernorm",
        ),
    }
    described = b.build_decoder(c, lambda i: attends if is_full(i) else state, names=names)
    blocks = tuple(
        replace(block, layout="post") if is_full(i) else block
        for i, block in enumerate(described.blocks)
    )
    return replace(described, blocks=blocks)


_KIMI_NAMES = {
    "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
}


def kimi_linear_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The class accepts both names of a key."""
    usual = {own: raw[name] for own, name in _KIMI_NAMES.items() if raw.get(name) is not None}
    return {**usual, **raw}


def kimi_linear(c: Config) -> spec.Decoder:
    """KDA delta nets, and latent attention without rotation."""
    c = _kimi_keys(c)
    state = channel_delta(c, c.linear_num_heads, c.linear_head_dim, c.linear_conv_kernel_dim)
    attends = replace(latent(c, interleaved=False), rope=None)
    shared = c.moe_intermediate_size * c.num_shared_experts
    groups = (c.num_expert_group, c.topk_group)
    sparse = b.corrected_moe(
        c, spec.Mlp(shared, b.activation(c)), renorm=c.moe_renormalize, groups=groups
    )
    kinds = c.layer_types
    return b.build_decoder(
        c,
        lambda i: attends if kinds[i] == "full_attention" else state,
        by_layer_type(c, sparse),
        names=KIMI,
        tied=False,  # whatever the config says
    )


def _kimi_keys(c: Config) -> Config:
    """The config with the keys that published checkpoints keep in a nested object, where layers are
    counted from 1."""
    own, count = c.get("linear_attn_config", {}), c.num_hidden_layers
    held = {"linear_head_dim": "head_dim", "linear_num_heads": "num_heads"}
    held["linear_conv_kernel_dim"] = "short_conv_kernel_size"
    values = {key: own.get(other, c.get(key)) for key, other in held.items()}
    if c.layer_types is None:
        full = {i - 1 for i in own["full_attn_layers"]} if "full_attn_layers" in own else None
        full = set(range(4, count, 4)) if full is None else full
        kinds = ["full_attention" if i in full else "linear_attention" for i in range(count)]
        values["layer_types"] = kinds
    if c.mlp_layer_types is None:
        first = c.get("first_k_dense_replace", 1)
        values["mlp_layer_types"] = ["dense" if i < first else "sparse" for i in range(count)]
    return c.replace(**values)


_KIMI_MOE = LAYER + "block_sparse_moe."
KIMI: Names = {
    "ffn.up": AnyOf(
        (_MLP + "gate_proj", _MLP + "up_proj"), (_KIMI_MOE + "gate_proj", _KIMI_MOE + "up_proj")
    ),
    "ffn.down": AnyOf(_MLP + "down_proj", _KIMI_MOE + "down_proj"),
    "state.qkv": tuple(f"{_ATTENTION}{one}_proj" for one in "qkv"),
    "state.conv": AnyOf(tuple(f"{_ATTENTION}{one}_conv1d" for one in "qkv"), _ATTENTION + "conv1d"),
    "state.a_log": AnyOf(
        Named((_ATTENTION + "A_log",), flat), Named((_ATTENTION + "forget_gate.A_log",), flat)
    ),
    "state.dt_bias": AnyOf(_ATTENTION + "dt_bias", _ATTENTION + "forget_gate.dt_bias"),
    "state.f_a": AnyOf(_ATTENTION + "f_a_proj", _ATTENTION + "forget_gate.f_a_proj"),
    "state.f_b": AnyOf(_ATTENTION + "f_b_proj", _ATTENTION + "forget_gate.f_b_proj"),
    "state.g_a": _ATTENTION + "g_a_proj",
    "state.g_b": _ATTENTION + "g_b_proj",
    "state.beta": _ATTENTION + "b_proj",
    "state.norm": _ATTENTION + "o_norm",
    "state.out": _ATTENTION + "o_proj",
    "moe.router": AnyOf(_KIMI_MOE + "gate", _MLP + "gate"),
    "moe.correction": AnyOf(
        _KIMI_MOE + "gate.e_score_correction_bias", _MLP + "gate.e_score_correction_bias"
    ),
    "moe.up": AnyOf(
        (_KIMI_MOE + "experts.{e}.w1", _KIMI_MOE + "experts.{e}.w3"),
        (_MLP + "experts.{e}.gate_proj", _MLP + "experts.{e}.up_proj"),
        _MLP + "experts.gate_up_proj",
    ),
    "moe.down": AnyOf(
        _KIMI_MOE + "experts.{e}.w2",
        _MLP + "experts.{e}.down_proj",
        _MLP + "experts.down_proj",
    ),
    "moe.shared.up": AnyOf(
        (_KIMI_MOE + "shared_experts.gate_proj", _KIMI_MOE + "shared_experts.up_proj"),
        (_MLP + "shared_experts.gate_proj", _MLP + "shared_experts.up_proj"),
    ),
    "moe.shared.down": AnyOf(
        _KIMI_MOE + "shared_experts.down_proj", _MLP + "shared_experts.down_proj"
    ),
}


def minimax(c: Config) -> spec.Decoder:
    """Linear attention whose decay weakens with depth; the residual is the normalized stream."""
    heads, dim, count = c.num_attention_heads, b.head_dim(c), c.num_hidden_layers
    attends = b.attention(c, window=c.sliding_window or 0)
    is_full = _minimax_full(c)

    def lightning(i: int) -> spec.Lightning:
        factor = 1 - i / (count - 1 + 1e-5) + 1e-5
        decays = tuple(-factor * 2.0 ** (-8.0 * (h + 1) / heads) for h in range(heads))
        return spec.Lightning(heads, dim, decays, spec.Norm(1e-6), b.activation(c))

    def block(i: int) -> spec.Block:
        kind = "full_attn" if is_full(i) else "linear_attn"
        keys = (f"{kind}_alpha_factor", f"{kind}_beta_factor", "mlp_alpha_factor")
        kept, mixed, kept2, fed = (float(c.get(k, 1.0)) for k in (*keys, "mlp_beta_factor"))
        mixer = attends if is_full(i) else lightning(i)
        return spec.Block(
            mixer, sparse, b.rms(c), "scaled_post", post_scales=(kept, mixed, kept2, fed)
        )

    sparse = b.moe(c, inner=c.intermediate_size, renorm=True)
    names: Names = {
        **W1_W3_W2,
        "state.qkv": _ATTENTION + "qkv_proj",
        "state.gate": _ATTENTION + "output_gate",
        "state.norm": _ATTENTION + "norm",
        "state.out": _ATTENTION + "out_proj",
    }
    described = b.build_decoder(c, attends, sparse, names=names)
    return replace(described, blocks=tuple(block(i) for i in range(count)))


def _minimax_full(c: Config) -> Callable[[int], bool]:
    kinds, types = c.layer_types, c.get("attn_type_list")
    if types:
        return lambda i: types[i] == 1
    return lambda i: kinds[i] == "full_attention" if kinds else i % 2 == 0


_CONV, _FEED = LAYER + "conv.", LAYER + "feed_forward."
_LFM2: Names = {
    "norm": AnyOf("model.embedding_norm", "model.norm"),
    "norm1": LAYER + "operator_norm",
    "norm2": LAYER + "ffn_norm",
    "mixer.o": AnyOf(_ATTENTION + "out_proj", _ATTENTION + "o_proj"),
    "mixer.q_norm": AnyOf(_ATTENTION + "q_layernorm", _ATTENTION + "q_norm"),
    "mixer.k_norm": AnyOf(_ATTENTION + "k_layernorm", _ATTENTION + "k_norm"),
    "state.inp": _CONV + "in_proj",
    "state.conv": _CONV + "conv",
    "state.out": _CONV + "out_proj",
    "ffn.up": AnyOf((_FEED + "w1", _FEED + "w3"), (_FEED + "gate_proj", _FEED + "up_proj")),
    "ffn.down": AnyOf(_FEED + "w2", _FEED + "down_proj"),
    "moe.router": _FEED + "gate",
    "moe.correction": _FEED + "expert_bias",
    "moe.up": AnyOf(
        (_FEED + "experts.{e}.w1", _FEED + "experts.{e}.w3"), _FEED + "experts.gate_up_proj"
    ),
    "moe.down": AnyOf(_FEED + "experts.{e}.w2", _FEED + "experts.down_proj"),
}


def _lfm2(c: Config, ffn: b.Ffn | Callable[[int], b.Ffn]) -> spec.Decoder:
    c = c.replace(tie_word_embeddings=c.get("tie_embedding", c.tie_word_embeddings))
    norm = spec.Norm(c.norm_eps)
    attends = b.attention(c, qk_norm="head", qk_norm_spec=norm)
    state = spec.ShortConv(c.hidden_size, c.conv_L_cache, c.conv_bias)
    kinds, listed = c.layer_types, c.get("full_attn_idxs")

    def mixer(i: int) -> Mixer:
        attends_here = kinds[i] != "conv" if kinds else listed is None or i in listed
        return attends if attends_here else state

    return b.build_decoder(c, mixer, ffn, norm, names=_LFM2)


def lfm2(c: Config) -> spec.Decoder:
    inner = c.get("block_ff_dim", c.intermediate_size)
    if c.block_auto_adjust_ff_dim:
        inner = int(2 * inner / 3)
        if c.get("block_ffn_dim_multiplier") is not None:
            many = c.block_multiple_of
            inner = -(-int(c.block_ffn_dim_multiplier * inner) // many) * many
    return _lfm2(c, spec.Mlp(inner, "silu"))


def lfm2_moe(c: Config) -> spec.Decoder:
    sparse = b.moe(
        c,
        act="silu",
        score="sigmoid",
        correction=c.use_expert_bias,
        renorm=c.norm_topk_prob,
        scale=c.routed_scaling_factor,
    )
    dense = spec.Mlp(c.intermediate_size, "silu")
    return _lfm2(c, lambda i: dense if i < c.num_dense_layers else sparse)


def lfm3(c: Config) -> spec.Decoder:
    """LFM2 with sandwich norms, windows and a gate for each head."""
    norm, bias = spec.Norm(c.norm_eps), c.attention_bias
    extras = spec.AttentionExtras(gate="head") if c.use_attention_gate else None
    state = spec.ShortConv(c.hidden_size, c.conv_L_cache, c.conv_bias)
    kinds = c.layer_types or [_lfm3_kind(i) for i in range(c.num_hidden_layers)]
    c = c.replace(layer_types=kinds)

    def mixer(i: int) -> Mixer:
        if kinds[i] == "conv":
            return state
        fields: dict[str, Any] = {
            "rope": b.rope(c, b.head_dim(c), kinds[i]),
            "window": b.window(c, i),
        }
        fields |= {"qkv_bias": bias, "o_bias": bias, "qk_norm": "head", "qk_norm_spec": norm}
        return b.attention(c, extras=extras, **fields)

    gate: Names = {"mixer.gate": AnyOf(_ATTENTION + "g_proj", _ATTENTION + "gate_proj")}
    sandwich: Names = {
        "norm2": LAYER + "post_operator_norm",
        "norm3": LAYER + "ffn_norm",
        "norm4": LAYER + "post_ffn_norm",
    }
    feed_forward = spec.Mlp(c.intermediate_size, "silu")
    if not c.use_sandwich_norm:
        return b.build_decoder(c, mixer, feed_forward, norm, names={**_LFM2, **gate})
    names: Names = {**_LFM2, **sandwich, **gate}
    return b.build_decoder(c, mixer, feed_forward, norm, "sandwich", names=names)


def _lfm3_kind(i: int) -> str:
    if i % 4 == 2:
        return "full_attention"
    return "sliding_attention" if i % 4 == 0 and i else "conv"


def recurrent_gemma(c: Config) -> spec.Decoder:
    pattern = c.get("block_types") or c.get("_block_types") or ("recurrent",) * 2 + ("attention",)
    position = b.rope(c, b.head_dim(c), partial=True)
    bias = c.attention_bias
    span = c.get("attention_window_size", 2048)
    attends = b.attention(c, rope=position, qkv_bias=bias, o_bias=True, window=span)
    act = b.activation(c, "hidden_activation")
    width = c.get("lru_width") or c.hidden_size
    state = spec.RgLru(width, c.num_attention_heads, c.conv1d_width, act)
    part, feed = LAYER + "temporal_block.", LAYER + "mlp_block."
    lru = part + "rg_lru."
    gates = {
        f"state.{one}{end}": f"{lru}{one}{end or '_weight'}"
        for one in ("input_gate", "recurrent_gate")
        for end in ("", "_bias")
    }
    names: Names = {
        **gates,
        "norm": "model.final_norm",
        "norm1": LAYER + "temporal_pre_norm",
        "norm2": LAYER + "channel_pre_norm",
        "mixer.qkv": tuple(f"{part}{one}_proj" for one in "qkv"),
        "mixer.o": part + "o_proj",
        "state.x": part + "linear_x",
        "state.y": part + "linear_y",
        "state.conv": part + "conv_1d",
        "state.recurrent_param": lru + "recurrent_param",
        "state.out": part + "linear_out",
        "ffn.up": (feed + "gate_proj", feed + "up_proj"),
        "ffn.down": feed + "down_proj",
    }

    def mixer(i: int) -> Mixer:
        kind = pattern[i % len(pattern)]
        return attends if kind in ("attention", "sliding_attention") else state

    return b.build_decoder(
        c,
        mixer,
        spec.Mlp(c.intermediate_size // 2, act, bias=True),
        b.rms(c, offset=1.0),
        embed_scale=c.hidden_size**0.5,
        logit_softcap=c.logits_soft_cap or 0.0,
        names=names,
    )
