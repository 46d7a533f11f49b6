"""LocateAnything with its published names through the engine, against transformers' encoder of
Kimi K2.5 and Qwen 2."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("PIL")
tf = pytest.importorskip("transformers")
from PIL import Image  # noqa: E402

from radixlm.multimodal.checkpoint import load_processor  # noqa: E402
from tests.fakes.tiny_checkpoint import randomise  # noqa: E402
from tests.multimodal.test_custom_encoders import (  # noqa: E402
    MOONVIT,
    PATCH,
    Rows,
    check,
    moonvit,
    written,
)
from tests.multimodal.test_families import make_image  # noqa: E402
from tests.multimodal.test_published_as_code import saved  # noqa: E402
from tests.multimodal.tiny import SMALL, text, tokenizer  # noqa: E402

PLACE, LIMIT = "<IMG_CONTEXT>", 24


def stretched(image: Any) -> tuple[torch.Tensor, list[int]]:
    """At most ``LIMIT`` patches, then a size of whole squares of four."""
    count = (image.width // PATCH) * (image.height // PATCH)
    size = image.size
    if count > LIMIT:
        size = tuple(int(n * math.sqrt(LIMIT / count)) for n in size)
        image = image.resize(size, Image.Resampling.BICUBIC)
    image = image.resize([-(-n // 14) * 14 for n in size], Image.Resampling.BICUBIC)
    values = torch.tensor(np.asarray(image)).float() / 127.5 - 1
    rows, columns = image.height // PATCH, image.width // PATCH
    cut = values.permute(2, 0, 1).unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)
    return cut.permute(1, 2, 0, 3, 4).reshape(-1, 3, PATCH, PATCH), [1, rows, columns]


def locate_anything(folder: Path) -> tuple[Any, Rows]:
    """A checkpoint; its text model, and the encoder outputs of images."""
    tokenizer("<img>", PLACE, "</img>").save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({
        "in_token_limit": LIMIT, "merge_kernel_size": [2, 2], "patch_size": PATCH,
        "image_processor_type": "LocateAnythingImageProcessor",
    }))  # fmt: skip
    torch.manual_seed(0)
    held = text("qwen2", tie_word_embeddings=True)
    whole, tower = moonvit(text("llama"))
    model = tf.Qwen2ForCausalLM(tf.Qwen2Config(**held)).float().eval()
    randomise(model)
    wide, dim = 4 * SMALL["hidden_size"], held["hidden_size"]
    shapes = {"0": (wide,), "1": (dim, wide), "3": (dim, dim)}
    parts = {f"mlp1.{k}.weight": torch.randn(shape) * 0.2 for k, shape in shapes.items()}
    parts |= {f"mlp1.{k}.bias": torch.randn(shape[0]) * 0.2 for k, shape in shapes.items()}
    tensors = saved(model, folder / "text", "language_model.") | parts
    tensors |= {
        name.replace("vision_tower.", "vision_model."): value
        for name, value in tower.items()
        if name.startswith("vision_tower.")
    }
    written(folder, tensors, {
        "architectures": ["LocateAnythingForConditionalGeneration"],
        "model_type": "locateanything", "text_config": held, "vision_config": MOONVIT,
        "image_token_index": tokenizer("<img>", PLACE, "</img>").convert_tokens_to_ids(PLACE),
        "mlp_connector_layers": 2, "tie_word_embeddings": True,
    })  # fmt: skip

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, parts[f"mlp1.{name}.weight"], parts[f"mlp1.{name}.bias"])

    def rows(images: list[Any]) -> torch.Tensor:
        made = []
        for image in images:
            pixels, grid = stretched(image)
            with torch.no_grad():
                tower_rows = whole.model.vision_tower(pixels, torch.tensor([grid])).pooler_output
            normed = F.layer_norm(
                tower_rows.reshape(-1, wide), (wide,), parts["mlp1.0.weight"], parts["mlp1.0.bias"]
            )
            made.append(linear("3", F.gelu(linear("1", normed))))
        return torch.cat(made)

    return model, rows


@pytest.mark.filterwarnings("ignore")
def test_locate_anything(tmp_path: Path) -> None:
    model, rows = locate_anything(tmp_path)
    check(tmp_path, model, PLACE, PLACE, rows)


@pytest.mark.filterwarnings("ignore")
def test_images_of_locate_anything_are_named_and_numbered(tmp_path: Path) -> None:
    locate_anything(tmp_path)
    reader = load_processor(tmp_path)
    images = [make_image(28, 28), make_image(20, 50)]
    made = reader(text=["<image-1>a <image-2>"], images=images)
    first, second = (f"<img>{PLACE * n}</img>" for n in (4, 2 * 4))
    want = f"<image 1>{first}a <image 2>{second}"
    assert reader.tokenizer.decode(made["input_ids"][0]) == want
    assert made["image_grid_thw"].tolist() == [[1, 4, 4], [1, 8, 4]]
    for image, grid in zip(images, ([1, 4, 4], [1, 8, 4]), strict=True):
        pixels, expected = stretched(image)
        assert expected == grid
        read = torch.tensor(reader.read(image)["pixel_values"])
        torch.testing.assert_close(read, pixels, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="numbered 2, 1"):
        reader(text=["<image-2><image-1>"], images=images)
