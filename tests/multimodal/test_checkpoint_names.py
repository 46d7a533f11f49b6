"""Checkpoints whose published architecture name differs from transformers', or whose text config is
at the top level."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixlm.arch.hf import describe
from radixlm.arch.media.registry import multimodal_spec

pytest.importorskip("PIL")
pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file, save_file

from tests.multimodal.compare_answers import assert_same_answers
from tests.multimodal.tiny import Tiny, lighton_ocr, save
from tests.multimodal.tiny_more import kimi_k25
from tests.multimodal.tiny_newer import cosmos3_edge
from tests.multimodal.tiny_newest import held as text_of

CALLED: dict[str, tuple[str, Callable[[], Tiny], str]] = {
    "KimiK25ForConditionalGeneration": ("PIL", kimi_k25, "kimi_k2"),
    "LightOnOCRForConditionalGeneration": ("PIL", lighton_ocr, "qwen3"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLED)
@pytest.mark.filterwarnings("ignore")
def test_the_published_architecture_is_known(name: str, tmp_path: Path) -> None:
    needs, make, text = CALLED[name]
    pytest.importorskip(needs)
    tiny = make()
    model = save(tiny, tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text()) | {"architectures": [name]}
    raw["text_config"]["model_type"] = text
    path.write_text(json.dumps(raw))
    assert_same_answers(tiny, model, tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Dots3NoteForConditionalGeneration", "Dots3NoteForCausalLM"),
        ("Glm5NextForConditionalGeneration", "Glm5NextForCausalLM"),
    ],
)
def test_top_level_keys_are_those_of_the_text_model(name: str, text: str, tmp_path: Path) -> None:
    kind = {"Dots3": "dots3_note", "Glm5N": "glm5_next"}[name[:5]]
    config, encoders = text_of(text), {"vision_config": {"patch_size": 14}, "image_token_id": 5}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"architectures": [name], "model_type": kind, **encoders, **config}))
    found = describe(tmp_path)
    nested = {"text_config": {**config, "model_type": f"{kind}_text"}}
    raw = {"architectures": [name], "model_type": kind, **encoders, **nested}
    path.write_text(json.dumps(raw))
    assert found == describe(tmp_path)
    spec = multimodal_spec(name, raw)
    assert spec is not None and spec.tokens == {"image": 5}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_image_generation_weights_are_ignored(tmp_path: Path) -> None:
    """Names of the published weights of Cosmos 3 Edge."""
    tiny = cosmos3_edge()
    model = save(tiny, tmp_path)
    path = tmp_path / "model.safetensors"
    made = "self_attn.add_q_proj.weight self_attn.norm_added_k.weight mlp_moe_gen.up_proj.weight"
    more = [f"layers.0.{name}" for name in made.split()]
    more += ["time_embedder.linear_1.weight", "proj_in.weight", "norm_moe_gen.weight"]
    held = load_file(path)
    assert "layers.0.self_attn.to_q.weight" in held
    save_file({**held, **{name: torch.zeros(3) for name in more}}, path, {"format": "pt"})
    assert_same_answers(tiny, model, tmp_path)


def test_gemma_4_configs_with_bidirectional_images() -> None:
    name = "Gemma4ForConditionalGeneration"
    raw: dict[str, Any] = {"image_token_id": 5, "text_config": {}}

    def spec(which: str) -> tuple[str, int]:
        found = multimodal_spec(which, raw)
        assert found is not None
        return found.bidirectional, found.max_image_tokens

    unified = name.replace("4For", "4UnifiedFor")
    assert (spec(name), spec(unified)) == (("", 0), ("image", 1024))
    raw["text_config"] = {"use_bidirectional_attention": None}
    assert (spec(name), spec(unified)) == (("", 0), ("", 0))
    raw["text_config"] = {"use_bidirectional_attention": "vision", "sliding_window": 40}
    assert (spec(name), spec(unified)) == (("image", 0), ("image", 40))
