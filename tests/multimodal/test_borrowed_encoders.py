"""Models with an encoder that transformers has under another name, with their published names:
Bee, R-4B, Eagle 2.5, NVLM-D, H2OVL, Mantis, Tarsier, Tarsier 2 and OpenCUA."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")
tf = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402

from radixlm.multimodal.checkpoint import load_processor  # noqa: E402
from tests.multimodal.compare_answers import assert_same_answers  # noqa: E402
from tests.multimodal.test_custom_encoders import Rows, check  # noqa: E402
from tests.multimodal.test_families import make_image  # noqa: E402
from tests.multimodal.test_vila import tiles  # noqa: E402
from tests.multimodal.tiny import (  # noqa: E402
    SIGLIP,
    Tiny,
    llava,
    llava_onevision,
    qwen2_5_vl,
    qwen2_vl,
    save,
    text,
    tokenizer,
)
from tests.multimodal.tiny_later import as_internvl_chat, internvl_chat  # noqa: E402

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def changed(folder: Path, *dropped: str, **changes: Any) -> None:
    """config.json with other keys, without a processor's class."""
    path = folder / "config.json"
    raw = {k: v for k, v in json.loads(path.read_text()).items() if k not in dropped}
    path.write_text(json.dumps(raw | changes))
    (folder / "processor_config.json").unlink(missing_ok=True)


def renamed(folder: Path, *rules: tuple[str, str]) -> None:
    path = folder / "model.safetensors"
    named = load_file(path)
    for old, new in rules:
        named = {re.sub(old, new, name): tensor for name, tensor in named.items()}
    save_file(named, path)


def reshaped(model: Any, inner: int, bias: bool = True, has_norm: bool = False) -> None:
    """Another projector, with random weights."""
    held = model.model.multi_modal_projector
    first = torch.nn.Linear(held.linear_1.in_features, inner, bias)
    held.linear_2 = torch.nn.Linear(inner, held.linear_2.out_features, bias)
    norm = torch.nn.LayerNorm(first.in_features, 1e-6)
    torch.nn.init.normal_(norm.bias)
    held.linear_1 = torch.nn.Sequential(norm, first) if has_norm else first


def seen_by(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    """The encoder's rows [N, D]."""
    with torch.no_grad():
        found = model.model.get_image_features(pixel_values=pixels).pooler_output
    return torch.cat([one.reshape(-1, one.shape[-1]) for one in found])


@pytest.mark.parametrize(
    ("architecture", "widening"),
    [("BeeForConditionalGeneration", 4), ("RForConditionalGeneration", 1)],
)
@pytest.mark.filterwarnings("ignore")  # warnings of Hugging Face about tiny configs
def test_a_onevision_with_a_norm_before_its_projector(
    architecture: str, widening: int, tmp_path: Path
) -> None:
    tiny = llava_onevision()
    model = save(tiny, tmp_path)
    reshaped(model, widening * 64, has_norm=True)
    model.save_pretrained(tmp_path)
    renamed(
        tmp_path, (r"projector\.linear_1\.0\.", "projector.pre_norm."),
        (r"projector\.linear_1\.1\.", "projector.linear_1."),
    )  # fmt: skip
    changed(tmp_path, architectures=[architecture], model_type="own_vl")
    assert_same_answers(tiny, model, tmp_path)


def eagle() -> Tiny:
    made = internvl_chat()
    config = made.config
    config.vision_config = tf.SiglipVisionConfig(**{**SIGLIP, "vision_use_head": False})
    config.vision_feature_select_strategy = "full"
    reader = made.processor.image_processor
    reader.image_mean = reader.image_std = [0.5, 0.5, 0.5]
    return made


@pytest.mark.filterwarnings("ignore")
def test_eagle(tmp_path: Path) -> None:
    tiny = eagle()
    model = save(tiny, tmp_path)
    renamed(
        tmp_path, (r".*vision_tower\.(vision_model\.)?", "vision_model.vision_model."),
        (r".*multi_modal_projector\.layer_norm", "mlp1.0"),
        (r".*multi_modal_projector\.linear_1", "mlp1.1"),
        (r".*multi_modal_projector\.linear_2", "mlp1.3"),
    )  # fmt: skip
    own = {"force_image_size": 28, "max_dynamic_patch": 4, "use_thumbnail": True}
    changed(
        tmp_path, "vision_feature_select_strategy", model_type="eagle_2_5_vl", **own,
        architectures=["Eagle2_5_VLForConditionalGeneration"], select_layer=-1,
        image_token_index=tiny.config.image_token_id,
    )  # fmt: skip
    assert_same_answers(tiny, model, tmp_path)


def normed(images: Sequence[Any]) -> torch.Tensor:
    cut = np.stack([np.asarray(one, np.float32) for one in images])
    scaled = (torch.tensor(cut) / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    return scaled.permute(0, 3, 1, 2)


def chat(folder: Path, architecture: str, *names: str, **own: Any) -> tuple[Any, Rows]:
    """A checkpoint of InternVL's layout under another name; its class, and rows of images."""
    tiny = internvl_chat()
    model = save(tiny, folder)
    if architecture == "NVLM_D":
        reshaped(model, 96, bias=False)
        model.save_pretrained(folder)
    as_internvl_chat(folder)
    tokenizer(*names).save_pretrained(folder)
    changed(folder, architectures=[architecture], **{"max_dynamic_patch": 12, **own})
    return model, lambda images: seen_by(model, normed([t for one in images for t in tiles([one])]))


@pytest.mark.filterwarnings("ignore")
def test_nvlm(tmp_path: Path) -> None:
    names = [*(f"<tile_{i}>" for i in range(1, 5)), "<tile_global_thumbnail>"]
    model, rows = chat(tmp_path, "NVLM_D", "<|vision_pad|>", "<image>", *names)
    check(tmp_path, model, "<|vision_pad|>", "<image>", rows)
    reader = load_processor(tmp_path)
    made = reader(text=["<image>b"], images=[make_image(56, 28)])
    place = "<|vision_pad|>" * 4
    inside = f"<tile_1>{place}<tile_2>{place}<tile_global_thumbnail>{place}"
    assert reader.tokenizer.decode(made["input_ids"][0]) == f"<Image>{inside}</Image>b"


@pytest.mark.filterwarnings("ignore")
def test_h2ovl(tmp_path: Path) -> None:
    names = ("<IMG_CONTEXT>", "<img>", "</img>")
    model, rows = chat(tmp_path, "H2OVLChatModel", *names, use_msac=False)
    check(tmp_path, model, "<IMG_CONTEXT>", "<image>", rows)


@pytest.mark.filterwarnings("ignore")
def test_h2ovl_cuts_the_only_image_twice(tmp_path: Path) -> None:
    """A wide image: 2 by 1, then 3 by 2 would be cut off at four tiles, so 3 by 1 remains."""
    names = ("<IMG_CONTEXT>", "<img>", "</img>")
    chat(tmp_path, "H2OVLChatModel", *names, use_msac=True, max_dynamic_patch=6)
    reader, image = load_processor(tmp_path), make_image(60, 30)
    (pixels,) = (reader(text=["<image>"], images=[image])["pixel_values"],)
    fine = image.resize((84, 56), 3)
    first = [fine.crop((x, y, x + 28, y + 28)) for y in (0, 28) for x in (0, 28, 56)]
    coarse = image.resize((56, 28), 3)
    second = [coarse.crop((x, 0, x + 28, 28)) for x in (0, 28)]
    wanted = normed([*first, *second, image.resize((28, 28), 3)])
    assert np.allclose(pixels, wanted.numpy(), atol=1e-5)
    assert len(reader(text=["<image><image>"], images=[image] * 2)["pixel_values"]) == 6


def whole_images(folder: Path, architecture: str, *names: str, **own: Any) -> tuple[Any, Rows]:
    """A LLaVA under another name; its class, and rows of images."""
    tiny = llava()
    model = save(tiny, folder)
    tokenizer("<image>", *names).save_pretrained(folder)
    changed(folder, architectures=[architecture], **own)
    reader = tiny.processor.image_processor

    def rows(images: list[Any]) -> torch.Tensor:
        return seen_by(model, torch.tensor(np.stack(reader(images)["pixel_values"])))

    return model, rows


WHOLE: dict[str, tuple[tuple[str, ...], dict[str, Any], str]] = {
    "MantisForConditionalGeneration": ((), {}, f"(image 1: <Image>{'<image>' * 16}</Image>)"),
    "TarsierForConditionalGeneration": (
        ("<row>", "<end>"),
        {"image_newline_idx": 258, "image_new_idx": 259},
        ("<image>" * 4 + "<row>") * 4 + "<end>",
    ),
}


@pytest.mark.parametrize("architecture", WHOLE)
@pytest.mark.filterwarnings("ignore")
def test_a_llava_with_another_prompt(architecture: str, tmp_path: Path) -> None:
    names, own, written = WHOLE[architecture]
    model, rows = whole_images(tmp_path, architecture, *names, **own)
    check(tmp_path, model, "<image>", "<image>", rows)
    reader = load_processor(tmp_path)
    made = reader(text=["a<image>"], images=[make_image(40, 30)])
    assert reader.tokenizer.decode(made["input_ids"][0]) == "a" + written


@pytest.mark.filterwarnings("ignore")
def test_tarsier2(tmp_path: Path) -> None:
    tiny = qwen2_vl()
    model = save(tiny, tmp_path)
    renamed(
        tmp_path, (r"^(model\.)?visual\.", "vision_tower."),
        (r"^model\.(language_model\.)?", "language_model.model."),
        (r"^lm_head\.", "language_model.lm_head."),
    )  # fmt: skip
    changed(tmp_path, architectures=["Tarsier2ForConditionalGeneration"], model_type="tarsier2")
    assert_same_answers(tiny, model, tmp_path)


def opencua(folder: Path) -> tuple[Any, Rows]:
    """Qwen2.5-VL's encoder beside Qwen 2, whose positions count tokens."""
    tiny = qwen2_5_vl()
    whole = save(tiny, folder)
    held = text("qwen2")
    torch.manual_seed(1)
    model = tf.Qwen2ForCausalLM(tf.Qwen2Config(**held)).float().eval()
    model.save_pretrained(folder / "text")
    tensors = {
        f"language_model.{k}": v for k, v in load_file(folder / "text/model.safetensors").items()
    }
    seen = whole.model.visual.state_dict()
    save_file(
        tensors | {f"vision_tower.{k}": v for k, v in seen.items()}, folder / "model.safetensors"
    )
    tok = tokenizer("<|media_placeholder|>")
    tok.save_pretrained(folder)
    changed(
        folder, "image_token_id", "video_token_id", text_config=held, model_type="opencua",
        architectures=["OpenCUAForConditionalGeneration"], tie_word_embeddings=False,
        media_placeholder_token_id=tok.convert_tokens_to_ids("<|media_placeholder|>"),
    )  # fmt: skip

    def rows(images: list[Any]) -> torch.Tensor:
        read = tiny.processor.image_processor(images, return_tensors="pt")
        with torch.no_grad():
            found = whole.model.get_image_features(read["pixel_values"], read["image_grid_thw"])
        return torch.cat(list(found.pooler_output))

    return model, rows


@pytest.mark.filterwarnings("ignore")
def test_opencua(tmp_path: Path) -> None:
    model, rows = opencua(tmp_path)
    check(tmp_path, model, "<|media_placeholder|>", "<|media_placeholder|>", rows)
