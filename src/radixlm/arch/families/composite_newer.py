"""Further language models behind encoders, as data for ``composite.py`` and ``media_facts.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from radixlm.arch.families.media_layouts_ocr import DEEPSEEK_OCRS
from radixlm.arch.names import LAYER, SPLIT_QKV, AnyOf, Names
from radixlm.base.errors import CheckpointError
from radixlm.base.record import Record

# what begins, fills and ends images and videos, beside the text model's config
MARKS = tuple(
    f"{kind}_{part}token_id" for kind in ("image", "video") for part in ("", "start_", "end_")
)
# what joins the stream before which layers, beside the text model's config
JOINS = ("deepstack_layer_map", "spatial_target_layers")
# whose text model has other experts for the places of images
ERNIES = (
    "Ernie4_5_VLMoeForConditionalGeneration",
    "Ernie4_5_VL_MoeForConditionalGeneration",
)
# whose processors put a prompt's only image before the text
BEFORE = (
    *("Blip2ForConditionalGeneration", "InstructBlipForConditionalGeneration"),
    "FuyuForCausalLM",
)
# whose images are added to the embeddings of their tokens, and see one another and their marks
MARKED = ("Molmo2ForConditionalGeneration",)
# whose layers read the tokens in the places of media
KEEPING = ("Qwen4ExpForConditionalGeneration", *MARKED)
NEWER = (
    *("QianfanOCRForConditionalGeneration", "Lfm3VlForConditionalGeneration"),
    *("HyperCLOVAXVisionV2ForConditionalGeneration", "MiniCPMOcrForConditionalGeneration"),
    *("Gemma4UnifiedForConditionalGeneration", "GraniteDoclingForConditionalGeneration"),
    *("MiniMaxM3SparseForConditionalGeneration", "Glm5NextForConditionalGeneration"),
    "Dots3NoteForConditionalGeneration",
    *("MiniCPMV4_7ForConditionalGeneration", "Cosmos3EdgeForConditionalGeneration"),
    *("HunYuanVLForConditionalGeneration", *BEFORE),
    "CohereCompassForConditionalGeneration",
    # as their authors call what transformers has under another name
    *("KimiK25ForConditionalGeneration", "LightOnOCRForConditionalGeneration"),
)
# whose language model is described elsewhere, by the family of its text model
NEWER_TOWERED = (
    *("Step3p7ForConditionalGeneration", "MuseGlimmerForConditionalGeneration"),
    "MuseSparkForConditionalGeneration",
    *(*ERNIES, "Granite4VisionForConditionalGeneration"),
    *("ChameleonForConditionalGeneration", "DeepseekOcr2ForConditionalGeneration"),
    *("Qwen4ExpForConditionalGeneration", "InklingForConditionalGeneration"),
    *(*MARKED, *DEEPSEEK_OCRS),
)
# A text model's own model_type -> the one whose class it has; and its class's defaults.
NEWER_TEXT_TYPES: Mapping[str, str] = {
    "granite4_vision_text": "granite",
    "granite_docling_text": "granite",
    "dots3_note": "dots3_note_text",  # published with the text model's keys at the top
    "glm5_next": "glm5_next_text",
    "kimi_k2": "deepseek_v3",
    "cosmos3_edge_text": "arcee",
    "deepseek_ocr2_text": "deepseek_v2",
    "fuyu": "persimmon",  # published with the text model's keys at the top
    "hunyuan_vl": "hunyuan_v1_dense",  # published with the text model's keys at the top
    "hunyuan_vl_text": "hunyuan_v1_dense",
    "ernie4_5_vl_moe": "ernie4_5_moe",
    "ernie4_5_vl_moe_text": "ernie4_5_moe",
}
NEWER_TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "fuyu": {"partial_rotary_factor": 0.5, "rope_theta": 25000.0},
    "cosmos3_edge_text": {
        "vocab_size": 131072,
        "hidden_size": 2048,
        "intermediate_size": 9216,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "hidden_act": "relu2",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 100_000_000.0,
            "mrope_section": [24, 20, 20],
        },
    },
    "granite_docling_text": {
        "vocab_size": 133800,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "embedding_multiplier": 12.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.263,
        "attention_multiplier": 0.015625,
    },
}
# whose ropes turn by an image's number beside row and column
NUMBERED = ("HunYuanVLForConditionalGeneration",)
# whose class weaves the sections of its ropes whatever the config says, and names of its weights
WOVEN = ("Cosmos3EdgeForConditionalGeneration",)
_ATTENTION, _MLP = LAYER + "self_attn.", LAYER + "mlp."
WOVEN_NAMES: Names = {
    "mixer.qkv": AnyOf(SPLIT_QKV, tuple(_ATTENTION + one for one in ("to_q", "to_k", "to_v"))),
    "mixer.o": AnyOf(_ATTENTION + "o_proj", _ATTENTION + "to_out"),
    "ffn.up": AnyOf(_MLP + "up_proj", _MLP + "fc1"),
    "ffn.down": AnyOf(_MLP + "down_proj", _MLP + "fc2"),
}
# whose encoders' rows join before many layers
JOINING = ("Granite4VisionForConditionalGeneration",)
# whose text model multiplies all that comes in, the rows of encoders too; and by what if it is not
# said
_SCALED = {
    "GraniteSpeechForConditionalGeneration": 1.0,
    "HyperCLOVAXVisionV2ForConditionalGeneration": 1.0,
    "GraniteDoclingForConditionalGeneration": 12.0,
}


def joined_layers(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers before which an encoder's rows join the stream, in order; () if the config names
    none."""
    pairs = raw.get("deepstack_layer_map")
    if not pairs:
        return ()
    further = raw.get("spatial_target_layers") or (12, 15, 18, 21)
    return tuple(sorted({*(int(layer) for _, layer in pairs), *(int(one) for one in further)}))


def embed_scale(architecture: str, raw: Mapping[str, Any]) -> float:
    """By what the text model of a config.json multiplies what the encoders make."""
    text = raw.get("text_config")
    if architecture not in _SCALED or not isinstance(text, Mapping):
        return 1.0
    found = text.get("embedding_multiplier")
    return float(_SCALED[architecture] if found is None else found)


# whose places of an image may see one another, and whether they do if the config does not say
_MAY_LOOK_AHEAD = {
    "Gemma4ForConditionalGeneration": None,
    "Gemma4UnifiedForConditionalGeneration": "vision",
}


def images_see_themselves(architecture: str, raw: Mapping[str, Any]) -> bool:
    """Whether the config says that the places of an image see one another."""
    if architecture not in _MAY_LOOK_AHEAD:
        return False
    said = (raw.get("text_config") or {}).get("use_bidirectional_attention", "")
    return bool((said if said != "" else _MAY_LOOK_AHEAD[architecture]) == "vision")


def max_image_tokens(architecture: str, raw: Mapping[str, Any]) -> int:
    """Of an image whose places see one another also beyond the window; 0: any number."""
    is_wider = architecture == "Gemma4UnifiedForConditionalGeneration"
    if not is_wider or not images_see_themselves(architecture, raw):
        return 0
    return int((raw.get("text_config") or {}).get("sliding_window") or 1024)


class Canvas(Record):
    """Where the crops of an image lie on one plane: ids of the marks around them, and how many
    rows and columns of patches make a place."""

    slice_start: int
    slice_end: int
    image_start: int
    image_end: int
    newline: int
    merge: int

    @property
    def marks(self) -> tuple[int, ...]:
        """All ids."""
        slices = (self.slice_start, self.slice_end)
        return (*slices, self.image_start, self.image_end, self.newline)


def canvas_of(architecture: str, raw: Mapping[str, Any]) -> Canvas | None:
    """Of a model whose ropes turn by the place on a canvas; CheckpointError if its marks are not
    named."""
    if architecture != "MiniCPMV4_7ForConditionalGeneration":
        return None
    names = ("slice_start_id", "slice_end_id", "image_start_id", "image_end_id", "newline_id")
    found = [raw.get(name) for name in names]
    if not all(isinstance(one, int) for one in found):
        raise CheckpointError(f"config.json: one of {', '.join(names)} is missing")
    a, b, c, d, e = (int(one or 0) for one in found)
    return Canvas(a, b, c, d, e, 2 if raw.get("downsample_mode") == "4x" else 4)
