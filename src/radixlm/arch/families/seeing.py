"""Language models behind encoders that do more than to put rows in their places."""

from __future__ import annotations

from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.families.builders import (
    attention,
    build_decoder,
    head_dim,
    mlp,
    rms,
    rope,
)
from radixlm.arch.families.composite import composite
from radixlm.arch.families.composite_newer import joined_layers
from radixlm.arch.families.deepseek import routed
from radixlm.arch.names import DEFAULT, LAYER, SPLIT_QKV, AnyOf, Named, Names
from radixlm.arch.recipes import swapped_halves
from radixlm.arch.spec import Attention, Decoder, Layout, Norm
from radixlm.base.record import replace


def joining(c: Config) -> Decoder:
    """An encoder's rows join before many layers."""
    layers = joined_layers({key: c.get(key) for key in c})
    if not layers or not 0 <= layers[0] <= layers[-1] < c.num_hidden_layers:
        raise c.error("deepstack_layer_map", f"and spatial_target_layers name {layers or 'none'}")
    return replace(composite(c), deep_layers=tuple(layer - 1 for layer in layers if layer))


def chameleon(c: Config) -> Decoder:
    """Images are tokens of its own vocabulary, which it reads but never says."""
    bias, norm = c.attention_bias, Norm(1e-5, "layer", bias=True)
    mixer = attention(c, qkv_bias=bias, o_bias=bias, qk_norm="each", qk_norm_spec=norm)
    words = (c.get("vocabulary_map") or {}).items()
    behind = {"norm1": LAYER + "input_layernorm", "norm2": LAYER + "post_attention_layernorm"}
    return build_decoder(
        c,
        mixer,
        mlp(c, bias=bool(c.get("mlp_bias"))),
        layout="post" if c.swin_norm else "pre",
        suppressed_tokens=tuple(
            sorted(token for word, token in words if word.startswith("IMGIMG"))
        ),
        names=behind if c.swin_norm else None,
    )


def deepseek_ocr(c: Config) -> Decoder:
    """The experts of DeepSeek V2, with heads of their own."""
    c.refuse("topk_method", "greedy", "group_limited_greedy")
    groups = (c.n_group, c.topk_group) if c.topk_method == "group_limited_greedy" else (1, 1)
    kinds, dense = c.get("mlp_layer_types"), mlp(c, bias=c.mlp_bias)
    by_place = routed(c, groups=groups, group_score="max", renorm=False, bias=c.mlp_bias)
    mixer = attention(c, qkv_bias=c.attention_bias, o_bias=c.attention_bias)
    if kinds is None:
        return build_decoder(c, mixer, by_place)
    sparse = by_place(c.num_hidden_layers)
    return build_decoder(c, mixer, lambda i: sparse if kinds[i] == "sparse" else dense)


_OWN, _BLOCK = "model.transformer.", "model.transformer.blocks.{i}."
_ATTENTION, _MLP = LAYER + "self_attn.", LAYER + "mlp."
# the class's names, and those of published checkpoints
_MOLMO: Names = {
    "embed": AnyOf("model.embed_tokens", (_OWN + "wte.embedding", _OWN + "wte.new_embedding")),
    "norm": AnyOf("model.norm", _OWN + "ln_f"),
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
    """Some layers' ropes are not stretched."""
    c.refuse("qk_norm_type", "qwen3", "olmo")
    stretched = rope(c, head_dim(c))
    scaled = range(c.num_hidden_layers) if c.rope_scaling_layers is None else c.rope_scaling_layers

    def mixer(i: int) -> Attention:
        return attention(
            c,
            rope=stretched if i in scaled else replace(stretched, scaling=None),
            qkv_bias=c.attention_bias,
            qk_norm="head" if c.qk_norm_type == "qwen3" else "row",
            qk_norm_spec=rms(c),
        )

    layout: Layout = "post" if c.norm_after else "pre"
    more = int(c.additional_vocab_size)
    return build_decoder(
        c, mixer, layout=layout, names=_MOLMO, extra_vocab_rows=more, add_media_embeds=True
    )
