"""Cohere Compass: sliding layers rotate by an image's rows and columns, other layers have no
rope."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixlm.arch.hf import describe
from radixlm.base.errors import CheckpointError
from radixlm.multimodal.checkpoint import NoVideos

pytest.importorskip("PIL")
pytest.importorskip("transformers")
import transformers as tf

from tests.multimodal.compare_answers import assert_same_answers
from tests.multimodal.tiny import DEEP, TEXT, Tiny, image_processor, processor, save, tokenizer

KINDS = ["sliding_attention", "full_attention"] * 2
TURNS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


def compass() -> Tiny:
    marks = ("<|IMAGE_PAD|>", "<|VIDEO_PAD|>", "<|VISION_START|>", "<|VISION_END|>")
    tok = tokenizer(*marks)
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = {name: tok.convert_tokens_to_ids(mark) for name, mark in zip(names, marks, strict=True)}
    shared = {"num_heads": 2, "patch_size": 7, "spatial_merge_size": 2, "temporal_patch_size": 2}
    shape = {key: value for key, value in TEXT.items() if key != "rms_norm_eps"}
    config = tf.CohereCompassConfig(
        vision_config={"hidden_size": 32, **shared, **DEEP},
        text_config={
            **shape, "num_hidden_layers": 4, "head_dim": 16, "layer_types": KINDS,
            "sliding_window": 12, "logit_scale": 0.7,
            "rope_parameters": {"sliding_attention": TURNS, "full_attention": None},
        },
        **ids,
    )  # fmt: skip
    size = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}
    reader = image_processor(
        "Qwen2VL", patch_size=7, merge_size=2, temporal_patch_size=2, size=size
    )
    whole = processor(tf.CohereCompassProcessor, reader, tok, video_processor=NoVideos())
    return Tiny(config, whole, "<|VISION_START|><|IMAGE_PAD|><|VISION_END|>")


@pytest.mark.filterwarnings("ignore")  # warnings of Hugging Face about tiny configs
def test_answers_equal_hugging_face(tmp_path: Path) -> None:
    tiny = compass()
    assert_same_answers(tiny, save(tiny, tmp_path), tmp_path)


def test_sections_that_do_not_fit_are_refused_by_name() -> None:
    raw = compass().config.to_dict() | {"architectures": ["CohereCompassForConditionalGeneration"]}
    raw["text_config"]["rope_parameters"]["sliding_attention"].pop("mrope_section")
    with pytest.raises(CheckpointError, match="mrope_section"):
        describe(raw)
