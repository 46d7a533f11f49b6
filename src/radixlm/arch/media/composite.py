"""Language models of multimodal checkpoints, each described by its own family.

A function here has the config with the text model's keys at the top (``arch/hf.py``) and the
architecture of the whole checkpoint.
"""

from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.config_defaults import defaults
from radixlm.arch.families.builders import head_dim
from radixlm.arch.media.config_json import deepstack_layers
from radixlm.arch.media.registry import MULTIMODAL
from radixlm.arch.names import DEFAULT, FUSED_UP, LAYER, SPLIT_QKV, AnyOf, Named, untied
from radixlm.arch.recipes import TransposeExperts
from radixlm.arch.registry import find
from radixlm.arch.spec import Decoder, LatentAttention, Moe, Norm
from radixlm.base.record import replace

_ATTENTION, _MLP = LAYER + "self_attn.", LAYER + "mlp."
_EXPERTS = "model.layers.{i}.mlp.experts."


def composite(c: Config) -> Decoder:
    """The text model by its model_type; CheckpointError for one that no family describes."""
    text = defaults().get(c.model_type)
    if text is None:
        raise c.error("text_config", f"has the model_type {c.model_type!r}, which has no family")
    decoder = find(str(text["architecture"]), c.source)(_with_sections(c))
    if not decoder.tied:  # the whole model may tie where the text model's config does not say so
        decoder = untied(decoder)
    every: dict[str, Any] = {**DEFAULT, **decoder.names}
    names: dict[str, Any] = dict(decoder.names)
    sparse = next((b.ffn for b in decoder.blocks if isinstance(b.ffn, Moe)), None)
    if sparse is not None and "moe.up" not in names:  # some checkpoints transpose the experts
        up = Named((_EXPERTS + "gate_up_proj",), TransposeExperts(decoder.dim))
        down = Named((_EXPERTS + "down_proj",), TransposeExperts(sparse.inner))
        names["moe.up"] = AnyOf(every["moe.up"].spellings[0], up)
        names["moe.down"] = AnyOf(every["moe.down"].spellings[0], down)
    return replace(decoder, names=names)


def _with_sections(c: Config) -> Config:
    """With the sections of M-RoPE that the class has where config.json has none."""
    row, rope = MULTIMODAL[c.architecture], dict(c.rope_parameters)
    if not row.mrope:
        return c
    if row.mrope_is_interleaved:
        rope = {"mrope_section": row.mrope, **rope, "mrope_interleaved": True}
    elif int(head_dim(c) * rope.get("partial_rotary_factor", 1.0)) == 2 * sum(row.mrope):
        rope.setdefault("mrope_section", row.mrope)
    return c.replace(rope_parameters=rope)


def text_keys_at_the_top(c: Config) -> Decoder:
    """The text model's architecture is the row's; LLaVA as published has its keys at the top."""
    return find(MULTIMODAL[c.architecture].text_architecture)(c)


def untied_head(c: Config) -> Decoder:
    """The family of the row's text model. The head is the checkpoint's own where it has one: the
    class does not read whether the text config ties it."""
    decoder = find(MULTIMODAL[c.architecture].text_architecture)(c)
    return untied(decoder) if decoder.tied else decoder


def qwen4_exp(c: Config) -> Decoder:
    """The class adds M-RoPE, interleaved; sections default to thirds of at most 32 pairs."""
    share = c.rope_parameters.get("partial_rotary_factor", 1.0)
    pairs = min(int(head_dim(c) * share) // 2, 32)
    sections = [len(range(axis, pairs, 3)) for axis in range(3)]
    rope = {"mrope_section": sections, **c.rope_parameters, "mrope_interleaved": True}
    return untied_head(c.replace(rope_parameters=rope))


def hy_v4_vl(c: Config) -> Decoder:
    """The class adds M-RoPE and rotates neighboring channels. The norms of the latents follow
    rms_norm_eps."""
    rope = {"mrope_section": [12, 10, 10], **c.rope_parameters, "mrope_interleaved": True}
    decoder = composite(c.replace(rope_parameters=rope))

    def own(mixer: LatentAttention) -> LatentAttention:
        rotates = replace(mixer.rope, interleaved=True) if mixer.rope else None
        index = replace(mixer.indexer, interleaved=True) if mixer.indexer else None
        return replace(mixer, rope=rotates, indexer=index, norm=Norm(c.rms_norm_eps))

    blocks = tuple(
        replace(block, mixer=own(block.mixer))
        for block in decoder.blocks
        if isinstance(block.mixer, LatentAttention)
    )
    return replace(decoder, blocks=blocks)


def cohere_compass(c: Config) -> Decoder:
    """The class adds M-RoPE to each type of layer that has a rope."""
    ropes = {
        kind: {"mrope_section": [24, 20, 20], **rope} if rope and isinstance(rope, dict) else rope
        for kind, rope in c.rope_parameters.items()
    }
    return composite(c.replace(rope_parameters=ropes))


def own_head(c: Config) -> Decoder:
    """The head is the checkpoint's own where it has one: the class ties none, or not by the key
    that says so elsewhere."""
    decoder = composite(c)
    return untied(decoder) if decoder.tied else decoder


def unscaled_logits(c: Config) -> Decoder:
    """The class leaves out the text model's scale of the logits."""
    return replace(composite(c), logit_scale=1.0)


def uncapped_logits(c: Config) -> Decoder:
    """The class leaves out the text model's cap of the logits."""
    return replace(composite(c), logit_softcap=0.0)


def paligemma(c: Config) -> Decoder:
    """The whole prompt is bidirectional (``MultimodalSpec``), whatever the text config says."""
    return composite(c.replace(use_bidirectional_attention=False))


def cosmos3_edge(c: Config) -> Decoder:
    """The class interleaves the sections of M-RoPE always, ties no head, and has its own weight
    names."""
    c = c.replace(rope_parameters={**c.rope_parameters, "mrope_interleaved": True})
    names = {
        "mixer.qkv": AnyOf(SPLIT_QKV, tuple(f"{_ATTENTION}to_{part}" for part in "qkv")),
        "mixer.o": AnyOf(_ATTENTION + "o_proj", _ATTENTION + "to_out"),
        "ffn.up": AnyOf(_MLP + "up_proj", _MLP + "fc1"),
        "ffn.down": AnyOf(_MLP + "down_proj", _MLP + "fc2"),
    }
    decoder = untied(composite(c))
    return replace(decoder, names={**decoder.names, **names})


def granite4_vision(c: Config) -> Decoder:
    """The vision encoder's features of several depths are added before several layers."""
    layers = deepstack_layers({key: c.get(key) for key in c})
    if not layers or not 0 <= layers[0] <= layers[-1] < c.num_hidden_layers:
        raise c.error("deepstack_layer_map", f"and spatial_target_layers name {layers or 'none'}")
    return replace(composite(c), deep_layers=tuple(layer - 1 for layer in layers if layer))


def phi4_multimodal(c: Config) -> Decoder:
    """The text model without its adapters for images and speech."""
    decoder = composite(c)
    names: dict[str, Any] = {
        "mixer.qkv": AnyOf(_ATTENTION + "qkv_proj", _ATTENTION + "qkv_proj.base_layer"),
        "mixer.o": AnyOf(_ATTENTION + "o_proj", _ATTENTION + "o_proj.base_layer"),
        "ffn.up": AnyOf(FUSED_UP, FUSED_UP + ".base_layer"),
        "ffn.down": AnyOf(_MLP + "down_proj", _MLP + "down_proj.base_layer"),
    }
    return replace(decoder, names={**decoder.names, **names})
