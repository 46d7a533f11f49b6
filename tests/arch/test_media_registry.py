"""Each row of the multimodal registry names things that exist."""

from __future__ import annotations

from typing import get_args

import pytest

from radixlm.arch.hf import describe
from radixlm.arch.media import from_config
from radixlm.arch.media.config_json import architecture_of
from radixlm.arch.media.layout import CheckpointLayout
from radixlm.arch.media.registry import (
    MULTIMODAL,
    layout_of,
    multimodal_spec,
    row_of,
    text_model_type,
)
from radixlm.arch.media.spec import Encoder, Transcriber, Video
from radixlm.arch.registry import ARCHITECTURES, find
from radixlm.arch.spec import Attention
from radixlm.multimodal.audio_processors import OF_ONE_CLIP
from radixlm.multimodal.audio_processors import PROCESSORS as AUDIO_PROCESSORS
from radixlm.multimodal.image_processors import PROCESSORS as IMAGE_PROCESSORS


@pytest.mark.parametrize("name", MULTIMODAL)
def test_a_row_names_what_exists(name: str) -> None:
    row = MULTIMODAL[name]
    assert callable(find(name)) and callable(getattr(from_config, row.reader))
    assert not row.text_architecture or row.text_architecture in ARCHITECTURES
    assert row.video in get_args(Video) and row.encoder in get_args(Encoder)
    assert row.transcriber in get_args(Transcriber)
    assert row.audio_processor in ("", *OF_ONE_CLIP, *AUDIO_PROCESSORS)
    layout = layout_of(row)
    assert (layout is None) == (not row.layout)
    assert layout is None or isinstance(layout, CheckpointLayout)
    has_processor = row.custom in IMAGE_PROCESSORS or (layout is not None and layout.processor)
    assert has_processor or row.audio_processor or not row.custom
    assert isinstance(text_model_type(name, {}), str)


def test_a_text_model_has_no_row() -> None:
    assert row_of({"architectures": ["LlamaForCausalLM"]}) is None
    assert multimodal_spec("LlamaForCausalLM", {}) is None
    assert text_model_type("LlamaForCausalLM", {}) == ""


def test_a_folder_without_an_architecture_is_known_by_its_model_type() -> None:
    assert architecture_of({"model_type": "vila"}) == "VILAForConditionalGeneration"
    assert architecture_of({"model_type": "llama"}) == ""


@pytest.mark.parametrize(
    ("kind", "model_type", "head_dim", "sections", "is_interleaved"),
    [
        ("Qwen3VL", "qwen3_vl", 16, (24, 20, 20), True),  # cut to the 8 pairs
        ("Qwen3_5", "qwen3_5", 64, (11, 11, 10), True),
        ("Qwen2_5_VL", "qwen2_5_vl", 128, (16, 24, 24), False),
        ("Qwen2_5_VL", "qwen2_5_vl", 16, (), False),  # its class fits no other width
        ("Glm4v", "glm4v", 128, (8, 12, 12), False),
    ],
)
def test_sections_of_m_rope_that_a_config_leaves_out(
    kind: str, model_type: str, head_dim: int, sections: tuple[int, ...], is_interleaved: bool
) -> None:
    """They are those of the class."""
    text = {
        "model_type": f"{model_type}_text",
        "hidden_size": 4 * head_dim,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "layer_types": ["full_attention"],
        "vocab_size": 400,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5 if kind == "Glm4v" else 1.0,
        },
    }
    raw = {"architectures": [f"{kind}ForConditionalGeneration"], "text_config": text}
    attention = describe(raw).blocks[0].attention
    assert isinstance(attention, Attention) and attention.rope is not None
    rope = attention.rope
    assert (rope.mrope_sections, rope.mrope_interleaved) == (sections, is_interleaved)
