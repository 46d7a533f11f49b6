"""Language models behind towers: what the checkpoint says of its text model, described by that
model's own family. The towers and the processor are Hugging Face's (``models/towers.py``)."""

from __future__ import annotations

from radixlm.arch.config import Config
from radixlm.arch.defaults import DEFAULTS
from radixlm.arch.families.builders import FAMILIES, family
from radixlm.arch.spec import Decoder

# A text model's own model_type -> the one whose class it has.
TEXT_TYPES = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
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
    *("DeepseekVLForConditionalGeneration", "Ovis2ForConditionalGeneration"),
    *("GotOcr2ForConditionalGeneration", "LightOnOcrForConditionalGeneration"),
    *("PerceptionLMForConditionalGeneration", "FastVlmForConditionalGeneration"),
)


@family(*COMPOSITES)
def composite(c: Config) -> Decoder:
    """The text model's record; CheckpointError for a text model that has no family."""
    held = DEFAULTS.get(c.model_type)
    if held is None:
        raise c.error("text_config", f"has the model_type {c.model_type!r}, which has no family")
    return FAMILIES[str(held["architecture"])](c)
