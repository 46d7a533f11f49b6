"""Language models behind towers that do more than to put rows in their places."""

from __future__ import annotations

from dataclasses import replace

from radixlm.arch.config import Config
from radixlm.arch.families.builders import attention, family, mlp, plain
from radixlm.arch.families.composite import composite
from radixlm.arch.families.composite_newer import JOINING, joined_layers
from radixlm.arch.families.deepseek import routed
from radixlm.arch.names import LAYER
from radixlm.arch.spec import Decoder, Norm


@family(*JOINING)
def joining(c: Config) -> Decoder:
    """A tower's rows join before many layers."""
    layers = joined_layers({key: c.get(key) for key in c})
    if not layers or not 0 <= layers[0] <= layers[-1] < c.num_hidden_layers:
        raise c.error("deepstack_layer_map", f"and spatial_target_layers name {layers or 'none'}")
    return replace(composite(c), deep_layers=tuple(layer - 1 for layer in layers if layer))


@family("ChameleonForConditionalGeneration")
def chameleon(c: Config) -> Decoder:
    """Pictures are tokens of its own vocabulary, which it reads but never says."""
    bias, norm = c.attention_bias, Norm(1e-5, "layer", bias=True)
    mixer = attention(c, qkv_bias=bias, o_bias=bias, qk_norm="each", qk_norm_spec=norm)
    words = (c.get("vocabulary_map") or {}).items()
    behind = {"norm1": LAYER + "input_layernorm", "norm2": LAYER + "post_attention_layernorm"}
    return plain(
        c,
        mixer,
        mlp(c, bias=bool(c.get("mlp_bias"))),
        layout="post" if c.swin_norm else "pre",
        unsaid=tuple(sorted(token for word, token in words if word.startswith("IMGIMG"))),
        names=behind if c.swin_norm else None,
    )


@family("DeepseekOcr2ForConditionalGeneration")
def deepseek_ocr(c: Config) -> Decoder:
    """The experts of DeepSeek V2, with heads of their own."""
    c.refuse("topk_method", "greedy", "group_limited_greedy")
    groups = (c.n_group, c.topk_group) if c.topk_method == "group_limited_greedy" else (1, 1)
    kinds, dense = c.get("mlp_layer_types"), mlp(c, bias=c.mlp_bias)
    by_place = routed(c, groups=groups, group_score="max", renorm=False, bias=c.mlp_bias)
    mixer = attention(c, qkv_bias=c.attention_bias, o_bias=c.attention_bias)
    if kinds is None:
        return plain(c, mixer, by_place)
    sparse = by_place(c.num_hidden_layers)
    return plain(c, mixer, lambda i: sparse if kinds[i] == "sparse" else dense)
