"""Models without a class in transformers, described by their published code: DeciLM
(arXiv:2411.19146), Grok 1, Phi-3 small, Solar, Step 3 (arXiv:2507.19427) and Xverse MoE. The tests
write their computation out."""

from __future__ import annotations

from typing import Any

from radixlm.arch import spec
from radixlm.arch.config import Config, is_number
from radixlm.arch.families import builders as b
from radixlm.arch.families.mixtral import W1_W3_W2
from radixlm.arch.names import LAYER, SANDWICH, AnyOf, Named, Names
from radixlm.arch.recipes import Experts, GroupedQkv, interleaved_rows


def xverse_moe(c: Config) -> spec.Decoder:
    shared = c.intermediate_size * c.get("num_shared_experts", 0)
    sparse = b.moe(
        c,
        inner=c.intermediate_size,
        renorm=bool(c.get("norm_topk_prob", False)),
        shared=spec.Mlp(shared, b.activation(c)) if shared else None,
    )
    has_experts = c.get("num_experts") is not None
    return b.build_decoder(
        c, ffn=sparse if has_experts else b.mlp(c), names={"moe.router": LAYER + "mlp.router"}
    )


def _solar_skips(c: Config) -> tuple[spec.SkipConnection, ...]:
    """Each layer of bskcn_3 (bskcn_4) reads the last earlier layer of bskcn_1 (bskcn_2) again.
    bskcn_tv = (share in training, share at inference)."""
    shares = c.bskcn_tv
    found = []
    for source_key, key in (("bskcn_1", "bskcn_3"), ("bskcn_2", "bskcn_4")):
        for at in c.get(key) or ():
            before = [one for one in c.get(source_key) or () if one <= at]
            if not before:
                raise c.error(key, f"names layer {at}, before which {source_key!r} has none")
            found.append(spec.SkipConnection(max(before), at, float(shares[1])))
    return tuple(skip for skip in found if skip.at < c.num_hidden_layers)


def solar(c: Config) -> spec.Decoder:
    """Llama where some layers also read an earlier layer's input."""
    shares, bias = c.bskcn_tv, c.attention_bias
    if not isinstance(shares, list | tuple) or len(shares) != 2 or not all(map(is_number, shares)):
        raise c.error("bskcn_tv", f"= {shares!r} must be two numbers")
    mixer = b.attention(c, qkv_bias=bias, o_bias=bias, window=c.sliding_window or 0)
    return b.build_decoder(c, mixer, b.mlp(c, bias=c.mlp_bias), skips=_solar_skips(c))


def _deci_part(c: Config, layer: int, part: str) -> dict[str, Any]:
    """config.block_configs[layer][part]."""
    listed = c.block_configs
    if not isinstance(listed, list) or len(listed) != c.num_hidden_layers:
        raise c.error("block_configs", f"must be a list of {c.num_hidden_layers} objects")
    found = listed[layer].get(part) if isinstance(listed[layer], dict) else None
    if not isinstance(found, dict):
        raise c.error("block_configs", f"has no {part!r} at layer {layer}")
    return found


def _deci_attention(c: Config, layer: int) -> spec.Attention | spec.SquareLinear | None:
    part, bias = _deci_part(c, layer, "attention"), c.get("qkv_bias", c.attention_bias)
    if part.get("no_op"):
        return None
    if part.get("replace_with_linear"):
        return spec.SquareLinear()
    for key in ("sparsify", "num_sink_tokens"):
        if part.get(key):
            raise c.error("block_configs", f"has {key!r} at layer {layer}, which is not supported")
    group, heads = part.get("n_heads_in_group"), c.num_attention_heads
    if not isinstance(group, int) or group < 1 or heads % group:
        raise c.error("block_configs", f"has the n_heads_in_group {group!r} at layer {layer}")
    window = part.get("window_length") or 0
    return b.attention(
        c, kv_heads=heads // group, qkv_bias=bias, o_bias=c.attention_bias, window=window
    )


def _deci_ffn(c: Config, layer: int) -> spec.Mlp | spec.SquareLinear | None:
    part = _deci_part(c, layer, "ffn")
    if part.get("no_op"):
        return None
    if part.get("replace_with_linear"):
        return spec.SquareLinear()
    width = part.get("intermediate_size")
    if width is None:
        width = -(-int(2 * part.get("ffn_mult", 0) * c.hidden_size / 3) // 256) * 256
    return spec.Mlp(width, b.activation(c), bias=c.mlp_bias)


def decilm(c: Config) -> spec.Decoder:
    """Llama whose layers differ in KV heads and width; a part may be missing or be one matrix."""
    before, behind = LAYER + "input_layernorm", LAYER + "post_attention_layernorm"
    names: Names = {
        "norm1": AnyOf(before, behind),
        "mixer.matrix": LAYER + "self_attn.linear_attn",
        "ffn.matrix": LAYER + "mlp.linear_mlp",
    }
    layers, norm, longest = range(c.num_hidden_layers), b.rms(c), c.max_position_embeddings
    if c.get("num_key_value_heads_per_layer"):  # the first generation
        counts = c.num_key_value_heads_per_layer
        return b.build_decoder(c, lambda i: b.attention(c, kv_heads=counts[i]), names=names)
    blocks = tuple(spec.Block(_deci_attention(c, i), _deci_ffn(c, i), norm) for i in layers)
    tied = bool(c.tie_word_embeddings)
    return spec.Decoder(c.vocab_size, c.hidden_size, blocks, norm, longest, tied=tied, names=names)


def _phi3_small_rope(c: Config, dim: int) -> spec.Rope:
    """Linear by rope_position_scale, or longrope ("su")."""
    theta, stretch = float(c.rope_embedding_base), float(c.rope_position_scale)
    if not c.get("rope_scaling"):
        linear = spec.RopeScaling("linear", (("factor", stretch),)) if stretch != 1.0 else None
        return spec.Rope(dim, theta, linear)
    scaling = c.rope_scaling
    scale = scaling.get("long_mscale")
    if scaling.get("short_mscale") != scale:
        raise c.error("rope_scaling", "has a long_mscale other than its short_mscale")
    own = {"rope_theta": theta, **({} if scale is None else {"attention_factor": scale})}
    return b.rope(c.replace(rope_parameters={**c.rope_parameters, **own}), dim)


def phi3_small(c: Config) -> spec.Decoder:
    """Block-sparse and dense layers in turn; gate and up rows are interleaved."""
    c.refuse("hidden_act", "gegelu")
    dim, heads = b.head_dim(c), c.num_attention_heads
    step = 0 if c.blocksparse_homo_head_pattern else max(1, c.blocksparse_vert_stride // heads)
    size, local = c.blocksparse_block_size, c.blocksparse_num_local_blocks
    sparse = spec.AttentionExtras(
        block_sparse=spec.BlockSparse(size, local, c.blocksparse_vert_stride, step)
    )
    every = c.get("dense_attention_every_n_layers", 0)
    position = _phi3_small_rope(c, dim)

    def mixer(i: int) -> spec.Attention:
        return b.attention(
            c,
            rope=position,
            qkv_bias=True,
            o_bias=True,
            scale=c.mup_attn_multiplier / dim if c.mup_use_scaling else None,
            extras=None if every and (i + 1) % every == 0 else sparse,
        )

    grouped = GroupedQkv(c.get("num_key_value_heads", heads), dim)
    inner = c.get("ff_intermediate_size") or c.ff_dim_multiplier * c.hidden_size
    unsaid = tuple(c.get("dummy_token_indices", ()))
    if not all(isinstance(token, int) and 0 <= token < c.vocab_size for token in unsaid):
        raise c.error("dummy_token_indices", f"must be tokens of the {c.vocab_size} there are")
    names: Names = {
        "norm": "model.final_layernorm",
        "mixer.qkv": Named((LAYER + "self_attn.query_key_value",), grouped),
        "mixer.o": LAYER + "self_attn.dense",
        "ffn.up": Named((LAYER + "mlp.up_proj",), interleaved_rows),
    }
    return b.build_decoder(
        c,
        mixer,
        spec.Mlp(inner, "swiglu_oai", bias=True, limit=float(c.get("gegelu_limit", 0.0))),
        spec.Norm(c.layer_norm_epsilon, "layer", bias=True),
        embed_scale=float(c.get("mup_embedding_multiplier") or 1.0),
        logit_scale=1 / (c.get("mup_width_multiplier") or 1.0),
        suppressed_tokens=unsaid,
        names=names,
    )


def step3(c: Config) -> spec.Decoder:
    """Low-rank queries, one KV head, experts from one layer on."""
    listed = c.get("moe_layers_enum")
    if isinstance(listed, str):
        listed = [int(one) for one in listed.split(",")]
    sparse = range(1, c.num_hidden_layers) if listed is None else listed
    experts = b.moe(
        c, renorm=c.norm_expert_weight, shared=spec.Mlp(c.share_expert_dim, b.activation(c))
    )
    attn, part, shared = (LAYER + one for one in ("self_attn.", "moe.", "share_expert."))
    extras = spec.AttentionExtras(q_rank=c.share_q_dim or b.head_dim(c), q_rank_norm=b.rms(c))

    def ffn(i: int) -> b.Ffn:
        return experts if i in sparse else b.mlp(c)

    names: Names = {
        "mixer.q_a": attn + "q_proj",
        "mixer.q_a_norm": attn + "inter_norm",
        "mixer.q_b": attn + "wq",
        "moe.router": part + "gate",
        "moe.up": Named((part + "gate_proj", part + "up_proj"), Experts(c.num_experts, 2)),
        "moe.down": part + "down_proj",
        "moe.shared.up": (shared + "gate_proj", shared + "up_proj"),
        "moe.shared.down": shared + "down_proj",
    }
    return b.build_decoder(c, b.attention(c, kv_heads=1, extras=extras), ffn, names=names)


def grok1(c: Config) -> spec.Decoder:
    """Sandwich norms, soft caps on attention and routing, scaled embeddings and logits."""
    cap = float(c.get("attn_logit_softcapping", 30.0))
    scale = c.get("attn_output_multiplier", 0.08838834764831845)
    sparse = b.moe(
        c,
        inner=c.get("moe_intermediate_size", c.intermediate_size),
        act=b.activation(c)
        if c.is_explicit("hidden_act") and c.hidden_act != "gelu"
        else "gelu_tanh",
        router_softcap=float(c.get("router_logit_softcapping", 30.0)),
    )
    names: Names = {
        **SANDWICH,
        **W1_W3_W2,
        "norm1": LAYER + "pre_attn_norm",
        "norm2": LAYER + "post_attn_norm",
        "norm3": LAYER + "pre_moe_norm",
        "norm4": LAYER + "post_moe_norm",
    }
    return b.build_decoder(
        c,
        b.attention(c, scale=scale, softcap=cap),
        sparse,
        layout="sandwich",
        embed_scale=float(c.get("embedding_multiplier_scale", 1.0)),
        logit_scale=float(c.get("output_multiplier_scale", 1.0)),
        logit_softcap=float(c.get("final_logit_softcapping") or 0.0),
        names=names,
    )
