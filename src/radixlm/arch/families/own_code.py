"""More models that came with their own code: Arctic, IQuest LoopCoder, Jais (arXiv:2308.16149),
Ling 2.5, MiMo V2, Motif (arXiv:2510.06949), Nanbeige 4.2, Ouro (arXiv:2510.25741), openPangu
(arXiv:2505.22375), Param 2, Rnj-1, Step 1, TeleChat 2 (arXiv:2507.18013), and the first names of
Falcon and StableLM. The tests write their computation out, or rename a Hugging Face model."""

from __future__ import annotations

import math

from radixlm.arch.config import Config
from radixlm.arch.families import builders as b
from radixlm.arch.families.alibi import CONV_LAYER, alibi_slopes
from radixlm.arch.families.custom import bailing_experts, bailing_moe_v2, bailing_names
from radixlm.arch.families.deepseek import latent
from radixlm.arch.families.gpt import falcon
from radixlm.arch.families.mixtral import W1_W3_W2
from radixlm.arch.families.mla import BAILING
from radixlm.arch.families.phi import stablelm
from radixlm.arch.names import LAYER, SANDWICH, SPLIT_QKV, AnyOf, Named, Names, untied
from radixlm.arch.recipes import DifferentialHeads, QueriesThenPairs, Scaled, transposed_pair
from radixlm.arch.spec import (
    Attention,
    AttentionExtras,
    Block,
    Decoder,
    HierarchicalRecurrence,
    Mlp,
    Norm,
    RotatedLightning,
)
from radixlm.base.record import replace

_H = "transformer.h.{i}."
_ATTENTION, _BAILING = LAYER + "self_attn.", LAYER + "attention."


def _count(c: Config, key: str, usual: int, most: int = 2**31) -> int:
    """config[key], a positive integer."""
    value = c.get(key, usual)
    if not isinstance(value, int) or not 1 <= value <= most:
        raise c.error(key, f"= {value!r} must be an integer from 1 to {most}")
    return value


def telechat2(c: Config) -> Decoder:
    """Llama with biases of the projections back; keys and values are stored head by head."""
    heads, dim = c.num_attention_heads, c.divide("hidden_size", "num_attention_heads")
    stored = (_H + "self_attention.query", _H + "self_attention.key_value")
    names: Names = {
        "embed": "transformer.word_embeddings",
        "norm": "transformer.ln_f",
        "norm1": _H + "input_layernorm",
        "norm2": _H + "post_attention_layernorm",
        "mixer.qkv": Named(stored, QueriesThenPairs(heads, dim)),
        "mixer.o": _H + "self_attention.dense",
        "ffn.up": (_H + "mlp.gate_proj", _H + "mlp.up_proj"),
        "ffn.down": _H + "mlp.down_proj",
    }
    return b.build_decoder(
        c,
        b.attention(c, kv_heads=heads, head_dim=dim, o_bias=True),
        Mlp(c.ffn_hidden_size, "silu", down_bias=True),
        norm=Norm(c.get("layer_norm_epsilon", 1e-5)),
        names=names,
    )


def pangu_embedded(c: Config) -> Decoder:
    bias = bool(c.attention_bias or c.get("bias", False))
    mixer = b.attention(c, qkv_bias=bool(c.get("qkv_bias", bias)), o_bias=bias)
    return b.build_decoder(c, mixer, b.mlp(c, bias=c.mlp_bias))


def pangu_ultra_moe(c: Config) -> Decoder:
    """Latent attention and experts of DeepSeek V3, with norms after the branches."""
    norm = b.rms(c)
    shared = Mlp(c.moe_intermediate_size * (c.get("n_shared_experts") or 0), b.activation(c))
    sparse = b.moe(
        c,
        score="sigmoid",
        correction=bool(c.get("router_enable_expert_bias", False)),
        renorm=c.norm_topk_prob,
        scale=c.get("routed_scaling_factor", 1.0),
        shared=shared if shared.inner else None,
    )
    first, has_sandwich = c.get("first_k_dense_replace", 0), c.get("sandwich_norm", False)
    names: Names = {
        **SANDWICH,
        "norm3": LAYER + "pre_mlp_layernorm",
        "norm4": LAYER + "post_mlp_layernorm",
    }
    return b.build_decoder(
        c,
        replace(latent(c, interleaved=True), norm=norm),
        lambda i: b.mlp(c) if i < first else sparse,
        norm=norm,
        layout="sandwich" if has_sandwich else "pre",
        names=names if has_sandwich else {},
    )


def ouro(c: Config) -> Decoder:
    """A stack of blocks that runs several times, each time to its end."""
    times = _count(c, "total_ut_steps", 4, most=64)
    c.refuse("use_sliding_window", False)
    names: Names = {
        "norm2": LAYER + "input_layernorm_2",
        "norm3": LAYER + "post_attention_layernorm",
        "norm4": LAYER + "post_attention_layernorm_2",
    }
    size = c.num_hidden_layers
    return b.build_decoder(
        c.replace(num_hidden_layers=size * times),
        layout="sandwich",
        cycles=HierarchicalRecurrence(times, 0, size, ("", "")),
        names=names,
    )


def nanbeige(c: Config) -> Decoder:
    """Llama whose stack of blocks runs several times, each time to its end (Nanbeige 4.2)."""
    for key in (
        *("enable_hyper_connection", "enable_depth_attention", "enable_double_loop_split"),
        *("loop_share_kv", "ngram_insert_all_layers", "qk_layernorm"),
    ):
        c.refuse(key, False)
    for key in ("insert_ngram_layer_idx", "loop_loss_weights", "loop_middle_layers"):
        c.refuse(key, [])
    c.refuse("emb_neighbor_num")
    times, size = _count(c, "num_loops", 1, most=64), c.num_hidden_layers
    bias, norms_each = c.attention_bias, not c.get("skip_loop_final_norm", False)
    return b.build_decoder(
        c.replace(num_hidden_layers=size * times),
        b.attention(c, qkv_bias=bias, o_bias=bias),
        b.mlp(c, bias=c.mlp_bias),
        cycles=HierarchicalRecurrence(times, 0, size, ("", ""), norms_each=norms_each),
    )


def iquest_loop_coder(c: Config) -> Decoder:
    """Llama whose layers run twice or more; later runs read the first run's keys too."""
    times, size = _count(c, "loop_num", 2, most=64), c.num_hidden_layers
    window = _count(c, "loop_window_size", 64)
    c.refuse("dual_chunk_attention_config")
    c.refuse("plt_gate_use_hidden_states", False)
    bias = c.attention_bias
    first = b.attention(c, qkv_bias=bias, o_bias=bias, extras=AttentionExtras(later_window=window))
    later = replace(first, window=window)
    gate = "model.gate_projections.{i}."
    return b.build_decoder(
        c.replace(num_hidden_layers=size * times),
        lambda i: later if i >= size else first,
        b.mlp(c, bias=c.mlp_bias),
        cycles=HierarchicalRecurrence(times, 0, size, ("", ""), norms_each=False),
        names={"mixer.run_gate": gate + "weight", "mixer.run_bias": gate + "bias"},
    )


def jais(c: Config) -> Decoder:
    """GPT-2 with ALiBi, SwiGLU and the factors of maximal update parametrization."""
    c.refuse("activation_function", "swiglu")
    dim = c.divide("hidden_size", "num_attention_heads")
    by_dim = c.get("scale_qk_dot_by_d", c.get("mup_scale_qk_dot_by_d", False))
    has_slopes = c.get("position_embedding_type", "learned") == "alibi"
    scale = c.get("mup_output_alpha", 1.0) * c.get("mup_width_scale", 1.0)
    stretch = float(c.get("embeddings_scale", c.get("mup_embeddings_scale", 1.0)))
    norm = Norm(c.get("layer_norm_epsilon", 1e-5), "layer", bias=True)
    slopes = AttentionExtras(alibi_slopes=alibi_slopes(c.num_attention_heads))
    names: Names = {
        **CONV_LAYER,
        "embed": "transformer.wte",
        "positions": Named(("transformer.wpe",), Scaled(stretch)),
        "norm": "transformer.ln_f",
        "norm1": _H + "ln_1",
        "norm2": _H + "ln_2",
        "ffn.up": Named((_H + "mlp.c_fc2", _H + "mlp.c_fc"), transposed_pair),
    }
    mixer = b.attention(
        c,
        kv_heads=c.num_attention_heads,
        head_dim=dim,
        rope=None,
        qkv_bias=True,
        o_bias=True,
        scale=1.0 / dim if by_dim else None,
        extras=slopes if has_slopes else None,
    )
    return b.build_decoder(
        c,
        mixer,
        Mlp(c.get("n_inner") or 4 * c.hidden_size, "silu", bias=True),
        norm=norm,
        positions=None if has_slopes else (c.max_position_embeddings, 0),
        embed_scale=stretch,
        logit_scale=float(c.get("width_scale", scale)),
        tied=bool(c.tie_word_embeddings or not c.is_explicit("tie_word_embeddings")),
        names=names,
    )


def param2_moe(c: Config) -> Decoder:
    """Bailing MoE 2; the width of the shared experts is that of all together."""
    changes = {"use_qk_norm": c.get("use_qk_norm", False)}
    changes["first_k_dense_replace"] = c.get("first_k_dense_replace", 1)
    has_width = c.get("moe_shared_expert_intermediate_size") is not None
    changes["num_shared_experts"] = 1 if has_width else c.get("num_shared_experts", 1)
    return bailing_moe_v2(c.replace(**changes))


def mimo_v2(c: Config) -> Decoder:
    """MiMo V2 by its published keys: layers with a window have shapes of their own."""
    c.refuse("attention_projection_layout")
    c.refuse("scoring_func", "sigmoid")
    slides, has_experts = c.hybrid_layer_pattern, c.moe_layer_freq
    for key, listed in (("hybrid_layer_pattern", slides), ("moe_layer_freq", has_experts)):
        if not isinstance(listed, list) or len(listed) != c.num_hidden_layers:
            raise c.error(key, f"must have a number for each of the {c.num_hidden_layers} layers")
    norm = Norm(c.get("layernorm_epsilon", c.rms_norm_eps))

    def mixer(i: int) -> b.Mixer:
        at, own = "swa_" if slides[i] else "", c
        dim = getattr(c, f"{at}head_dim")
        if slides[i] and c.get("swa_rope_theta"):
            rope = {**c.rope_parameters, "rope_theta": c.swa_rope_theta}
            own = c.replace(rope_parameters=rope)
        extras = AttentionExtras(
            v_dim=c.get(f"{at}v_head_dim", dim), v_scale=c.get("attention_value_scale", 1.0)
        )
        return b.attention(
            c,
            heads=getattr(c, f"{at}num_attention_heads"),
            kv_heads=getattr(c, f"{at}num_key_value_heads"),
            head_dim=dim,
            rope=b.rope(own, dim, partial=True),
            qkv_bias=c.attention_bias,
            window=c.sliding_window_size + 1 if slides[i] else 0,
            sinks=bool(c.get(f"add_{'swa' if slides[i] else 'full'}_attention_sink_bias", False)),
            extras=extras,
        )

    shared = Mlp(c.moe_intermediate_size * (c.get("n_shared_experts") or 0), b.activation(c))
    sparse = b.corrected_moe(c, shared, scale=c.get("routed_scaling_factor", 1.0))
    return b.build_decoder(
        c,
        mixer,
        lambda i: sparse if has_experts[i] else b.mlp(c),
        norm,
        names={"mixer.sinks": _ATTENTION + "attention_sink_bias"},
    )


def bailing_moe_v2_5(c: Config) -> Decoder:
    """Ling 2.5: lightning attention, and latent attention in every layer_group_size-th layer."""
    c.refuse("full_attention_type", "mla")
    norm, every = Norm(c.rms_norm_eps), c.get("layer_group_size", 1)
    heads, dim, count = c.num_attention_heads, b.head_dim(c), c.num_hidden_layers
    is_normed, bias = c.get("use_qk_norm", False), bool(c.get("use_bias", False))
    is_rotated = c.get("linear_rope", True)
    is_activated = c.get("use_linear_silu", c.get("linear_silu", False))
    slopes = alibi_slopes(heads)
    attends = replace(latent(c, interleaved=True), norm=norm)

    def lightning(i: int) -> RotatedLightning:
        factor = 1 - i / max(count - 1, 1) + 1e-5
        return RotatedLightning(
            heads,
            dim,
            decays=tuple(-factor * slope for slope in slopes),
            norm=norm,
            norm_groups=c.get("group_norm_size", 1),
            rope=b.rope(c, dim, partial=True) if is_rotated else None,
            qk_norm=norm if is_normed else None,
            act="silu" if is_activated else "",
            qkv_bias=bias or bool(c.get("use_qkv_bias", False)),
            o_bias=bias,
        )

    sparse, first = bailing_experts(c), c.get("first_k_dense_replace", 0)
    names: Names = {
        **BAILING,
        **bailing_names(c),
        "mixer.o": _BAILING + "dense",
        "state.qkv": _BAILING + "query_key_value",
        "state.q_norm": _BAILING + "query_layernorm",
        "state.k_norm": _BAILING + "key_layernorm",
        "state.gate": _BAILING + "g_proj",
        "state.norm": _BAILING + "g_norm",
        "state.out": _BAILING + "dense",
    }
    return b.build_decoder(
        c,
        lambda i: lightning(i) if every > 0 and (i + 1) % every else attends,
        lambda i: b.mlp(c) if i < first else sparse,
        names=names,
    )


def refined_web(c: Config) -> Decoder:
    """Falcon under its first name: only the 40B model groups its heads."""
    groups = c.get("n_head_kv")
    return falcon(
        c.replace(
            num_kv_heads=groups,
            new_decoder_architecture=groups is not None,
            multi_query=c.get("multi_query", groups is None),
            parallel_attn=c.get("parallel_attn", True),
            alibi=c.get("alibi", False),
            bias=c.get("bias", False),
            activation="gelu",
            layer_norm_epsilon=c.get("layer_norm_epsilon", 1e-5),
            num_ln_in_parallel_attn=2 if groups is not None else None,
            tie_word_embeddings=True,
        )
    )


def stablelm_epoch(c: Config) -> Decoder:
    """StableLM under its first name."""
    rope = {**c.rope_parameters, "partial_rotary_factor": c.get("rope_pct", 0.25)}
    return stablelm(
        c.replace(
            layer_norm_eps=c.get("norm_eps", 1e-5),
            rope_parameters=rope,
            use_qkv_bias=c.get("use_qkv_bias", False),
            qk_layernorm=False,
            use_parallel_residual=False,
        )
    )


def arctic(c: Config) -> Decoder:
    """A layer with experts has a small feed-forward beside them; the experts read what came before
    the attention."""
    c.refuse("hidden_act", "silu")
    every, dense = _count(c, "moe_layer_frequency", 2), b.mlp(c)
    has_both = c.get("parallel_attn_mlp_res", c.get("use_residual", False))
    sparse = b.moe(c, inner=c.intermediate_size, renorm=c.num_experts_per_tok > 1)
    described = b.build_decoder(c, b.attention(c), names=_ARCTIC)

    def block(i: int, plain: Block) -> Block:
        if (i + 1) % every:
            return replace(plain, ffn=dense)
        if not has_both:
            return replace(plain, ffn=sparse)
        beside = replace(dense, inner=c.hidden_size)
        return replace(plain, ffn=beside, layout="early_experts", deferred_moe=sparse)

    blocks = tuple(block(i, plain) for i, plain in enumerate(described.blocks))
    return replace(described, blocks=blocks)


_BESIDE, _SPARSE = LAYER + "residual_mlp.", LAYER + "block_sparse_moe.mlp."
_ARCTIC: Names = {
    **W1_W3_W2,
    "norm2": AnyOf(LAYER + "residual_layernorm", LAYER + "post_attention_layernorm"),
    "norm3": LAYER + "post_attention_layernorm",
    "ffn.up": AnyOf((_BESIDE + "w1", _BESIDE + "w3"), (_SPARSE + "w1", _SPARSE + "w3")),
    "ffn.down": AnyOf(_BESIDE + "w2", _SPARSE + "w2"),
}


def step1(c: Config) -> Decoder:
    """Llama with ALiBi of the distance's square root in place of a rotation (Step-Audio)."""
    bias = c.attention_bias
    extras = AttentionExtras(alibi_slopes=alibi_slopes(c.num_attention_heads), alibi_of_root=True)
    mixer = b.attention(
        c,
        kv_heads=c.get("num_attention_groups"),
        rope=None,
        qkv_bias=bias,
        o_bias=bias,
        extras=extras,
    )
    described = b.build_decoder(c, mixer, b.mlp(c, bias=c.mlp_bias))
    return described if c.is_explicit("tie_word_embeddings") else untied(described)


def motif(c: Config) -> Decoder:
    """Differential attention, of 12.7B with one subtracted head for several others; its rows are
    repeated for each of them. Motif 3 has latent attention and is another model."""
    c.refuse("kv_lora_rank")
    c.refuse("use_sliding_window", False)
    c.refuse("k_ratio", 1)
    heads, dim = c.num_attention_heads, b.head_dim(c)
    kv_heads = c.num_key_value_heads or heads
    groups = _count(c, "num_noise_heads", max(heads // 2, 1))
    ratio = heads // groups - 1
    if heads % groups or ratio < 1 or kv_heads % 2 or 2 * groups % kv_heads:
        raise c.error(
            "num_attention_heads",
            f"= {heads} does not fit {groups} noise heads and {kv_heads} key-value heads",
        )
    bias = bool(c.attention_bias or c.get("use_bias", False))
    norm = Norm(c.get("attn_rms_norm_eps", 1e-5))

    def mixer(i: int) -> Attention:
        first = 0.8 - 0.6 * math.exp(-0.3 * (i - 1))
        extras = AttentionExtras(
            v_dim=2 * dim, diff_lambda_init=first, out_norm=norm, out_norm_heads=True
        )
        count = 2 * groups * ratio
        return b.attention(c, heads=count, qkv_bias=bias, o_bias=bias, extras=extras)

    act = "poly_norm" if c.hidden_act == "poly_norm" else b.activation(c)
    names: Names = {
        "mixer.qkv": Named(SPLIT_QKV, DifferentialHeads(groups, ratio, kv_heads, dim)),
        "mixer.out_norm": _ATTENTION + "subln",
        "ffn.poly": LAYER + "mlp.act_fn",
    }
    ffn = Mlp(c.intermediate_size, act, bias=bool(c.get("use_bias", False)))
    return b.build_decoder(c, mixer, ffn, names=names)


def rnj1(c: Config) -> Decoder:
    """Gemma 3 with chunks in place of windows: a token sees its own chunk, of half a
    ``sliding_window``, and the one before it."""
    ropes, dim, norm = c.rope_parameters, b.head_dim(c), b.rms(c, offset=1.0)
    kinds = c.layer_types or ["full_attention"] * c.num_hidden_layers
    has_types = "rope_type" not in ropes

    def mixer(i: int) -> Attention:
        kind = kinds[i]
        if kind not in ("full_attention", "chunked_attention"):
            raise c.error("layer_types", f"has the unknown type {kind!r} at layer {i}")
        if has_types and not ropes.get(kind):
            raise c.error("rope_parameters", f"lacks {kind!r}")
        is_chunked = kind == "chunked_attention"
        if is_chunked and (c.sliding_window or 0) < 2:
            raise c.error("sliding_window", f"= {c.sliding_window!r} must be above 1")
        size = (c.sliding_window or 0) // 2
        chunks = AttentionExtras(attention_chunk_size=size, chunk_lookback=1)
        return b.attention(
            c,
            rope=b.rope(c, dim, kind if has_types else ""),
            qkv_bias=c.attention_bias,
            o_bias=c.attention_bias,
            scale=c.query_pre_attn_scalar**-0.5,
            qk_norm="head",
            qk_norm_spec=norm,
            extras=chunks if is_chunked else None,
        )

    return b.build_decoder(
        c,
        mixer,
        b.mlp(c, act="hidden_activation"),
        norm,
        layout="sandwich",
        embed_scale=c.hidden_size**0.5,
        logit_softcap=c.get("final_logit_softcapping", 0.0),
        names=SANDWICH,
    )
