"""DeepSeek V2 (arXiv:2405.04434) to V3.2, GLM 5, A.X K1, MiniCPM 3 and Youtu: latent attention,
grouped routing and sparse attention; also dots1, which routes alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.families import builders as b
from radixlm.arch.names import LAYER, AnyOf
from radixlm.arch.spec import Decoder, Indexer, LatentAttention, Mlp, Norm
from radixlm.arch.yarn import yarn_mscale
from radixlm.base.record import replace


def routed(c: Config, first: int | None = None, **fields: Any) -> Callable[[int], b.Ffn]:
    """The feed-forward of a layer: dense in the ``first`` layers (or first_k_dense_replace), then
    experts."""
    first, bias = c.first_k_dense_replace if first is None else first, fields.pop("bias", False)
    shared = c.get("n_shared_experts", 0) * c.moe_intermediate_size
    fields.setdefault("groups", (c.get("n_group", 1), c.get("topk_group", 1)))
    if "renorm" not in fields:
        fields["renorm"] = c.norm_topk_prob
    sparse = b.moe(
        c,
        scale=c.routed_scaling_factor,
        shared=Mlp(shared, b.activation(c), bias=bias) if shared else None,
        **fields,
    )
    return lambda i: b.mlp(c, bias=bias) if i < first else sparse


def latent(c: Config, *, interleaved: bool) -> LatentAttention:
    """Latent attention; the softmax scale includes YaRN's mscale where mscale_all_dim is set."""
    position = b.rope(c, c.qk_rope_head_dim, interleaved=interleaved)
    p = c.rope_parameters
    scale = (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5
    if p["rope_type"] != "default" and p.get("mscale_all_dim"):
        scale *= yarn_mscale(p["factor"], p["mscale_all_dim"]) ** 2
    return LatentAttention(
        heads=c.num_attention_heads,
        nope_dim=c.qk_nope_head_dim,
        rope_dim=c.qk_rope_head_dim,
        v_dim=c.v_head_dim or c.divide("hidden_size", "num_attention_heads"),
        kv_rank=c.kv_lora_rank,
        q_rank=c.q_lora_rank or 0,
        rope=position,
        norm=Norm(1e-6),  # these norms do not follow rms_norm_eps
        scale=scale,
        bias=c.attention_bias,
    )


def deepseek_v2(c: Config) -> Decoder:
    c.refuse("topk_method", "greedy", "group_limited_greedy")
    grouped = c.topk_method == "group_limited_greedy"
    groups = (c.n_group, c.topk_group) if grouped else (1, 1)
    # Hugging Face's V2 never renormalises, whatever norm_topk_prob says.
    ffn = routed(c, groups=groups, group_score="max", renorm=False, bias=c.mlp_bias)
    return b.build_decoder(c, latent(c, interleaved=True), ffn)


def deepseek_v3(c: Config) -> Decoder:
    mixer = latent(c, interleaved=c.rope_interleave)
    return b.build_decoder(c, mixer, routed(c, score="sigmoid", correction=True))


def _by_kind(c: Config, **fields: Any) -> Callable[[int], b.Ffn]:
    """The feed-forward of a layer by mlp_layer_types, or dense in the first first_k_dense_replace
    layers."""
    kinds, ffn = c.mlp_layer_types, routed(c, 0, score="sigmoid", correction=True, **fields)
    first = c.first_k_dense_replace
    return lambda i: ffn(i) if (kinds[i] == "sparse" if kinds else i >= first) else b.mlp(c)


def _indexed(c: Config, *, interleaved: bool, shared: Callable[[int], bool]) -> Decoder:
    """Latent attention to the tokens that an indexer chooses."""
    for key in ("qk_rope_head_dim", "index_n_heads", "index_topk"):
        if not isinstance(c.get(key), int) or c.get(key) < 1:
            raise c.error(key, f"= {c.get(key)!r} must be a positive integer")
    if c.index_head_dim < c.qk_rope_head_dim or not c.q_lora_rank:
        raise c.error("index_head_dim", "must hold 'qk_rope_head_dim', and 'q_lora_rank' be given")
    norm, mixer = Norm(1e-6, "layer", bias=True), latent(c, interleaved=True)
    index = Indexer(c.index_n_heads, c.index_head_dim, c.index_topk, interleaved, norm)
    return b.build_decoder(
        c,
        lambda i: replace(mixer, indexer=replace(index, is_shared=shared(i))),
        _by_kind(c),
    )


def deepseek_v32(c: Config) -> Decoder:
    return _indexed(c, interleaved=False, shared=lambda i: False)


def shared_choices(c: Config) -> Callable[[int], bool]:
    """Whether a layer reuses the choice of the last layer with an indexer."""
    pattern = c.get("indexer_types") or c.get("index_topk_pattern")
    every, offset = max(c.get("index_topk_freq", 1), 1), c.get("index_skip_topk_offset", 2)

    def shares(i: int) -> bool:
        if pattern is not None:
            return bool(pattern[i] in ("shared", "S"))
        return bool(max(i - offset + 1, 0) % every)

    if shares(0):
        raise c.error("indexer_types", "has a shared choice at the first layer")
    return shares


def glm_moe_dsa(c: Config) -> Decoder:
    return _indexed(c, interleaved=True, shared=shared_choices(c))


def axk1(c: Config) -> Decoder:
    """DeepSeek V3 with a norm after the experts."""
    sparse = routed(c, 0, score="sigmoid", correction=True, out_norm=b.rms(c))(0)
    first, step = c.get("first_k_dense_replace", 1), c.get("moe_layer_freq", 1)
    kinds, norm = c.mlp_layer_types, "post_mlp_layernorm"

    def ffn(i: int) -> b.Ffn:
        has_experts = kinds[i] == "sparse" if kinds else i >= first and i % step == 0
        return sparse if has_experts else b.mlp(c)

    names = {"moe.out_norm": AnyOf(LAYER + norm, f"{LAYER}mlp.{norm}")}
    return b.build_decoder(c, latent(c, interleaved=c.rope_interleave), ffn, names=names)


def youtu(c: Config) -> Decoder:
    return b.build_decoder(c, latent(c, interleaved=c.rope_interleave))


def minicpm3(c: Config) -> Decoder:
    depth = c.get("scale_depth") or c.num_hidden_layers**0.5
    return b.build_decoder(
        c,
        latent(c, interleaved=False),
        b.mlp(c, bias=c.mlp_bias),
        residual=depth / c.num_hidden_layers**0.5,
        embed_scale=c.scale_emb,
        logit_scale=c.get("dim_model_base", c.hidden_size) / c.hidden_size,
    )


def deepseek(c: Config) -> Decoder:
    """The first DeepSeek MoE (arXiv:2401.06066): Llama's attention, softmax routing."""
    c.refuse("scoring_func", "softmax")
    ffn, step, bias = routed(c), c.get("moe_layer_freq", 1), c.attention_bias
    return b.build_decoder(
        c,
        b.attention(c, qkv_bias=bias, o_bias=bias),
        lambda i: ffn(i) if i % step == 0 else b.mlp(c),
    )


def dots1(c: Config) -> Decoder:
    bias = c.attention_bias

    def span(i: int) -> int:
        if c.layer_types is not None:
            return b.window(c, i)
        return int(c.sliding_window or 0) if i >= c.max_window_layers else 0

    return b.build_decoder(
        c,
        lambda i: b.attention(
            c, qkv_bias=bias, o_bias=bias, qk_norm="head", qk_norm_spec=b.rms(c), window=span(i)
        ),
        routed(c, score="sigmoid", correction=True),
    )
