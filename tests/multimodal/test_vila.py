"""VILA, NVILA-Lite and JetVLM with their published names through the engine, against SigLIP of
transformers and a plain projector."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radixlm.base.errors import CheckpointError
from radixlm.base.record import replace

pytest.importorskip("PIL")
tf = pytest.importorskip("transformers")
from safetensors.torch import load_file  # noqa: E402

from radixlm.arch.hf import describe  # noqa: E402
from radixlm.arch.media.registry import multimodal_spec  # noqa: E402
from radixlm.models.encoders.transformers_encoder import TransformersEncoder  # noqa: E402
from radixlm.multimodal.checkpoint import load_processor  # noqa: E402
from radixlm.multimodal.processor import MediaProcessor, RawMedia  # noqa: E402
from tests.models.test_jet_nemotron import CONFIG as JET_NEMOTRON  # noqa: E402
from tests.multimodal.test_custom_encoders import Rows, check, noisy, written  # noqa: E402
from tests.multimodal.test_families import encoded, make_image  # noqa: E402
from tests.multimodal.tiny import SMALL, TEXT, text, tokenizer  # noqa: E402

LAYERS = 3  # the last one is not read
# patches merged on each side -> weights of the projector's layers, with their shapes
SHAPES = {
    3: {1: (288,), 2: (96, 288), 4: (96,), 5: (64, 96), 7: (64, 64)},
    2: {1: (128,), 2: (64, 128), 4: (64, 64)},
}
NAMES = {3: "mlp_downsample_3x3_fix", 2: "mlp_downsample_2x2_fix"}


def linear(row: torch.Tensor, parts: dict[str, torch.Tensor], layer: int) -> torch.Tensor:
    name = f"mm_projector.layers.{layer}."
    return parts[name + "weight"] @ row + parts[name + "bias"]


def normed(row: torch.Tensor, parts: dict[str, torch.Tensor], layer: int) -> torch.Tensor:
    name = f"mm_projector.layers.{layer}."
    centred = row - row.mean()
    return (
        centred / (centred.square().mean() + 1e-5).sqrt() * parts[name + "weight"]
        + (parts[name + "bias"])
    )


def places(patches: torch.Tensor, parts: dict[str, torch.Tensor], merge: int) -> torch.Tensor:
    """[4 * 4, 32] -> [tokens, 64], with zeros beyond the edges."""
    side = -(-4 // merge)
    grid = torch.zeros(side * merge, side * merge, 32)
    grid[:4, :4] = patches.reshape(4, 4, 32)
    made = []
    for y in range(side):
        for x in range(side):
            square = grid[y * merge : (y + 1) * merge, x * merge : (x + 1) * merge]
            row = normed(square.reshape(-1), parts, 1)
            row = torch.nn.functional.gelu(linear(row, parts, 2))
            if merge == 3:
                row = normed(row, parts, 4)
                row = torch.nn.functional.gelu(linear(row, parts, 5))
            made.append(linear(row, parts, 7 if merge == 3 else 4))
    return torch.stack(made)


def tiles(images: list[Any]) -> list[Any]:
    """For one image the best-fitting grid and the thumbnail; for several their thumbnails."""
    if len(images) > 1:
        return [image.resize((28, 28)) for image in images]
    image = images[0]
    grids = [(x, y) for n in range(1, 13) for x in range(1, 13) for y in range(1, 13) if x * y == n]
    off = [abs(image.width / image.height - x / y) for x, y in grids]
    first, *others = [grid for grid, one in zip(grids, off, strict=True) if one == min(off)]
    for x, y in others:
        first = (x, y) if image.width * image.height > 392 * x * y else first
    columns, rows = first
    large = image.resize((28 * columns, 28 * rows))
    made = [
        large.crop((28 * x, 28 * y, 28 * x + 28, 28 * y + 28))
        for y in range(rows)
        for x in range(columns)
    ]
    return made if len(made) == 1 else [*made, image.resize((28, 28))]


def vila(folder: Path, architecture: str, merge: int) -> tuple[Any, Rows]:
    """A checkpoint with its published names; its text model, and the encoder outputs of images."""
    tok = tokenizer("<image>", "<vila/video>")
    tok.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {**SMALL, "num_hidden_layers": LAYERS}
    encoder = tf.SiglipVisionModel(tf.SiglipVisionConfig(**sizes, vision_use_head=False))
    model = tf.Qwen2ForCausalLM(tf.Qwen2Config(**TEXT, tie_word_embeddings=False))
    for one in (encoder, model):
        noisy(one.float().eval())
    model.save_pretrained(folder / "text")
    saved = load_file(folder / "text" / "model.safetensors")
    tensors = {f"llm.{name}": value for name, value in saved.items()}
    tensors |= {
        "vision_tower.vision_model." + n.removeprefix("vision_model."): value
        for n, value in encoder.state_dict().items()
    }
    parts = {}
    for layer, shape in SHAPES[merge].items():
        parts[f"mm_projector.layers.{layer}.weight"] = torch.randn(shape) * 0.1
        parts[f"mm_projector.layers.{layer}.bias"] = torch.randn(shape[0]) * 0.1
    written(folder, {**tensors, **parts}, {
        "architectures": [architecture], "image_token_id": 257, "video_token_id": 258,
        "hidden_size": 64, "mm_hidden_size": 32, "mm_projector_type": NAMES[merge],
        "mm_vision_select_feature": "cls_patch", "mm_vision_select_layer": -2,
        "text_config": text("qwen2"), "vision_config": {**sizes, "model_type": "siglip"},
    })  # fmt: skip
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"size": {"height": 28, "width": 28}, "image_mean": [0.5] * 3})
    )

    def rows(images: list[Any]) -> torch.Tensor:
        made = []
        for tile in tiles(images):
            pixels = torch.tensor(np.asarray(tile, np.float32) / 127.5 - 1).permute(2, 0, 1)
            with torch.no_grad():
                seen = encoder(pixels[None], output_hidden_states=True).hidden_states[-2]
                made.append(places(seen[0], parts, merge))
        return torch.cat(made)

    return model, rows


@pytest.mark.parametrize(
    ("architecture", "merge"),
    [
        ("VILAForConditionalGeneration", 3),
        pytest.param("NVILALiteForConditionalGeneration", 3, marks=pytest.mark.slow),
        pytest.param("VILAForConditionalGeneration", 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_vila(architecture: str, merge: int, tmp_path: Path) -> None:
    model, rows = vila(tmp_path, architecture, merge)
    check(tmp_path, model, "<image>", "<image>", rows)


@pytest.mark.filterwarnings("ignore")
def test_jet_vlm_has_vilas_encoder_and_jet_nemotron(tmp_path: Path) -> None:
    _, rows = vila(tmp_path, "JetVLMForConditionalGeneration", 2)
    raw = json.loads((tmp_path / "config.json").read_text())
    for key in ("mm_projector_type", "mm_vision_select_feature", "mm_vision_select_layer"):
        del raw[key]  # its class reads none of them
    raw |= {"model_type": "jet_vlm", "text_config": JET_NEMOTRON}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    text_folder = tmp_path / "text"
    text_folder.mkdir(exist_ok=True)
    (text_folder / "config.json").write_text(json.dumps(JET_NEMOTRON))
    text_names = describe(text_folder).names
    assert replace(describe(tmp_path), names=text_names) == describe(text_folder)
    image = make_image(84, 28)
    spec = multimodal_spec("JetVLMForConditionalGeneration", raw)
    assert spec is not None
    sent = RawMedia("image", base64.b64decode(encoded(image)), "image")
    prompt = MediaProcessor(tmp_path, spec, has_sections=False).read("<image>", [sent], False)
    made = TransformersEncoder(tmp_path, torch.device("cpu"), torch.float32).encode(prompt.media[0])
    torch.testing.assert_close(made[0], rows([image]), atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_tiles_end_with_a_newline_token(tmp_path: Path) -> None:
    """Twice for a single image: once for the tile, once in the text."""
    vila(tmp_path, "VILAForConditionalGeneration", 3)
    reader = load_processor(tmp_path)
    ends = reader.tokenizer("\n")["input_ids"]
    tile, rest = [257] * 4 + ends, reader.tokenizer("b")["input_ids"]
    made = reader(text=["<image>b"], images=[make_image(84, 28)])
    assert made["input_ids"][0].tolist() == (tile + ends) * 4 + rest
    made = reader(text=["<image><image>b"], images=[make_image(84, 28), make_image(20, 20)])
    assert made["input_ids"][0].tolist() == tile * 2 + rest
    assert sorted(made) == ["input_ids", "pixel_values"]


@pytest.mark.parametrize(
    "change", [{"mm_projector_type": "mlp_downsample"}, {"mm_vision_select_layer": 0}]
)
@pytest.mark.filterwarnings("ignore")
def test_other_vision_encoders_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    vila(tmp_path, "VILAForConditionalGeneration", 3)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match="cannot be understood"):
        TransformersEncoder(tmp_path, torch.device("cpu"), torch.float32)
