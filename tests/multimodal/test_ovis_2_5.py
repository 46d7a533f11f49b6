"""Ovis 2.5 and 2.6 with their published names through the engine, against plain torch code."""

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

from radixlm.base.errors import CheckpointError  # noqa: E402
from radixlm.models.encoders.transformers_encoder import TransformersEncoder  # noqa: E402
from radixlm.multimodal.checkpoint import load_processor  # noqa: E402
from tests.fakes.tiny_checkpoint import randomise  # noqa: E402
from tests.multimodal.test_custom_encoders import Rows, check, written  # noqa: E402
from tests.multimodal.test_families import make_image  # noqa: E402
from tests.multimodal.test_published_as_code import saved  # noqa: E402
from tests.multimodal.tiny import TEXT, text, tokenizer  # noqa: E402

DIM, HEADS, PATCH, SIDE, WORDS, LEAST, MOST = 32, 2, 7, 4, 24, 28 * 28, 84 * 84
WIDTH = DIM // HEADS
VIT = {
    "model_type": "siglip2_navit", "hidden_size": DIM, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_channels": 3, "patch_size": PATCH,
    "image_size": SIDE * PATCH, "hidden_stride": 2, "num_patches": -1, "temporal_patch_size": 1,
    "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh", "preserve_original_pe": True,
    "use_rope": True, "fullatt_block_indexes": None, "window_size": 112,
}  # fmt: skip


def encoder_tensors() -> dict[str, Tensor]:
    at = "visual_tokenizer.vit.vision_model."
    shapes: dict[str, tuple[int, ...]] = {
        at + "embeddings.patch_embedding.weight": (DIM, 3, PATCH, PATCH),
        at + "embeddings.patch_embedding.bias": (DIM,),
        at + "embeddings.position_embedding.weight": (SIDE**2, DIM),
        "visual_tokenizer.head.0.weight": (WORDS - 4, 4 * DIM),
        "visual_tokenizer.head.1.weight": (WORDS - 4,),
        "visual_tokenizer.head.1.bias": (WORDS - 4,),
        "vte.weight": (WORDS, 64),
    }
    for kind in ("weight", "bias"):
        shapes[f"{at}post_layernorm.{kind}"] = (DIM,)
        for i in range(2):
            own = f"{at}encoder.layers.{i}."
            matrices = {f"self_attn.{one}_proj": (DIM, DIM) for one in ("q", "k", "v", "out")}
            matrices |= {"mlp.fc1": (48, DIM), "mlp.fc2": (DIM, 48)}
            for name, shape in matrices.items():
                shapes[f"{own}{name}.{kind}"] = shape if kind == "weight" else shape[:1]
            shapes |= {f"{own}layer_norm{n}.{kind}": (DIM,) for n in (1, 2)}
    made = {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    for name in made:
        if "norm" in name and name.endswith("weight"):
            made[name] += 1
    return made


class Reference:
    """The patches row by row; only the head sees squares of them."""

    def __init__(self, w: dict[str, Tensor]) -> None:
        self.w = {k.removeprefix("visual_tokenizer.vit.vision_model."): v for k, v in w.items()}

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def normed(self, name: str, x: Tensor, eps: float = 1e-6) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.w[f"{name}.bias"], eps)

    def turned(self, x: Tensor, y: int, column: int) -> Tensor:
        """One patch's channels of a head: pairs of channels half a head apart; the first half of
        the pairs turns with the row, the second with the column."""
        pairs = WIDTH // 4
        out = x.clone()
        for i in range(2 * pairs):
            angle = (y if i < pairs else column) * 10000.0 ** -((i % pairs) / pairs)
            a, b = x[i], x[i + 2 * pairs]
            c, s = np.cos(angle), np.sin(angle)
            out[i], out[i + 2 * pairs] = a * c - b * s, b * c + a * s
        return out

    def attend(self, at: str, x: Tensor, columns: int) -> Tensor:
        q, k, v = (self.linear(f"{at}{one}_proj", x) for one in "qkv")
        read = []
        for head in range(HEADS):
            own = slice(head * WIDTH, (head + 1) * WIDTH)
            turned = [
                torch.stack([self.turned(r, n // columns, n % columns) for n, r in enumerate(t)])
                for t in (q[:, own], k[:, own])
            ]
            read.append((turned[0] @ turned[1].T / WIDTH**0.5).softmax(-1) @ v[:, own])
        return self.linear(at + "out_proj", torch.cat(read, -1))

    def rows(self, pixels: Tensor) -> Tensor:
        """[3, height, width] -> [squares + 2, 64]."""
        kernel = self.w["embeddings.patch_embedding.weight"]
        grid = F.conv2d(pixels[None], kernel, self.w["embeddings.patch_embedding.bias"], PATCH)
        high, wide = grid.shape[2:]
        table = self.w["embeddings.position_embedding.weight"].T.reshape(1, DIM, SIDE, SIDE)
        grid = grid + F.interpolate(table, (high, wide), mode="bicubic", align_corners=False)
        x = grid[0].flatten(1).T
        for i in range(2):
            at = f"encoder.layers.{i}."
            x = x + self.attend(at + "self_attn.", self.normed(at + "layer_norm1", x), wide)
            h = self.linear(at + "mlp.fc1", self.normed(at + "layer_norm2", x))
            x = x + self.linear(at + "mlp.fc2", F.gelu(h, approximate="tanh"))
        x, table = x.reshape(high, wide, DIM), self.w["vte.weight"]
        made = [table[WORDS - 4]]
        for y in range(0, high, 2):
            for c in range(0, wide, 2):
                square = torch.cat([x[y, c], x[y, c + 1], x[y + 1, c], x[y + 1, c + 1]])
                words = self.linear("visual_tokenizer.head.0", square)
                shares = self.normed("visual_tokenizer.head.1", words, 1e-5).softmax(-1)
                made.append(sum(s * row for s, row in zip(shares, table[: WORDS - 4], strict=True)))
        return torch.stack([*made, table[WORDS - 3]])


def fitted(image: Any) -> Any:
    """In whole squares of 14 pixels, with between 28 and 84 pixels squared."""
    height, width = image.height, image.width
    high, wide = round(height / 14) * 14, round(width / 14) * 14
    if high * wide > MOST:
        shrink = (height * width / MOST) ** 0.5
        high, wide = int(height / shrink // 14) * 14, int(width / shrink // 14) * 14
    elif high * wide < LEAST:
        grow = (LEAST / (height * width)) ** 0.5
        high, wide = -int(-height * grow // 14) * 14, -int(-width * grow // 14) * 14
    return image.resize((wide, high), 3)


def ovis(folder: Path, architecture: str = "Ovis2_5") -> tuple[Any, Rows]:
    """A checkpoint; its text model, and the encoder outputs of images."""
    tokenizer("<|image_pad|>").save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {**TEXT, "head_dim": 16}
    held = text("qwen3", head_dim=16)
    if "Moe" in architecture:
        more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        held = text("qwen3_moe", head_dim=16, **more)
        model = tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**sizes, **more)).float().eval()
    else:
        model = tf.Qwen3ForCausalLM(tf.Qwen3Config(**sizes)).float().eval()
    randomise(model)
    seen = encoder_tensors()
    written(folder, saved(model, folder / "text", "llm.") | seen, {
        "architectures": [architecture], "model_type": "ovis2_5", "llm_config": held,
        "vit_config": VIT, "visual_vocab_size": WORDS, "hidden_size": 64, "vocab_size": 400,
    })  # fmt: skip
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"min_pixels": LEAST, "max_pixels": MOST, "image_processor_type": "Siglip"})
    )
    reference = Reference(seen)

    def rows(images: list[Any]) -> Tensor:
        pixels = [torch.tensor(np.asarray(fitted(one), np.float32) / 127.5 - 1) for one in images]
        return torch.cat([reference.rows(one.permute(2, 0, 1)) for one in pixels])

    return model, rows


@pytest.mark.parametrize("architecture", ["Ovis2_5", "Ovis2_6_MoeForCausalLM"])
@pytest.mark.filterwarnings("ignore")
def test_ovis(architecture: str, tmp_path: Path) -> None:
    model, rows = ovis(tmp_path, architecture)
    check(tmp_path, model, "<|image_pad|>", "<image>", rows)


@pytest.mark.parametrize(
    ("size", "grid"),
    [((40, 30), [4, 6]), ((200, 100), [8, 16]), ((9, 9), [4, 4]), ((5, 100), [40, 2])],
)
@pytest.mark.filterwarnings("ignore")
def test_images_keep_their_shape(size: tuple[int, int], grid: list[int], tmp_path: Path) -> None:
    ovis(tmp_path)
    made = load_processor(tmp_path)(text=["<image>"], images=[make_image(*size)])
    assert made["image_grid_thw"].tolist() == [[1, *grid]]
    assert made["input_ids"].shape == (1, grid[0] * grid[1] // 4 + 2)
    with pytest.raises(ValueError, match="14 x 840 pixels is too narrow"):
        load_processor(tmp_path)(text=["<image>"], images=[make_image(5, 300)])


@pytest.mark.parametrize(("key", "value"), [("num_patches", 256), ("fullatt_block_indexes", "1|3")])
@pytest.mark.filterwarnings("ignore")
def test_other_encoders_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    ovis(tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "vit_config": {**raw["vit_config"], key: value}}))
    with pytest.raises(CheckpointError, match=key):
        TransformersEncoder(tmp_path, torch.device("cpu"), torch.float32)
