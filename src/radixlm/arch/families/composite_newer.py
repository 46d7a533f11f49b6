"""Further language models behind towers, as data for ``composite.py`` and ``media_facts.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NEWER = (
    *("QianfanOCRForConditionalGeneration", "Lfm3VlForConditionalGeneration"),
    *("HyperCLOVAXVisionV2ForConditionalGeneration", "MiniCPMOcrForConditionalGeneration"),
    "Gemma4UnifiedForConditionalGeneration",
)
# whose language model is described elsewhere, by the family of its text model
NEWER_TOWERED = (
    *("Step3p7ForConditionalGeneration", "MuseGlimmerForConditionalGeneration"),
    "MuseSparkForConditionalGeneration",
)
# A text model's own model_type -> the one whose class it has; and its class's defaults.
NEWER_TEXT_TYPES: Mapping[str, str] = {}
NEWER_TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {}
# whose text model multiplies all that comes in, the rows of towers too
_SCALED = ("HyperCLOVAXVisionV2ForConditionalGeneration",)


def row_scale(architecture: str, raw: Mapping[str, Any]) -> float:
    """By what the text model of a config.json multiplies what the towers make."""
    text = raw.get("text_config")
    if architecture not in _SCALED or not isinstance(text, Mapping):
        return 1.0
    return float(text.get("embedding_multiplier") or 1.0)


def pictures_see_themselves(architecture: str, raw: Mapping[str, Any]) -> bool:
    """Whether the config says that the places of a picture see one another, in all layers."""
    if architecture != "Gemma4UnifiedForConditionalGeneration":
        return False
    text = raw.get("text_config") or {}
    return bool(text.get("use_bidirectional_attention", "vision") == "vision")


def most_places(architecture: str, raw: Mapping[str, Any]) -> int:
    """Of a picture whose places see one another also beyond the window; 0: any number."""
    if not pictures_see_themselves(architecture, raw):
        return 0
    return int((raw.get("text_config") or {}).get("sliding_window") or 1024)
