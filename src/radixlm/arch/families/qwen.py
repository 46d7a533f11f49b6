"""Qwen 2 (arXiv:2407.10671) and 3 (arXiv:2505.09388), dense and with experts, and Mellum."""

from __future__ import annotations

from collections.abc import Callable

from radixlm.arch.config import Config
from radixlm.arch.families import builders as b
from radixlm.arch.names import LAYER, AnyOf
from radixlm.arch.spec import Attention, Decoder, Mlp

_SHARED = LAYER + "mlp.shared_expert."


def slides(c: Config, layer: int) -> bool:
    """Whether the layer has a window: from max_window_layers on, with use_sliding_window."""
    if not c.use_sliding_window or not c.sliding_window:
        return False
    if c.layer_types is not None:
        return b.is_sliding(c, layer)
    return bool(layer >= c.max_window_layers)


def qwen2(c: Config) -> Decoder:
    return b.build_decoder(
        c, lambda i: b.attention(c, qkv_bias=True, window=c.sliding_window if slides(c, i) else 0)
    )


def qwen3(c: Config) -> Decoder:
    return b.build_decoder(
        c,
        lambda i: b.attention(
            c,
            qkv_bias=c.attention_bias,
            o_bias=c.attention_bias,
            qk_norm="head",
            qk_norm_spec=b.rms(c),
            window=c.sliding_window if slides(c, i) else 0,
        ),
    )


def sparse_layers(c: Config) -> Callable[[int], bool]:
    """Which layers have experts: each decoder_sparse_step-th that is not in mlp_only_layers."""
    dense = c.mlp_only_layers or ()
    return lambda i: i not in dense and (i + 1) % c.decoder_sparse_step == 0


def qwen2_moe(c: Config) -> Decoder:
    shared = Mlp(c.shared_expert_intermediate_size, b.activation(c))
    sparse = b.moe(c, renorm=c.norm_topk_prob, shared=shared, shared_gate=True)
    has_experts = sparse_layers(c)

    def slides_here(i: int) -> bool:
        if c.layer_types is not None:
            return b.is_sliding(c, i)
        return bool(c.use_sliding_window and i % 2 == 0 and i < c.max_window_layers)

    return b.build_decoder(
        c,
        lambda i: b.attention(
            c,
            qkv_bias=c.qkv_bias,
            window=c.sliding_window if c.use_sliding_window and slides_here(i) else 0,
        ),
        lambda i: sparse if has_experts(i) else b.mlp(c),
        names={
            "moe.shared.up": AnyOf(
                (_SHARED + "gate_proj", _SHARED + "up_proj"), _SHARED + "gate_up_proj"
            ),
            "moe.shared.down": _SHARED + "down_proj",
        },
    )


def qwen3_moe(c: Config) -> Decoder:
    sparse = b.moe(c, renorm=c.norm_topk_prob)
    has_experts = sparse_layers(c)
    bias = c.attention_bias
    span = (c.sliding_window or 0) if c.use_sliding_window else 0
    mixer = b.attention(
        c, qkv_bias=bias, o_bias=bias, qk_norm="head", qk_norm_spec=b.rms(c), window=span
    )
    return b.build_decoder(c, mixer, lambda i: sparse if has_experts(i) else b.mlp(c))


def mellum(c: Config) -> Decoder:
    sparse = b.moe(c, renorm=c.norm_topk_prob)
    bias, kinds = c.attention_bias, c.mlp_layer_types

    def mixer(i: int) -> Attention:
        kind = c.layer_types[i] if c.layer_types else "full_attention"
        return b.attention(
            c,
            qkv_bias=bias,
            o_bias=bias,
            rope=b.rope(c, b.head_dim(c), kind, partial=True),
            qk_norm="head",
            qk_norm_spec=b.rms(c),
            window=b.window(c, i) if c.layer_types else 0,
        )

    return b.build_decoder(
        c, mixer, lambda i: b.mlp(c) if kinds and kinds[i] == "dense" else sparse
    )
