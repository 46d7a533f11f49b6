"""Molmo and Molmo 2: image features are added to the embeddings of their tokens."""

from __future__ import annotations

from typing import Any, Literal

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
_OF_2 = _BLOCK + "self_attn."
_ATTENTION, _MLP = LAYER + "self_attn.", LAYER + "mlp."
# the class's names, those of published checkpoints, and those of Molmo 1
_MOLMO: Names = {
    "embed": AnyOf("model.embed_tokens", (_TOP + "wte.embedding", _TOP + "wte.new_embedding")),
    "norm": AnyOf("model.norm", _TOP + "ln_f"),
    "norm1": AnyOf(LAYER + "input_layernorm", _BLOCK + "attn_norm"),
    "norm2": AnyOf(LAYER + "post_attention_layernorm", _BLOCK + "ff_norm"),
    "mixer.qkv": AnyOf(SPLIT_QKV, _OF_2 + "att_proj", _BLOCK + "att_proj"),
    "mixer.o": AnyOf(_ATTENTION + "o_proj", _OF_2 + "attn_out", _BLOCK + "attn_out"),
    "mixer.q_norm": AnyOf(_ATTENTION + "q_norm", _OF_2 + "q_norm", _BLOCK + "q_norm"),
    "mixer.k_norm": AnyOf(_ATTENTION + "k_norm", _OF_2 + "k_norm", _BLOCK + "k_norm"),
    "ffn.up": AnyOf(
        DEFAULT["ffn.up"],
        Named((_BLOCK + "mlp.ff_proj",), swapped_halves),
        Named((_BLOCK + "ff_proj",), swapped_halves),
    ),
    "ffn.down": AnyOf(_MLP + "down_proj", _BLOCK + "mlp.ff_out", _BLOCK + "ff_out"),
    "head": AnyOf(DEFAULT["head"], _TOP + "ff_out"),
}


def molmo_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Molmo 1 with the keys of Molmo 2. ``intermediate_size`` counts gates too there, and the token
    table has ``embedding_size`` rows."""
    norms = "olmo" if raw.get("attention_layer_norm") else ""
    changed: dict[str, Any] = {"qk_norm_type": norms, "tie_word_embeddings": False}
    if isinstance(raw.get("intermediate_size"), int):
        changed["intermediate_size"] = raw["intermediate_size"] // 2
    if raw.get("embedding_size"):
        changed["vocab_size"] = raw["embedding_size"]
    return molmo2_config({**raw, **changed})


def molmo2_config(raw: dict[str, Any]) -> dict[str, Any]:
    older = {"attention_bias": "qkv_bias", "rms_norm_eps": "layer_norm_eps"}
    return {**{new: raw[old] for new, old in older.items() if old in raw}, **raw}


_NORMS: dict[str, Literal["", "head", "row"]] = {"qwen3": "head", "olmo": "row", "": ""}


def molmo(c: Config) -> Decoder:
    """Rope scaling holds for the layers of ``rope_scaling_layers``. The class ties no head."""
    c.refuse("qk_norm_type", "qwen3", "olmo", "")
    c.refuse("layer_norm_type", "rms")
    c.refuse("clip_qkv")
    for key in ("normalize_input_embeds", "weight_tying"):
        c.refuse(key, False)
    scaled_rope = rope(c, head_dim(c))
    scaled_layers = (
        range(c.num_hidden_layers) if c.rope_scaling_layers is None else c.rope_scaling_layers
    )

    def mixer(i: int) -> Attention:
        return attention(
            c,
            rope=scaled_rope if i in scaled_layers else replace(scaled_rope, scaling=None),
            qkv_bias=c.attention_bias,
            qk_norm=_NORMS[c.qk_norm_type],
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
