"""OLMo 1 to 3 (arXiv:2402.00838, 2501.00656), OLMoE, FlexOlmo, and EXAONE 4, whose norms are placed
like those of OLMo 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.families import builders as b
from radixlm.arch.names import DEFAULT, LAYER, POST, AnyOf
from radixlm.arch.spec import Attention, AttentionExtras, Decoder, Mlp, Norm


def olmo(c: Config) -> Decoder:
    bias = c.attention_bias
    norm = Norm(1e-5, "layer", affine=False)
    return b.build_decoder(
        c, b.attention(c, qkv_bias=bias, o_bias=bias, extras=_clip(c)), norm=norm
    )


def _clip(c: Config) -> AttentionExtras | None:
    return AttentionExtras(clip_qkv=float(c.clip_qkv)) if c.get("clip_qkv") else None


def olmo2(c: Config) -> Decoder:
    bias = c.attention_bias
    mixer = b.attention(c, qkv_bias=bias, o_bias=bias, qk_norm="row", qk_norm_spec=b.rms(c))
    return b.build_decoder(c, mixer, layout="post", names=POST)


def olmo3(c: Config) -> Decoder:
    bias = c.attention_bias

    def mixer(i: int) -> Attention:
        span = b.window(c, i) if c.layer_types else c.sliding_window if (i + 1) % 4 else 0
        position = b.rope(c, b.head_dim(c), "sliding_attention" if span else "full_attention")
        return b.attention(
            c,
            qkv_bias=bias,
            o_bias=bias,
            rope=position,
            qk_norm="row",
            qk_norm_spec=b.rms(c),
            window=span,
        )

    return b.build_decoder(c, mixer, layout="post", names=POST)


def olmoe(c: Config) -> Decoder:
    bias = c.attention_bias
    extras = (
        AttentionExtras(clip_qkv=float(c.clip_qkv), clip_after_norm=True)
        if c.get("clip_qkv")
        else None
    )
    mixer = b.attention(
        c, qkv_bias=bias, o_bias=bias, qk_norm="row", qk_norm_spec=b.rms(c), extras=extras
    )
    return b.build_decoder(c, mixer, b.moe(c, inner=c.intermediate_size, renorm=c.norm_topk_prob))


def flex_olmo(c: Config) -> Decoder:
    bias = c.attention_bias
    mixer = b.attention(c, qkv_bias=bias, o_bias=bias, qk_norm="row", qk_norm_spec=b.rms(c))
    ffn = b.moe(c, inner=c.intermediate_size, renorm=c.norm_topk_prob)
    return b.build_decoder(c, mixer, ffn, layout="post", names=POST)


def exaone_config(raw: dict[str, Any]) -> dict[str, Any]:
    """``sliding_window_pattern`` may be a word like "LLLG": local and global layers."""
    word = raw.get("sliding_window_pattern")
    if not isinstance(word, str) or not word or word.strip("LG"):
        return raw
    form = {**raw, "sliding_window_pattern": len(word)}
    if raw.get("layer_types") is None and raw.get("sliding_window", 4096):
        kinds = {"L": "sliding_attention", "G": "full_attention"}
        count = raw.get("num_hidden_layers", 32)
        form["layer_types"] = [kinds[word[i % len(word)]] for i in range(count)]
    return form


def exaone_attention(c: Config) -> Callable[[int], Attention]:
    """Sliding layers have rotation; where a model has them, full layers have none."""
    every = c.sliding_window_pattern or 1

    def mixer(i: int) -> Attention:
        if c.layer_types is not None:
            span = b.window(c, i)
        else:
            span = (c.sliding_window or 0) if (i + 1) % every else 0
        position = b.rope(c, b.head_dim(c)) if span or not c.sliding_window else None
        return b.attention(c, rope=position, qk_norm="head", qk_norm_spec=b.rms(c), window=span)

    return mixer


def exaone4(c: Config) -> Decoder:
    return b.build_decoder(c, exaone_attention(c), layout="post", names=POST)


def exaone_moe(c: Config) -> Decoder:
    kinds = c.mlp_layer_types
    shared = Mlp(c.moe_intermediate_size * c.num_shared_experts, b.activation(c))
    sparse = b.corrected_moe(c, shared)

    def ffn(i: int) -> b.Ffn:
        is_dense = kinds[i] == "dense" if kinds else i < c.first_k_dense_replace
        return b.mlp(c) if is_dense else sparse

    correction = AnyOf(LAYER + "mlp.e_score_correction_bias", DEFAULT["moe.correction"])
    return b.build_decoder(c, exaone_attention(c), ffn, names={"moe.correction": correction})
