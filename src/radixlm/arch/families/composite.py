"""Language models behind encoders: what the checkpoint says of its text model, described by that
model's own family. The encoders and the processor are Hugging Face's (``models/mm_encoder.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from radixlm.arch import defaults, defaults_custom, defaults_more
from radixlm.arch.config import Config
from radixlm.arch.families.composite_newer import (
    NEWER,
    NEWER_TEXT_DEFAULTS,
    NEWER_TEXT_TYPES,
    NEWER_TOWERED,
    WOVEN,
    WOVEN_NAMES,
)
from radixlm.arch.families.media_layouts_more import DEEPSEEKS, VILAS
from radixlm.arch.names import DEFAULT, FUSED_UP, LAYER, AnyOf, Named
from radixlm.arch.recipes import TransposeExperts
from radixlm.arch.registry import find
from radixlm.arch.spec import Decoder, Moe
from radixlm.base.record import replace

# A text model's own model_type -> the one whose class it has.
TEXT_TYPES = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_5_omni_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_omni_moe_text": "qwen3_moe",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
    "paddleocr_vl_text": "llama",
    "glm_ocr_text": "glm4",
    "exaone4_5_text": "exaone4",
    "phi4mm": "phi3",
    "deepseek_v2_noaux": "deepseek_v3",
    "phi4_multimodal": "phi3",
    **NEWER_TEXT_TYPES,
}
_PHI4 = {
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
}
_DEEPSEEK = {k: v for k, v in defaults.DEFAULTS["deepseek_v2"].items() if k != "num_experts"}
# what a text model's class has by default, other than the class above
TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
    "qwen3_omni_moe_text": {"norm_topk_prob": True},
    "glm4v_text": {"head_dim": None, "attention_bias": True},
    "glm4v_moe_text": {"head_dim": None, "attention_bias": True},
    "glm_ocr_text": {
        "vocab_size": 59392,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "head_dim": 128,
        "attention_bias": False,
    },
    "deepseek_v2_noaux": {**_DEEPSEEK, "n_group": 1, "topk_group": 1},
    "phi4mm": _PHI4,
    "phi4_multimodal": _PHI4,
    "paddleocr_vl_text": {
        "vocab_size": 103424,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-05,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    **NEWER_TEXT_DEFAULTS,
}
# whose language model is described elsewhere, by the family of its text model
TOWERED = (
    *("Gemma3ForConditionalGeneration", "Llama4ForConditionalGeneration"),
    *NEWER_TOWERED,
)
_KNOWN = {**defaults.DEFAULTS, **defaults_more.DEFAULTS, **defaults_custom.DEFAULTS}
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
    *("PaliGemmaForConditionalGeneration", "DeepseekVLHybridForConditionalGeneration"),
    *("Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration"),
    *("Glm46VForConditionalGeneration", "PaddleOCRVLForConditionalGeneration"),
    *("AriaForConditionalGeneration", "Ovis2ForConditionalGeneration"),
    *("Qwen2AudioForConditionalGeneration", "MiniCPMV4_6ForConditionalGeneration"),
    *("Kimi_K25ForConditionalGeneration", "Lfm2VlForConditionalGeneration"),
    *("Gemma3nForConditionalGeneration", "InternVLChatModel"),
    *("InternS1ForConditionalGeneration", "MultiModalityCausalLM"),
    *("MiniCPMV", "MiniCPMO", "KimiVLForConditionalGeneration", *DEEPSEEKS),
    *("Gemma4ForConditionalGeneration", "GlmOcrForConditionalGeneration"),
    *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
    *("Exaone4_5_ForConditionalGeneration", "VideoLlama3ForConditionalGeneration"),
    "Qwen2_5OmniThinkerForConditionalGeneration",
    *(*VILAS, *NEWER),
)
# whose text model sees its whole prompt forwards too
PROMPT_SEES_ITSELF = ("PaliGemmaForConditionalGeneration",)
# whose class leaves out the text model's scale of the logits
UNSCALED = ("AyaVisionForConditionalGeneration", "Cohere2VisionForConditionalGeneration")


def composite(c: Config) -> Decoder:
    """The text model's record; CheckpointError for a text model that has no family."""
    held = _KNOWN.get(c.model_type)
    if held is None:
        raise c.error("text_config", f"has the model_type {c.model_type!r}, which has no family")
    if c.architecture in PROMPT_SEES_ITSELF:  # what its text model's config says of the prompt
        c = c.replace(use_bidirectional_attention=False)
    if c.architecture in WOVEN:
        c = c.replace(rope_parameters={**c.rope_parameters, "mrope_interleaved": True})
    decoder = find(str(held["architecture"]))(c)
    if c.architecture in WOVEN:
        decoder = replace(decoder, names={**decoder.names, **WOVEN_NAMES})
    if c.architecture in UNSCALED:
        decoder = replace(decoder, logit_scale=1.0)
    names: dict[str, Any] = {**DEFAULT, **decoder.names}
    own: dict[str, Any] = dict(decoder.names)
    if not decoder.tied:  # the whole model may tie where the text model does not say so
        own["head"] = AnyOf(names["head"], names["embed"])
    sparse = next((b.ffn for b in decoder.blocks if isinstance(b.ffn, Moe)), None)
    if sparse is not None and "moe.up" not in own:  # the experts' axes may be the other way round
        own["moe.up"] = Named(
            ("model.layers.{i}.mlp.experts.gate_up_proj",), TransposeExperts(decoder.dim)
        )
        own["moe.down"] = Named(
            ("model.layers.{i}.mlp.experts.down_proj",), TransposeExperts(sparse.inner)
        )
        own["moe.up"] = AnyOf(names["moe.up"].spellings[0], own["moe.up"])
        own["moe.down"] = AnyOf(names["moe.down"].spellings[0], own["moe.down"])
    return replace(decoder, names=own)


# whose linear layers may be those of a model with adapters beside them
ADAPTED = ("Phi4MMForCausalLM", "Phi4MultimodalForCausalLM")


def adapted(c: Config) -> Decoder:
    """The text model; its adapters for images and speech are left out."""
    decoder = composite(c)
    attn, mlp = LAYER + "self_attn.", LAYER + "mlp."
    bases: dict[str, Any] = {
        "mixer.qkv": AnyOf(attn + "qkv_proj", attn + "qkv_proj.base_layer"),
        "mixer.o": AnyOf(attn + "o_proj", attn + "o_proj.base_layer"),
        "ffn.up": AnyOf(FUSED_UP, FUSED_UP + ".base_layer"),
        "ffn.down": AnyOf(mlp + "down_proj", mlp + "down_proj.base_layer"),
    }
    return replace(decoder, names={**decoder.names, **bases})
