"""Tiny checkpoints of families that see, of many kinds; see ``tiny.py``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers as tf

from tests.multimodal.tiny import PINPOINTS, SIGLIP, SQUARE, Tiny, pictures, text, tokenizer

AREA = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}


def hunyuan_vl() -> Tiny:
    rope = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "mrope_section": [2, 3, 1, 2]}
    return _hunyuan({"rope_theta": 10000.0, **rope})


def hunyuan_vl_plain() -> Tiny:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 4, 1]}
    return _hunyuan(rope)


def _hunyuan(rope: dict[str, Any]) -> Tiny:
    tok = tokenizer(image_token="<image>", image_start_token="<im>", image_end_token="</im>")
    tower = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "patch_size": 7,
        "num_attention_heads": 2, "out_hidden_size": 64, "max_image_size": 112,
        "img_max_token_num": 64,
    }  # fmt: skip
    config = tf.HunYuanVLConfig(
        vision_config=tower, text_config=text("hunyuan_vl_text", head_dim=16, rope_parameters=rope),
        image_token_id=tok.convert_tokens_to_ids("<image>"), tie_word_embeddings=True,
    )  # fmt: skip
    reader = pictures("HunYuanVL", patch_size=7, merge_size=2, temporal_patch_size=1, size=AREA)
    return Tiny(config, tf.HunYuanVLProcessor(reader, tok), "<im><image></im>")


def granite4_vision() -> Tiny:
    tower = {**SIGLIP, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3}
    scales = {
        "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
        "attention_multiplier": 0.2, "num_hidden_layers": 5,
    }  # fmt: skip
    former = {
        "model_type": "blip_2_qformer", "num_hidden_layers": 1, "intermediate_size": 48,
        "cross_attention_frequency": 1, "use_qformer_text_input": False,
    }  # fmt: skip
    config = tf.Granite4VisionConfig(
        vision_config=tower, text_config=text("granite4_vision_text", **scales),
        qformer_config=former, downsample_rate="1/2", deepstack_layer_map=[[1, 0], [-1, 2]],
        spatial_target_layers=[1, 2, 3, 4], image_token_id=257, image_grid_pinpoints=PINPOINTS,
        vision_feature_select_strategy="full",
    )  # fmt: skip
    reader = pictures("LlavaNext", size=SQUARE, crop_size=SQUARE, image_grid_pinpoints=PINPOINTS)
    whole = tf.Granite4VisionProcessor(
        reader, tokenizer("<image>"), patch_size=7, vision_feature_select_strategy="full",
        downsample_rate="1/2",
    )  # fmt: skip
    return Tiny(config, whole, "<image>")


def as_hunyuan_ocr(folder: Path) -> None:
    """The text model's keys at the top, and what turns under its first name."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    whole = {**raw.pop("text_config"), **raw}
    rope = whole.pop("rope_parameters")
    sections = rope.pop("mrope_section")
    whole["rope_theta"] = rope.pop("rope_theta")
    whole["rope_scaling"] = {**rope, "xdrope_section": sections, "type": "xdrope"}
    del whole["rope_scaling"]["rope_type"]
    path.write_text(json.dumps(whole))


SEEING: dict[str, Callable[[], Tiny]] = {
    made.__name__: made for made in (hunyuan_vl, hunyuan_vl_plain, granite4_vision)
}
# whose processors need a package that is not always there
SEEING_NEEDS: dict[str, str] = {}
# checkpoints that have other names than their class in transformers
PUBLISHED: dict[str, Callable[[Path], None]] = {"hunyuan_vl": as_hunyuan_ocr}
