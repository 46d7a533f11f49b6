"""GGUF architectures with layer norms and joined q, k and v: GPT-2, GPT-NeoX, BLOOM, Falcon,
StarCoder and StableLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from radixlm.arch.families.gguf_kind import (
    PRE,
    Change,
    Kind,
    Kinds,
    has,
    layer_norm,
    partial_of_heads,
    rows_of,
)
from radixlm.arch.gguf import GgufHeader

_GPT2 = {
    "attn_norm": "ln_1",
    "ffn_norm": "ln_2",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_GPT2_ENDS = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
}
_BLOOM = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_BLOOM_ENDS = {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
}
_NEOX = {
    **_BLOOM,
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
}
_NEOX_ENDS = {
    "token_embd": "gpt_neox.embed_in",
    "output_norm": "gpt_neox.final_layer_norm",
    "output": "embed_out",
}
_STABLELM = {**PRE, **{f"attn_{x}_norm": f"self_attn.{x}_layernorm.norms.{{}}" for x in "qk"}}


def grouped_rows(h: GgufHeader) -> Mapping[str, Change]:
    """Rows [all q][all k][all v] -> by KV head [its q heads][k][v]."""
    heads = h.count("attention.head_count")
    kv_heads = h.count("attention.head_count_kv", heads)
    dim, each = h.count("embedding_length") // heads, heads // kv_heads

    def rows(value: Any) -> Any:
        rest, q, k = value.shape[1:], heads * dim, kv_heads * dim
        grouped = value.clone().reshape(kv_heads, each + 2, dim, *rest)
        grouped[:, :each] = value[:q].reshape(kv_heads, each, dim, *rest)
        grouped[:, each] = value[q : q + k].reshape(kv_heads, dim, *rest)
        grouped[:, each + 1] = value[q + k :].reshape(kv_heads, dim, *rest)
        return grouped.reshape(value.shape)

    return dict.fromkeys(("attn_qkv.weight", "attn_qkv.bias"), rows)


def _transposed(_: GgufHeader) -> Mapping[str, Change]:
    parts = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
    return {f"{part}.weight": lambda value: value.T.contiguous() for part in parts}


def _inner(h: GgufHeader) -> int | None:
    return rows_of(h, "ffn_up")


def _gpt2(h: GgufHeader) -> dict[str, Any]:
    return {**layer_norm(h), "n_inner": _inner(h), "activation_function": "gelu_new"}


def _starcoder(h: GgufHeader) -> dict[str, Any]:
    more = {"multi_query": True, "activation_function": "gelu_pytorch_tanh"}
    return {**layer_norm(h), **more, "n_inner": _inner(h)}


def _neox(h: GgufHeader) -> dict[str, Any]:
    part = partial_of_heads(h)
    return {
        **layer_norm(h),
        **part,
        "rotary_pct": part["partial_rotary_factor"],
        "rotary_emb_base": h.own("rope.freq_base", 10000.0),
        "attention_bias": has(h, "attn_qkv.bias"),
        "use_parallel_residual": h.own("use_parallel_residual", True),
        "hidden_act": "gelu",
    }


def _stablelm(h: GgufHeader) -> dict[str, Any]:
    """Of the models without a norm before the feed-forward both branches read one norm."""
    return {
        **layer_norm(h),
        **partial_of_heads(h),
        "use_qkv_bias": has(h, "attn_q.bias"),
        "qk_layernorm": has(h, "attn_q_norm.weight"),
        "use_parallel_residual": not has(h, "ffn_norm.weight"),
    }


def _falcon(h: GgufHeader) -> Kind:
    """40B has two norms a layer, 11B one; 7B one norm and one KV head."""
    has_two = has(h, "attn_norm_2.weight")
    norms = {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"} if has_two else {}
    kv_heads = h.count("attention.head_count_kv", 1)
    is_new = has_two or kv_heads > 1
    more = {
        "num_kv_heads": kv_heads,
        "new_decoder_architecture": is_new,
        "multi_query": True,
        "parallel_attn": True,
        "num_ln_in_parallel_attn": 2 if has_two else 1,
        "ffn_hidden_size": _inner(h),
        "bias": has(h, "attn_qkv.bias"),
        "alibi": False,
        "activation": "gelu",
    }
    return Kind(
        "FalconForCausalLM",
        "falcon",
        {**_BLOOM, **norms},
        more=lambda h: {**layer_norm(h), **more},
        rows=grouped_rows,
        prefix="transformer.h.",
        ends=_BLOOM_ENDS,
    )


KINDS: Kinds = {
    "gpt2": Kind(
        "GPT2LMHeadModel",
        "gpt2",
        _GPT2,
        more=_gpt2,
        changes=_transposed,
        prefix="transformer.h.",
        ends=_GPT2_ENDS,
    ),
    "starcoder": Kind(
        "GPTBigCodeForCausalLM",
        "gpt_bigcode",
        _GPT2,
        more=_starcoder,
        prefix="transformer.h.",
        ends=_GPT2_ENDS,
    ),
    "gptneox": Kind(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        _NEOX,
        more=_neox,
        rows=grouped_rows,
        prefix="gpt_neox.layers.",
        ends=_NEOX_ENDS,
    ),
    "bloom": Kind(
        "BloomForCausalLM",
        "bloom",
        _BLOOM,
        more=layer_norm,
        rows=grouped_rows,
        prefix="transformer.h.",
        ends=_BLOOM_ENDS,
    ),
    "falcon": _falcon,
    "stablelm": Kind("StableLmForCausalLM", "stablelm", _STABLELM, more=_stablelm),
}
