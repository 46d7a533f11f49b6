"""Janus-Pro, Intern-S1 and Skywork R1V with their published layouts, against the classes of
transformers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("PIL")
tf = pytest.importorskip("transformers")
from safetensors.torch import save_file  # noqa: E402

from tests.multimodal.compare_answers import assert_same_answers  # noqa: E402
from tests.multimodal.tiny import SQUARE, Tiny, image_processor, janus, save  # noqa: E402
from tests.multimodal.tiny_later import as_internvl_chat, internvl_chat  # noqa: E402

_JANUS = (
    (r"model\.language_model\.", "language_model.model."),
    (r"lm_head\.", "language_model.lm_head."),
    (r"model\.(aligner\.)fc1", r"\1layers.0"),
    (r"model\.(aligner\.)hidden_layers\.0", r"\1layers.2"),
    (r"model\.vision_model\.", "vision_model.vision_tower."),
    (r"model\.(vqmodel)", r"gen_vision_model"),
    (r"model\.generation_", "gen_"),
)
_TOWER = (
    ("encoder.layers", "blocks"), ("self_attn.projection_layer", "attn.proj"),
    ("self_attn", "attn"), ("layer_norm", "norm"), ("post_layernorm", "norm"),
    ("embeddings.position_embedding.weight", "pos_embed"),
    ("embeddings.patch_embedding", "patch_embed.proj"),
)  # fmt: skip


def janus_name(name: str) -> str:
    """Janus-Pro's published name of a tensor of the class."""
    for pattern, new in _JANUS:
        name = re.sub("^" + pattern, new, name)
    if name.startswith("vision_model."):
        for ours, theirs in _TOWER:
            name = name.replace(ours, theirs)
    return name


def publish_janus(model: Any, folder: Path) -> None:
    """Fused q, k and v, positions with an axis of one, and the image generation weights."""
    named = {janus_name(n): t.contiguous() for n, t in model.state_dict().items()}
    for name in [n for n in named if ".attn.q_proj." in n and n.startswith("vision_model.")]:
        parts = [named.pop(name.replace("q_proj", f"{one}_proj")) for one in "qkv"]
        named[name.replace("q_proj", "qkv")] = torch.cat(parts)
    place = "vision_model.vision_tower.pos_embed"
    named[place] = named[place][None]
    save_file(named, folder / "model.safetensors")
    sizes = {"width": 32, "layers": 2, "heads": 2, "patch_size": 7, "mlp_ratio": 2}
    encoder = {"image_size": 28, "model_name": "siglip_large_patch16_384", **sizes}
    aligner = {"depth": 2, "input_dim": 32, "n_embed": 64, "projector_type": "mlp_gelu"}
    raw = {
        "architectures": ["MultiModalityCausalLM"], "model_type": "multi_modality",
        "language_config": model.config.text_config.to_dict(),
        "vision_config": {"cls": "CLIPVisionTower", "model_type": "vision", "params": encoder},
        "aligner_config": {"cls": "MlpProjector", "model_type": "aligner", "params": aligner},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    described = {"processor_class": "VLChatProcessor", "num_image_tokens": 16}
    (folder / "processor_config.json").write_text(json.dumps(described))


def untied_janus() -> Tiny:
    made = janus()
    made.config.tie_word_embeddings = made.config.text_config.tie_word_embeddings = False
    half = [0.5, 0.5, 0.5]
    reader = image_processor("Janus", size=SQUARE, min_size=14, image_mean=half, image_std=half)
    whole = tf.JanusProcessor(reader, made.processor.tokenizer, num_image_tokens=16)
    return replace(made, processor=whole)


def publish_intern_s1(model: Any, folder: Path) -> None:
    """The class's names with another model_type and processor."""
    named = {name: one.contiguous() for name, one in model.state_dict().items()}
    save_file(named, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"architectures": ["InternS1ForConditionalGeneration"], "model_type": "interns1"}
    raw["vision_config"] |= {"model_type": "interns1_vision", "drop_path_rate": 0.0}
    (folder / "config.json").write_text(json.dumps(raw))
    described = {"processor_class": "InternS1Processor", "image_seq_length": 4}
    (folder / "processor_config.json").write_text(json.dumps(described))


def intern_s1() -> Tiny:
    made = internvl_chat("qwen3")
    made.processor.image_processor.max_patches = 12
    return made


def publish_skywork(model: Any, folder: Path) -> None:
    """InternVL's names with another name of the model and of its text model's config."""
    as_internvl_chat(folder)
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"architectures": ["SkyworkR1VChatModel"], "model_type": "skywork_chat"}
    raw["text_config"] = raw.pop("llm_config")
    (folder / "config.json").write_text(json.dumps(raw))


CASES = {
    "janus": (untied_janus, publish_janus),
    "intern_s1": (intern_s1, publish_intern_s1),
    "skywork": (internvl_chat, publish_skywork),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")  # warnings of Hugging Face about tiny configs
def test_published_checkpoints_equal_their_classes(name: str, tmp_path: Path) -> None:
    make, publish = CASES[name]
    tiny = make()
    model = save(tiny, tmp_path)
    publish(model, tmp_path)
    assert_same_answers(tiny, model, tmp_path)
