"""Language models behind towers: what the checkpoint says of its text model, described by that
model's own family. The towers and the processor are Hugging Face's (``models/towers.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from radixlm.arch.config import Config
from radixlm.arch.defaults import DEFAULTS
from radixlm.arch.families.builders import FAMILIES, family
from radixlm.arch.names import DEFAULT, AnyOf, Named
from radixlm.arch.recipes import Upright
from radixlm.arch.spec import Decoder, Moe

# A text model's own model_type -> the one whose class it has.
TEXT_TYPES = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
# what a text model's class has by default, other than the class above
TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}
# whose language model is described elsewhere, by the family of its text model
TOWERED = ("Gemma3ForConditionalGeneration",)
COMPOSITES = (
    *("LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration"),
    *("LlavaOnevisionForConditionalGeneration", "VipLlavaForConditionalGeneration"),
    *("LlavaNextVideoForConditionalGeneration", "VideoLlavaForConditionalGeneration"),
    *("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    *("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
    *("InternVLForConditionalGeneration", "Mistral3ForConditionalGeneration"),
    *("AyaVisionForConditionalGeneration", "Cohere2VisionForConditionalGeneration"),
    *("Idefics2ForConditionalGeneration", "Idefics3ForConditionalGeneration"),
    *("SmolVLMForConditionalGeneration", "JanusForConditionalGeneration"),
    "DeepseekVLForConditionalGeneration",
    *("GotOcr2ForConditionalGeneration", "LightOnOcrForConditionalGeneration"),
    *("PerceptionLMForConditionalGeneration", "FastVlmForConditionalGeneration"),
    "PaliGemmaForConditionalGeneration",
)
# whose class leaves out the text model's scale of the logits
UNSCALED = ("AyaVisionForConditionalGeneration", "Cohere2VisionForConditionalGeneration")

# whose language model sees forwards: within the places of a picture, or within the whole prompt
MUTUAL: Mapping[str, Literal["media", "prompt"]] = {
    "Gemma3ForConditionalGeneration": "media",
    "PaliGemmaForConditionalGeneration": "prompt",
}


@dataclass(frozen=True, slots=True)
class MediaFacts:
    """What the checkpoint says of its media. ``tokens``: kind -> the id that stands for it in a
    prompt. ``merge``: so many rows and columns of a tower's grid make one place. ``mutual``: which
    places see one another forwards too."""

    tokens: Mapping[str, int]
    merge: int
    mutual: Literal["", "media", "prompt"]


def media_facts(architecture: str, raw: Mapping[str, Any]) -> MediaFacts | None:
    """Of a config.json as it is written; None for a model without towers."""
    if architecture not in COMPOSITES and architecture not in TOWERED:
        return None
    tokens = {}
    for kind in ("image", "video", "audio"):
        token = raw.get(f"{kind}_token_id", raw.get(f"{kind}_token_index"))
        if isinstance(token, int):
            tokens[kind] = token
    vision = raw.get("vision_config") or {}
    merge = vision.get("spatial_merge_size") or 2
    return MediaFacts(tokens, int(merge), MUTUAL.get(architecture, ""))


@family(*COMPOSITES)
def composite(c: Config) -> Decoder:
    """The text model's record; CheckpointError for a text model that has no family."""
    held = DEFAULTS.get(c.model_type)
    if held is None:
        raise c.error("text_config", f"has the model_type {c.model_type!r}, which has no family")
    if MUTUAL.get(c.architecture) == "prompt":  # what its text model's config says of the prompt
        c = c.replace(use_bidirectional_attention=False)
    decoder = FAMILIES[str(held["architecture"])](c)
    if c.architecture in UNSCALED:
        decoder = replace(decoder, logit_scale=1.0)
    names: dict[str, Any] = {**DEFAULT, **decoder.names}
    own: dict[str, Any] = dict(decoder.names)
    if not decoder.tied:  # the whole model may tie where the text model does not say so
        own["head"] = AnyOf(names["head"], names["embed"])
    sparse = next((b.ffn for b in decoder.blocks if isinstance(b.ffn, Moe)), None)
    if sparse is not None:  # published with the experts' axes the other way round
        own["moe.up"] = Named(("model.layers.{i}.mlp.experts.gate_up_proj",), Upright(decoder.dim))
        own["moe.down"] = Named(("model.layers.{i}.mlp.experts.down_proj",), Upright(sparse.inner))
        own["moe.up"] = AnyOf(names["moe.up"].spellings[0], own["moe.up"])
        own["moe.down"] = AnyOf(names["moe.down"].spellings[0], own["moe.down"])
    return replace(decoder, names=own)
