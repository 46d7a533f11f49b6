"""Ovis 1.6 and 2 with their published names through the engine, against the parts of transformers
and plain torch code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("PIL")
tf = pytest.importorskip("transformers")
from transformers.models.ovis2 import modeling_ovis2 as hf  # noqa: E402

from radixlm.base.errors import CheckpointError  # noqa: E402
from radixlm.models.encoders.transformers_encoder import TransformersEncoder  # noqa: E402
from radixlm.multimodal.checkpoint import load_processor  # noqa: E402
from tests.fakes.tiny_checkpoint import randomise  # noqa: E402
from tests.multimodal.test_custom_encoders import Rows, check, noisy, written  # noqa: E402
from tests.multimodal.test_families import make_image  # noqa: E402
from tests.multimodal.test_published_as_code import saved  # noqa: E402
from tests.multimodal.tiny import SMALL, TEXT, text, tokenizer  # noqa: E402

SIDE, WORDS, MEAN, STD = 28, 29, [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]
_BLOCKS = (
    ("rms_norm1", "norm_1"), ("rms_norm2", "norm_2"), ("attention.out_proj", "attn.proj"),
    ("ffn.gate_proj", "mlp.fc1"), ("ffn.down_proj", "mlp.fc2"), ("ffn.up_proj", "mlp.fc3"),
)  # fmt: skip


def aimv2(at: str) -> tuple[Any, dict[str, Tensor]]:
    """AIMv2 of transformers, and its tensors with their published names."""
    config = tf.Ovis2VisionConfig(**SMALL)
    config._attn_implementation = "eager"
    tower = hf.Ovis2VisionTransformer(config).float().eval()
    noisy(tower)
    state, named = tower.state_dict(), {}
    for name, value in state.items():
        if ".q_proj." in name:
            parts = [state[name.replace("q_proj", f"{one}_proj")] for one in "qkv"]
            layer = name.split(".")[2]
            named[f"{at}trunk.blocks.{layer}.attn.qkv.weight"] = torch.cat(parts)
        elif name.startswith("encoder.") and not any(f".{one}_proj." in name for one in "kv"):
            name = name.replace("encoder.layers", "trunk.blocks")
            for ours, theirs in _BLOCKS:
                name = name.replace(ours, theirs)
            named[at + name] = value
    kernel = "embeddings.patch_embedding."
    for kind in ("weight", "bias"):
        named[f"{at}preprocessor.patchifier.proj.{kind}"] = state[kernel + kind]
    named[at + "preprocessor.patchifier.norm.weight"] = state["embeddings.rms_norm.weight"]
    named[at + "preprocessor.pos_embed"] = state["embeddings.position_embedding.weight"][None]
    named[at + "trunk.post_trunk_norm.weight"] = state["rms_norm.weight"]
    return tower, named


def siglip(at: str) -> tuple[Any, dict[str, Tensor]]:
    tower = tf.SiglipVisionModel(tf.SiglipVisionConfig(**SMALL)).float().eval()
    noisy(tower)
    named = {name.removeprefix("vision_model."): one for name, one in tower.state_dict().items()}
    return tower, {f"{at}vision_model.{name}": one for name, one in named.items()}


def pasted(image: Any) -> Tensor:
    """[3, SIDE, SIDE]."""
    ratio = SIDE / max(image.size)
    width, height = (SIDE if n == max(image.size) else int(n * ratio) for n in image.size)
    pixels = torch.tensor(np.asarray(image.resize((width, height), 3), np.float32)) / 255
    pixels = ((pixels - torch.tensor(MEAN)) / torch.tensor(STD)).permute(2, 0, 1)
    left, top = (SIDE - width) // 2, (SIDE - height) // 2
    return F.pad(pixels, (left, SIDE - width - left, top, SIDE - height - top))


def words_of(w: dict[str, Tensor], seen: Tensor, stride: int, is_hard: bool) -> Tensor:
    """A tile's rows [16, C] -> [squares, 64]."""
    grid, made = seen.reshape(4, 4, -1), []
    for y in range(0, 4, stride):
        for x in range(0, 4, stride):
            square = [
                grid[i, j] if i < 4 and j < 4 else torch.zeros_like(grid[0, 0])
                for i in range(y, y + stride)
                for j in range(x, x + stride)
            ]
            words = torch.cat(square) @ w["visual_tokenizer.head.0.weight"].T
            weight, bias = (w[f"visual_tokenizer.head.1.{one}"] for one in ("weight", "bias"))
            words = F.layer_norm(words, words.shape, weight, bias)
            table = w["vte.weight"]
            made.append(table[words.argmax()] if is_hard else words.softmax(0) @ table[: WORDS - 5])
    return torch.stack(made)


def chosen(size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of tiles as the authors choose them."""
    width, height = size
    grids = [(r, c) for r in range(1, 10) for c in range(1, 10) if r * c <= 9]

    def share(grid: tuple[int, int]) -> float:
        total = 0.0
        for y in range(grid[0]):
            for x in range(grid[1]):
                w = width - x * (width // grid[1]) if x == grid[1] - 1 else width // grid[1]
                h = height - y * (height // grid[0]) if y == grid[0] - 1 else height // grid[0]
                long, short = max(w, h), min(w, h)
                total += short * long if long <= SIDE else short / long * SIDE * SIDE
        return total / (width * height)

    good = [grid for grid in grids if share(grid) > 0.9]
    if good:
        return sorted(good, key=lambda grid: (grid[0] * grid[1], -share(grid)))[0]
    return sorted(grids, key=lambda grid: (-share(grid), grid[0] * grid[1]))[0]


def ovis(folder: Path, kind: str, stride: int, tokenize: str) -> tuple[Any, Rows]:
    """A checkpoint; its text model, and the encoder outputs of images."""
    tokenizer("<|image_pad|>").save_pretrained(folder)
    torch.manual_seed(0)
    model = tf.Qwen2ForCausalLM(tf.Qwen2Config(**TEXT)).float().eval()
    randomise(model)
    tower, named = (aimv2 if kind == "aimv2" else siglip)("visual_tokenizer.backbone.")
    count = WORDS - 5
    named |= {
        "visual_tokenizer.head.0.weight": torch.randn(count, 32 * stride**2) * 0.3,
        "visual_tokenizer.head.1.weight": torch.randn(count) + 1,
        "visual_tokenizer.head.1.bias": torch.randn(count),
        "vte.weight": torch.randn(WORDS, 64) * 0.3,
    }
    written(folder, saved(model, folder / "text", "llm.") | named, {
        "architectures": ["Ovis"], "model_type": "ovis", "llm_config": text("qwen2"),
        "hidden_size": 64, "visual_tokenizer_config": {
            "backbone_config": {**SMALL, "model_type": kind}, "hidden_stride": stride,
            "tokenize_function": tokenize, "vocab_size": WORDS, "drop_cls_token": False,
        },
    })  # fmt: skip
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": MEAN, "image_std": STD, "image_processor_type": "Siglip"})
    )

    def tile(image: Any) -> Tensor:
        with torch.no_grad():
            if kind == "aimv2":
                seen = tower.encoder(inputs_embeds=tower.embeddings(pasted(image)[None]))[0]
            else:
                seen = tower(pasted(image)[None], output_hidden_states=True).hidden_states[-1]
        return words_of(named, seen[0], stride, tokenize != "softmax")

    def rows(images: list[Any]) -> Tensor:
        start, prefix, column, row, end = named["vte.weight"][-5:].split(1)
        made = []
        for image in images:
            made += [start, tile(image), prefix]
            high, wide = chosen(image.size)
            for y in range(high if wide * high > 1 else 0):
                for x in range(wide):
                    right = image.width if x == wide - 1 else (x + 1) * (image.width // wide)
                    low = image.height if y == high - 1 else (y + 1) * (image.height // high)
                    box = (x * (image.width // wide), y * (image.height // high), right, low)
                    made += [tile(image.crop(box)), column if x < wide - 1 else row]
            made = [*(made[:-1] if wide * high > 1 else made), end]
        return torch.cat(made)

    return model, rows


CASES = [("aimv2", 2, "softmax"), ("siglip_vision_model", 3, "softmax"), ("aimv2", 1, "st_argmax")]


@pytest.mark.parametrize(("kind", "stride", "tokenize"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_ovis(kind: str, stride: int, tokenize: str, tmp_path: Path) -> None:
    model, rows = ovis(tmp_path, kind, stride, tokenize)
    check(tmp_path, model, "<|image_pad|>", "<image>", rows)


@pytest.mark.parametrize("size", [(20, 20), (28, 100), (90, 30), (84, 84), (300, 20)])
@pytest.mark.filterwarnings("ignore")
def test_tiles_show_most_of_the_image(size: tuple[int, int], tmp_path: Path) -> None:
    ovis(tmp_path, *CASES[0])
    made = load_processor(tmp_path)(text=["<image>"], images=[make_image(*size)])
    best = chosen(size)
    assert made["tile_grid"].tolist() == [[*best]]
    tiles = 1 + (best[0] * best[1] if best != (1, 1) else 0)
    assert made["pixel_values"].shape == (tiles, 3, SIDE, SIDE)
    assert made["input_ids"].shape == (1, tiles * 4 + 3 + max(0, tiles - 2))


@pytest.mark.filterwarnings("ignore")
def test_other_encoders_are_refused(tmp_path: Path) -> None:
    ovis(tmp_path, *CASES[0])
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    raw["visual_tokenizer_config"]["backbone_config"]["model_type"] = "clip_vision_model"
    path.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="clip_vision_model"):
        TransformersEncoder(tmp_path, torch.device("cpu"), torch.float32)
