"""Checkpoints that transformers has no class for, with their published names: Nemotron Nano VL,
Step3-VL, POINTS 1.5, Sarashina2-Vision and Phi-3-vision through the engine, against their parts and
plain torch code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")
tf = pytest.importorskip("transformers")
from PIL import Image  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from radixlm.arch.media.layouts import llava, nemotron  # noqa: E402
from radixlm.multimodal.checkpoint import load_processor  # noqa: E402
from tests.fakes.tiny_checkpoint import randomise  # noqa: E402
from tests.multimodal.test_custom_encoders import Rows, check, noisy, written  # noqa: E402
from tests.multimodal.test_families import make_image  # noqa: E402
from tests.multimodal.test_vila import tiles  # noqa: E402
from tests.multimodal.tiny import SMALL, TEXT, qwen2_vl, text, tokenizer  # noqa: E402
from tests.multimodal.tiny_audio import nemotron_omni  # noqa: E402
from tests.multimodal.tiny_newer import step3p7  # noqa: E402

MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]


def saved(model: Any, folder: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a model as transformers writes them: by their published names."""
    model.save_pretrained(folder)
    return {prefix + k: v for k, v in load_file(folder / "model.safetensors").items()}


def beside(tensors: dict[str, torch.Tensor], *prefixes: str) -> dict[str, torch.Tensor]:
    return {name: value for name, value in tensors.items() if name.startswith(prefixes)}


def nemotron_nano_vl(folder: Path) -> tuple[Any, Rows]:
    """A checkpoint; its text model, and the encoder outputs of images."""
    tokenizer("<image>", "<img>", "</img>").save_pretrained(folder)
    torch.manual_seed(0)
    config = nemotron_omni().config.to_dict()
    eyes = {**config["vision_config"], "max_img_size": 56, "num_registers": 5, "patch_size": 7}
    config |= {"audio_config": None, "vision_config": eyes}
    whole = tf.NemotronH_Omni_Reasoning_V3(tf.NemotronH_Omni_Reasoning_V3_Config(**config))
    whole = whole.float().eval()
    # its generate takes embeddings; test_audio_models has Nemotron's own text model
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**TEXT)).float().eval()
    for one in (whole.vision_model, whole.multi_modal_projector, model):
        noisy(one)
    tensors = beside(saved(whole, folder / "whole"), "vision_model.", "mlp1.")
    tensors = {k: v for k, v in tensors.items() if "video_embedder" not in k}
    tensors |= saved(model, folder / "text", "language_model.")
    written(folder, tensors, {
        "architectures": ["NemotronH_Nano_VL_V2"], "model_type": "NemotronH_Nano_VL_V2",
        "llm_config": model.config.to_dict(), "downsample_ratio": 0.5, "patch_size": 7,
        "projector_hidden_size": 48, "vit_hidden_size": 32, "force_image_size": 28,
        "norm_mean": MEAN, "norm_std": STD, "img_context_token": "<image>",
        "vision_config": {
            "args": {"model": "vit_tiny", "register_multiple": 8}, "patch_size": 7,
            "max_resolution": 56, "auto_map": {"AutoModel": "other.py"},
        },
    })  # fmt: skip

    def rows(images: list[Any]) -> torch.Tensor:
        cut = [np.asarray(tile, np.float32) for one in images for tile in tiles([one])]
        pixels = (torch.tensor(np.stack(cut)) / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
        with torch.no_grad():
            seen = whole.vision_model(pixels.permute(0, 3, 1, 2)).features
            return whole.project_vision_features(seen, 4, 4).flatten(0, 1)

    return model, rows


@pytest.mark.filterwarnings("ignore")  # warnings of Hugging Face about tiny configs
def test_nemotron_nano_vl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(nemotron._SIZES, "vit_tiny", (32, 1, 2))
    model, rows = nemotron_nano_vl(tmp_path)
    check(tmp_path, model, "<image>", "<image>", rows)


@pytest.mark.filterwarnings("ignore")
def test_tiles_of_nemotron_nano_vl_stand_between_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(nemotron._SIZES, "vit_tiny", (32, 1, 2))
    nemotron_nano_vl(tmp_path)
    reader = load_processor(tmp_path)
    made = reader(text=["<image>b<image>"], images=[make_image(84, 28), make_image(20, 20)])
    written = reader.tokenizer.decode(made["input_ids"][0])
    assert written == f"<img>{'<image>' * 16}</img>b<img>{'<image>' * 4}</img>"
    assert made["image_grid_hw"].tolist() == [[4, 4]] * 5
    assert made["pixel_values"].shape == (5 * 16, 3 * 7 * 7)


def step_vl(folder: Path) -> tuple[Any, Rows]:
    """A checkpoint; its text model, and the encoder outputs of images."""
    tiny = step3p7()
    tiny.processor.tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    whole = tf.Step3p7ForConditionalGeneration(tiny.config).float().eval()
    model = tf.Qwen3ForCausalLM(tf.Qwen3Config(**TEXT, head_dim=16)).float().eval()
    randomise(whole)
    randomise(model)
    tensors = beside(saved(whole, folder / "whole"), "vision_model.", "vit_large_projector.")
    assert "vision_model.conv1.weight" in tensors
    held = {**text("step_text"), "head_dim": 16, "architectures": ["Qwen3ForCausalLM"]}
    written(folder, tensors | saved(model, folder / "text"), {
        "architectures": ["StepVLForConditionalGeneration"], "model_type": "step_robotics",
        "image_token_id": 257, "image_token_len": 4, "patch_token_len": 1, "text_config": held,
        "projector_bias": False, "understand_projector_stride": 2, "vision_config": {
            "width": 32, "layers": 2, "heads": 2, "image_size": 56, "patch_size": 7,
            "mlp_ratio": 1.5, "ls_init_value": 0.1, "max_position_embeddings": 64,
            "model_type": "perception_encoder",
        },
    })  # fmt: skip
    described = {"processor_class": "Step3VLProcessor", "auto_map": {"AutoProcessor": "own.P"}}
    (folder / "processor_config.json").write_text(json.dumps(described))

    def rows(images: list[Any]) -> torch.Tensor:
        read = tiny.processor(text=["<im_patch>" * len(images)], images=images, return_tensors="pt")
        keys = ("pixel_values", "pixel_values_local", "num_local_patches")
        given = {key: read[key] for key in keys if key in read}
        with torch.no_grad():
            found = whole.model.get_image_features(**given).pooler_output
        return torch.cat([one.reshape(-1, one.shape[-1]) for one in found])

    return model, rows


@pytest.mark.filterwarnings("ignore")
def test_step_vl(tmp_path: Path) -> None:
    model, rows = step_vl(tmp_path)
    check(tmp_path, model, "<im_patch>", "<im_patch>", rows)


def points(folder: Path) -> tuple[Any, Rows]:
    """A checkpoint of POINTS 1.5; its text model, and the encoder outputs of images."""
    tiny = qwen2_vl()
    tiny.processor.tokenizer.save_pretrained(folder)
    tiny.processor.image_processor.save_pretrained(folder)
    torch.manual_seed(0)
    whole = tf.Qwen2VLForConditionalGeneration(tiny.config).float().eval()
    model = tf.Qwen2ForCausalLM(tf.Qwen2Config(**TEXT)).float().eval()
    noisy(whole.model.visual)
    randomise(model)
    tensors = saved(model, folder / "text", "llm.")
    for name, value in whole.model.visual.state_dict().items():
        own = name.startswith("merger.")
        tensors[f"vision_projector.{name[7:]}" if own else f"vision_encoder.{name}"] = value
    held = {**text("points"), "architectures": ["Qwen2ForCausalLM"]}
    written(folder, tensors, {
        "architectures": ["POINTSV15ChatModel"], "model_type": "pointsv1.5_chat",
        "llm_config": held, "tie_word_embeddings": False,
        "vision_config": {**tiny.config.vision_config.to_dict(), "hidden_size": 7},
    })  # fmt: skip

    def rows(images: list[Any]) -> torch.Tensor:
        read = tiny.processor.image_processor(images=images, return_tensors="pt")
        with torch.no_grad():
            found = whole.model.get_image_features(**read)
        return torch.cat(list(getattr(found, "pooler_output", found)))

    return model, rows


@pytest.mark.filterwarnings("ignore")
def test_points(tmp_path: Path) -> None:
    """Its positions are those of a text."""
    model, rows = points(tmp_path)
    check(tmp_path, model, "<|image_pad|>", "<|image_pad|>", rows)


def sarashina(folder: Path) -> tuple[Any, Rows]:
    """A checkpoint of Sarashina2-Vision; its text model, and the encoder outputs of images."""
    tiny = qwen2_vl()
    tokenizer("<|file|>", "<|prefix|>", "<|suffix|>").save_pretrained(folder)
    tiny.processor.image_processor.save_pretrained(folder)
    torch.manual_seed(0)
    whole = tf.Qwen2VLForConditionalGeneration(tiny.config).float().eval()
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**TEXT)).float().eval()
    noisy(whole.model.visual)
    randomise(model)
    tensors = saved(model, folder / "text", "llm.")
    tensors |= {f"visual.{name}": one for name, one in whole.model.visual.state_dict().items()}
    weight, bias = 1 + torch.randn(64) / 4, torch.randn(64)
    written(folder, tensors | {"norm.weight": weight, "norm.bias": bias}, {
        "architectures": ["Sarashina2VisionForCausalLM"], "model_type": "sarashina2_vision",
        "text_config": text("llama"), "image_token_index": 257,
        "vision_config": tiny.config.vision_config.to_dict(),
    })  # fmt: skip

    def rows(images: list[Any]) -> torch.Tensor:
        read = tiny.processor.image_processor(images=images, return_tensors="pt")
        with torch.no_grad():
            found = whole.model.get_image_features(**read)
        encoded = torch.cat(list(getattr(found, "pooler_output", found)))
        return torch.nn.functional.layer_norm(encoded, (64,), weight, bias)

    return model, rows


@pytest.mark.filterwarnings("ignore")
def test_sarashina_vision(tmp_path: Path) -> None:
    """Its positions are those of a text; the encoder's output is normalized."""
    model, rows = sarashina(tmp_path)
    check(tmp_path, model, "<|file|>", "<|prefix|><|file|><|suffix|>", rows)


# ---- Phi-3-vision ------------------------------------------------------------------------------

SIDE, PATCH, WIDTH = 28, 7, 32
_VISION = "model.vision_embed_tokens."


def phi3_rows(tiles: torch.Tensor, rows: int, columns: int, encoder: Any, parts: Any) -> Any:
    """The encoder's rows of one image, place by place. ``tiles`` [rows, columns, 3, S, S]."""
    large = torch.cat([torch.cat(list(row), -1) for row in tiles], -2)
    whole = torch.nn.functional.interpolate(large[None], (SIDE, SIDE), mode="bicubic")[0]

    def lines(grid: torch.Tensor) -> list[torch.Tensor]:
        """Of tiles [rows, columns, 3, S, S]."""
        high, wide = grid.shape[:2]
        with torch.no_grad():
            seen = encoder(grid.flatten(0, 1), output_hidden_states=True).hidden_states[-2][:, 1:]
        made = []
        for y in range(2 * high):
            for x in range(2 * wide):
                tile = seen[y // 2 * wide + x // 2].reshape(4, 4, WIDTH)
                square = tile[y % 2 * 2 : y % 2 * 2 + 2, x % 2 * 2 : x % 2 * 2 + 2]
                made.append(square.reshape(-1))
            made.append(parts["sub_GN"].reshape(-1))
        return made

    rows_ = torch.stack([*lines(tiles), parts["glb_GN"].reshape(-1), *lines(whole[None, None])])
    first, last = ((parts[f"img_projection.{i}.weight"], parts[f"img_projection.{i}.bias"])
                   for i in (0, 2))  # fmt: skip
    return torch.nn.functional.gelu(rows_ @ first[0].T + first[1]) @ last[0].T + last[1]


def phi3_tiles(image: Any, most: int) -> torch.Tensor:
    """[rows, columns, 3, S, S] of an image as its authors cut it."""
    values = torch.tensor(np.asarray(phi3_large(image, most), np.float32)).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(one)[:, None, None] for one in (MEAN, STD))
    rows, columns = values.shape[1] // SIDE, values.shape[2] // SIDE
    return ((values - mean) / std).reshape(3, rows, SIDE, columns, SIDE).permute(1, 3, 0, 2, 4)


def phi3_large(image: Any, most: int) -> Any:
    """The image in whole tiles."""
    turned = image.width < image.height
    image = image.transpose(Image.Transpose.TRANSPOSE) if turned else image
    ratio, scale = image.width / image.height, 1
    while scale * np.ceil(scale / ratio) <= most:
        scale += 1
    width = (scale - 1) * SIDE
    image = image.resize((width, int(width / ratio)), Image.Resampling.BILINEAR)
    height = int(np.ceil(image.height / SIDE) * SIDE)
    padded = Image.new("RGB", (width, height), (255, 255, 255))
    padded.paste(image, (0, int((height - image.height) / 2)))
    return padded.transpose(Image.Transpose.TRANSPOSE) if turned else padded


def phi3_vision(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Rows]:
    """A checkpoint; its text model, and the encoder outputs of images."""
    sizes = {**SMALL, "num_hidden_layers": 3, "hidden_act": "quick_gelu", "projection_dim": 32}
    monkeypatch.setitem(llava.ENCODERS, "clip-tiny", sizes)
    tokenizer("<|image|>").save_pretrained(folder)
    torch.manual_seed(0)
    encoder = tf.CLIPVisionModel(tf.CLIPVisionConfig(**sizes)).float().eval()
    held = {**text("phi3"), "max_position_embeddings": 4096, "tie_word_embeddings": False}
    held |= {"original_max_position_embeddings": 2048, "pad_token_id": 0}
    model = tf.Phi3ForCausalLM(tf.Phi3Config(**held)).float().eval()
    noisy(encoder)
    randomise(model)
    wide, dim = 4 * WIDTH, TEXT["hidden_size"]
    shapes = {
        "sub_GN": (1, 1, 1, wide), "glb_GN": (1, 1, wide),
        "img_projection.0.weight": (dim, wide), "img_projection.0.bias": (dim,),
        "img_projection.2.weight": (dim, dim), "img_projection.2.bias": (dim,),
    }  # fmt: skip
    parts = {name: torch.randn(shape) * 0.1 for name, shape in shapes.items()}
    tensors = saved(encoder, folder / "encoder", _VISION + "img_processor.vision_model.")
    tensors |= saved(model, folder / "text") | {_VISION + k: v for k, v in parts.items()}
    tensors[_VISION + "wte.weight"] = tensors["model.embed_tokens.weight"]
    written(folder, tensors, {
        **held, "architectures": ["Phi3VForCausalLM"], "model_type": "phi3_v",
        "embd_layer": {
            "embedding_cls": "image", "hd_transform_order": "sub_glb", "use_hd_transform": True,
            "projection_cls": "mlp", "with_learnable_separator": True,
        },
        "img_processor": {
            "image_dim_out": WIDTH, "model_name": "openai/clip-tiny", "num_img_tokens": 4,
            "name": "clip_vision_model",
        },
    })  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps({
        "image_mean": MEAN, "image_std": STD, "num_crops": 4, "processor_class": "Phi3VProcessor",
    }))  # fmt: skip

    def rows(images: list[Any]) -> torch.Tensor:
        cut = [phi3_tiles(one, 4) for one in images]
        return torch.cat([phi3_rows(one, *one.shape[:2], encoder, parts) for one in cut])

    return model, rows


@pytest.mark.filterwarnings("ignore")
def test_phi3_vision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = phi3_vision(tmp_path, monkeypatch)
    check(tmp_path, model, "<|image|>", "<|image|>", rows)


@pytest.mark.filterwarnings("ignore")
def test_images_of_phi3_vision_may_be_numbered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phi3_vision(tmp_path, monkeypatch)
    reader = load_processor(tmp_path)
    images = [make_image(84, 28), make_image(20, 50)]
    made = reader(text=["<|image_1|>\nb<|image_2|>c"], images=images)
    first, second = "<|image|>" * (2 * 7 + 1 + 2 * 3), "<|image|>" * (4 * 3 + 1 + 2 * 3)
    assert reader.tokenizer.decode(made["input_ids"][0]) == f"{first}\nb{second}c"
    assert made["image_tiles"].tolist() == [[1, 3], [2, 1]]
    with pytest.raises(ValueError, match="numbered 2, 1"):
        reader(text=["<|image_2|><|image_1|>"], images=images)
    with pytest.raises(ValueError, match="1 placeholders for 2"):
        reader(text=["<|image|>"], images=images)
