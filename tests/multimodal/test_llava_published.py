"""LLaVA with its published names, against the classes of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from radixlm.base.errors import CheckpointError

pytest.importorskip("PIL")
tf = pytest.importorskip("transformers")
from safetensors.torch import save_file  # noqa: E402

from radixlm.models.encoders.transformers_encoder import TransformersEncoder  # noqa: E402
from radixlm.multimodal.checkpoint import class_of, load_processor  # noqa: E402
from tests.multimodal.compare_answers import assert_same_answers, assert_same_videos  # noqa: E402
from tests.multimodal.tiny import (  # noqa: E402
    CLIP,
    SQUARE,
    Tiny,
    image_processor,
    llava,
    llava_next,
    llava_onevision,
    processor,
    save,
    text,
    tokenizer,
)

PROJECTOR = {"linear_1": "0", "linear_2.0": "3", "linear_2.1": "4", "linear_2": "2", "act.0": "1"}


def padded() -> Tiny:
    """LLaVA 1.5 pads an image to a square with its mean colour."""
    made = llava()
    reader = image_processor("Llava", size={"shortest_edge": 28}, crop_size=SQUARE, do_pad=True)
    whole = tf.LlavaProcessor(
        reader, made.processor.tokenizer, patch_size=7, image_token="<image>",
        vision_feature_select_strategy="default", num_additional_image_tokens=1,
    )  # fmt: skip
    return replace(made, processor=whole)


def yi_vl() -> Tiny:
    """Norms in the projector, another image token."""
    made = padded()
    tok = tokenizer("<image_placeholder>")
    whole = tf.LlavaProcessor(
        made.processor.image_processor, tok, patch_size=7, image_token="<image_placeholder>",
        vision_feature_select_strategy="default", num_additional_image_tokens=1,
    )  # fmt: skip
    return replace(made, processor=whole, placeholder="<image_placeholder>")


def add_norms(model: Any) -> None:
    """After both linear layers of the projector."""
    projector = model.model.multi_modal_projector
    norms = torch.nn.LayerNorm(64), torch.nn.LayerNorm(64)
    for norm in norms:
        norm.weight.data.normal_(1, 0.3)
        norm.bias.data.normal_(0, 0.3)
    projector.act = torch.nn.Sequential(norms[0], projector.act)
    projector.linear_2 = torch.nn.Sequential(projector.linear_2, norms[1])


def onevision() -> Tiny:
    """With the pixel means of SigLIP."""
    made = llava_onevision()
    made.processor.image_processor.image_mean = [0.5, 0.5, 0.5]
    made.processor.image_processor.image_std = [0.5, 0.5, 0.5]
    return made


def published(name: str) -> str:
    """The published name of a tensor; for the encoder, the part after its folder."""
    name = name.removeprefix("model.")
    if name.startswith("language_model."):
        return "model." + name.removeprefix("language_model.")
    for ours, theirs in PROJECTOR.items():
        name = name.replace(f"multi_modal_projector.{ours}.", f"model.mm_projector.{theirs}.")
    name = "model.image_newline" if name == "image_newline" else name
    return name.replace("vision_tower.", "model.vision_tower.vision_tower.vision_model.")


def publish(
    model: Any, folder: Path, architecture: str, has_encoder_folder: bool, **own: Any
) -> None:
    """Rewrite the files of `tiny.save`: names, config, a tokenizer without the image token, the
    encoder's config (and weights) in a separate folder."""
    tensors = {published(name): one.contiguous() for name, one in model.state_dict().items()}
    encoder = folder / "tiny-encoder"
    encoder.mkdir()
    vision = model.config.vision_config.to_dict()
    if vision["model_type"].startswith("siglip"):
        vision["num_hidden_layers"] += 1  # the last one is not published
    (encoder / "config.json").write_text(json.dumps({"vision_config": vision, **vision}))
    if has_encoder_folder:
        prefix = "model.vision_tower.vision_tower."
        held = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        save_file(held, encoder / "model.safetensors")
        tensors = {n: t for n, t in tensors.items() if not n.startswith(prefix)}
    save_file(tensors, folder / "model.safetensors")
    text = model.config.text_config.to_dict()
    raw = {
        **text, "architectures": [architecture], "model_type": "llava",
        "mm_vision_tower": "someone/tiny-encoder", "mm_projector_type": "mlp2x_gelu",
        "mm_hidden_size": 32, "mm_vision_select_layer": -2, "mm_vision_select_feature": "patch",
        **own,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    for name in ("processor_config.json", "preprocessor_config.json"):
        (folder / name).unlink(missing_ok=True)
    tokenizer().save_pretrained(folder)


def llava_vid() -> Tiny:
    """Images as in LLaVA 1.6, videos in squares of four patches."""
    made = llava_next()
    config = tf.LlavaNextVideoConfig(
        vision_config=CLIP, text_config=text("llama"), image_token_index=257,
        video_token_index=258, image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]],
        vision_feature_layer=-2,
    )  # fmt: skip
    kind = class_of("LlavaNextVideoVideoProcessor")
    videos = kind(size={"shortest_edge": 28}, crop_size=SQUARE)
    whole = processor(
        tf.LlavaNextVideoProcessor, videos, made.processor.image_processor,
        tokenizer("<image>", "<video>"), patch_size=7, vision_feature_select_strategy="default",
        image_token="<image>", video_token="<video>", num_additional_image_tokens=1,
    )  # fmt: skip
    return Tiny(config, whole, "<image>")


ANYRES = {"mm_patch_merge_type": "spatial_unpad", "image_aspect_ratio": "anyres"}
KINDS: dict[str, tuple[Callable[[], Tiny], str, bool, dict[str, Any]]] = {
    "1.5": (padded, "LlavaLlamaForCausalLM", True, {"image_aspect_ratio": "pad"}),
    "yi": (
        yi_vl, "YiVLForCausalLM", True,
        {"image_aspect_ratio": "pad", "mm_projector_type": "mlp2x_gelu_Norm"},
    ),
    "1.6": (
        llava_next, "LlavaMistralForCausalLM", False,
        {**ANYRES, "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]},
    ),
    "video": (
        llava_vid, "LlavaVidForCausalLM", True,
        {**ANYRES, "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]},
    ),
    "onevision": (
        onevision, "LlavaQwenForCausalLM", False,
        {**ANYRES, "image_aspect_ratio": "anyres_max_9", "image_grid_pinpoints": "(1x1),...,(2x2)"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore")  # warnings of Hugging Face about tiny configs
def test_published_checkpoints_equal_their_classes(name: str, tmp_path: Path) -> None:
    make, architecture, has_encoder_folder, own = KINDS[name]
    tiny = make()
    model = save(tiny, tmp_path)
    if "mm_projector_type" in own:
        add_norms(model)
    publish(model, tmp_path, architecture, has_encoder_folder, **own)
    assert_same_answers(tiny, model, tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_published_llava_next_video(tmp_path: Path) -> None:
    make, architecture, has_encoder_folder, own = KINDS["video"]
    tiny = make()
    model = save(tiny, tmp_path)
    publish(
        model, tmp_path, architecture, has_encoder_folder, mm_spatial_pool_mode="average", **own
    )
    assert_same_videos(tiny, model, tmp_path)


@pytest.mark.parametrize("own", [{"image_aspect_ratio": "pad"}, {"mm_spatial_pool_stride": 4}])
@pytest.mark.filterwarnings("ignore")
def test_unsupported_settings_of_llava_next_video_are_refused(
    own: dict[str, Any], tmp_path: Path
) -> None:
    make, architecture, has_encoder_folder, usual = KINDS["video"]
    model = save(make(), tmp_path)
    publish(model, tmp_path, architecture, has_encoder_folder, **{**usual, **own})
    with pytest.raises(CheckpointError, match="cannot be understood"):
        TransformersEncoder(tmp_path, torch.device("cpu"), torch.float32)


def test_a_missing_encoder_is_named(tmp_path: Path) -> None:
    raw = {"architectures": ["LlavaLlamaForCausalLM"], "mm_vision_tower": "someone/other"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"someone/other.*beside the checkpoint"):
        load_processor(tmp_path)


def test_an_encoder_without_weights_is_named(tmp_path: Path) -> None:
    raw = {
        "architectures": ["LlavaLlamaForCausalLM"], "hidden_size": 64,
        "mm_vision_tower": "someone/encoder", "mm_projector_type": "mlp2x_gelu",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder" / "config.json").write_text(json.dumps(CLIP))
    save_file({"model.mm_projector.0.bias": torch.zeros(64)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no weights of its vision encoder"):
        TransformersEncoder(tmp_path, torch.device("cpu"), torch.float32)
