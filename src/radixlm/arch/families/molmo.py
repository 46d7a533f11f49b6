"""Molmo 2: image features are added to the embeddings of their tokens."""

from __future__ import annotations

from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.families.builders import (
    attention,
    build_decoder,
    head_dim,
    rms,
    rope,
)
from radixlm.arch.names import DEFAULT, LAYER, SPLIT_QKV, AnyOf, Named, Names, untied
from radixlm.arch.recipes import swapped_halves
from radixlm.arch.spec import Attention, Decoder, Layout
from radixlm.base.record import replace

_TOP, _BLOCK = "model.transformer.", "model.transformer.blocks.{i}."
_ATTENTION, _MLP = LAYER + "self_attn.", LAYER + "mlp."
# the class's names, and those of published checkpoints
_MOLMO: Names = {
    "embed": AnyOf("model.embed_tokens", (_TOP + "wte.embedding", _TOP + "wte.new_embedding")),
    "norm": AnyOf("model.norm", _TOP + "ln_f"),
    "norm1": AnyOf(LAYER + "input_layernorm", _BLOCK + "attn_norm"),
    "norm2": AnyOf(LAYER + "post_attention_layernorm", _BLOCK + "ff_norm"),
    "mixer.qkv": AnyOf(SPLIT_QKV, _BLOCK + "self_attn.att_proj"),
    "mixer.o": AnyOf(_ATTENTION + "o_proj", _BLOCK + "self_attn.attn_out"),
    "mixer.q_norm": AnyOf(_ATTENTION + "q_norm", _BLOCK + "self_attn.q_norm"),
    "mixer.k_norm": AnyOf(_ATTENTION + "k_norm", _BLOCK + "self_attn.k_norm"),
    "ffn.up": AnyOf(DEFAULT["ffn.up"], Named((_BLOCK + "mlp.ff_proj",), swapped_halves)),
    "ffn.down": AnyOf(_MLP + "down_proj", _BLOCK + "mlp.ff_out"),
}


def molmo2_config(raw: dict[str, Any]) -> dict[str, Any]:
    older = {"attention_bias": "qkv_bias", "rms_norm_eps": "layer_norm_eps"}
    return {**{new: raw[old] for new, old in older.items() if old in raw}, **raw}


def molmo(c: Config) -> Decoder:
    """Rope scaling holds for the layers of ``rope_scaling_layers``. The class ties no head."""
    c.refuse("qk_norm_type", "qwen3", "olmo")
    scaled_rope = rope(c, head_dim(c))
    scaled_layers = (
        range(c.num_hidden_layers) if c.rope_scaling_layers is None else c.rope_scaling_layers
    )

    def mixer(i: int) -> Attention:
        return attention(
            c,
            rope=scaled_rope if i in scaled_layers else replace(scaled_rope, scaling=None),
            qkv_bias=c.attention_bias,
            qk_norm="head" if c.qk_norm_type == "qwen3" else "row",
            qk_norm_spec=rms(c),
        )

    layout: Layout = "post" if c.norm_after else "pre"
    return untied(
        build_decoder(
            c,
            mixer,
            layout=layout,
            names=_MOLMO,
            extra_vocab_rows=int(c.additional_vocab_size),
            add_media_embeds=True,
        )
    )
