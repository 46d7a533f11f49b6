"""Keye-VL and Keye-VL 1.5 with their published names through the engine, against the encoder of
PaddleOCR-VL, a plain projector, and Qwen 3 with M-RoPE's angles written out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("PIL")
tf = pytest.importorskip("transformers")

from tests.fakes.tiny_checkpoint import randomise  # noqa: E402
from tests.multimodal.test_custom_encoders import Rows, anew, check, noisy, written  # noqa: E402
from tests.multimodal.test_published_as_code import saved  # noqa: E402
from tests.multimodal.tiny import SMALL, TEXT, text, tokenizer  # noqa: E402
from tests.multimodal.tiny_more import paddleocr_vl  # noqa: E402

SECTIONS, WIDTH, IMAGE = [2, 3, 3], 16, 257
MARK = "<|vision_start|><|image_pad|><|vision_end|>"


def places_of(ids: list[int], grids: list[list[int]], count: int) -> Tensor:
    """[3, count]: time, row and column of each token; those behind ``ids`` are text."""
    places: list[tuple[int, int, int]] = []
    following, at, left = 0, 0, list(grids)
    while at < count:
        if at >= len(ids) or ids[at] != IMAGE:
            places.append((following,) * 3)
            following, at = following + 1, at + 1
            continue
        _, rows, columns = left.pop(0)
        rows, columns = rows // 2, columns // 2
        box = [
            (following, following + y, following + x) for y in range(rows) for x in range(columns)
        ]
        places += box
        following, at = following + max(rows, columns), at + len(box)
    return torch.tensor(places).T


class Sectioned:
    """Qwen 3 whose angles follow the time, rows and columns of the tokens, section by section;
    it computes all tokens anew for each one it generates."""

    def __init__(self, model: Any) -> None:
        self.model, self.grids, self.ids = model, [], []
        model.model.rotary_emb.forward = self.angles

    def angles(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        places = places_of(self.ids, self.grids, x.shape[1])
        axis = [which for which, size in enumerate(SECTIONS) for _ in range(size)]
        speeds = 10000.0 ** -(torch.arange(WIDTH // 2) / (WIDTH // 2))
        turns = (places[axis].T * speeds).repeat(1, 2)[None]
        return turns.cos(), turns.sin()

    def get_input_embeddings(self) -> Any:
        def embed(ids: Tensor) -> Tensor:
            self.ids = ids[0].tolist()
            return self.model.get_input_embeddings()(ids)

        return embed

    def generate(self, inputs_embeds: Tensor, max_new_tokens: int, **ignored: Any) -> Any:
        def logits(whole: Tensor) -> Tensor:
            return self.model(inputs_embeds=whole, use_cache=False).logits[:, -1]

        return anew(logits, self.model.get_input_embeddings(), inputs_embeds, max_new_tokens)


def keye(folder: Path, architecture: str) -> tuple[Any, Rows]:
    """A checkpoint; its text model, and the encoder outputs of images."""
    tok = tokenizer("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
    tok.save_pretrained(folder)
    torch.manual_seed(0)
    tiny = paddleocr_vl()
    whole = tf.PaddleOCRVLForConditionalGeneration(tiny.config).float().eval().model
    model = tf.Qwen3ForCausalLM(tf.Qwen3Config(**TEXT, head_dim=WIDTH)).float().eval()
    noisy(whole.visual)
    noisy(whole.projector)
    randomise(model)
    is_1_5 = "1_5" in architecture
    if is_1_5:
        whole.projector.pre_norm = torch.nn.LayerNorm(128)
        noisy(whole.projector.pre_norm)
    tensors = saved(model, folder / "text")
    tensors |= {f"visual.{name}": one for name, one in whole.visual.state_dict().items()}
    tensors |= {f"mlp_AR.{name}": one for name, one in whole.projector.state_dict().items()}
    tensors["visual.vision_model.head.probe"] = torch.zeros(1, 1, 32)
    tensors["visual.vision_model.embeddings.packing_position_embedding.weight"] = torch.ones(9, 32)
    sizes = {"min_pixels": 28 * 28, "max_pixels": 112 * 112, "patch_size": 7, "merge_size": 2}
    (folder / "preprocessor_config.json").write_text(
        json.dumps({**sizes, "image_mean": [0.5] * 3, "image_std": [0.4] * 3})
    )
    written(folder, tensors, {
        **text("Keye"), "architectures": [architecture], "model_type": "Keye", "head_dim": WIDTH,
        "rope_theta": 10000.0, "rope_scaling": {"type": "mrope", "mrope_section": SECTIONS},
        "image_token_id": IMAGE, "video_token_id": 260, "vision_start_token_id": 258,
        "vision_end_token_id": 259, "vision_config": {
            **SMALL, "image_size": 56, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "tokens_per_second": 2, "model_type": "siglip_vision_model",
        },
    })  # fmt: skip
    reader = tiny.processor.image_processor
    reader.image_mean, reader.image_std = [0.5] * 3, [0.4] * 3
    held = Sectioned(model)

    def projected(seen: Tensor, grids: list[list[int]]) -> Tensor:
        """The rows of each square of four patches side by side, before or behind the norm."""
        parts, made = whole.projector, []
        for one, (_, rows, columns) in zip(
            seen.split([g[1] * g[2] for g in grids]), grids, strict=True
        ):
            one = one if is_1_5 else parts.pre_norm(one)
            grid = one.reshape(rows, columns, -1)
            for y in range(0, rows, 2):
                for x in range(0, columns, 2):
                    square = grid[y : y + 2, x : x + 2].reshape(-1)
                    square = parts.pre_norm(square) if is_1_5 else square
                    opened = torch.nn.functional.gelu(parts.linear_1(square))
                    made.append(parts.linear_2(opened))
        return torch.stack(made)

    def rows(images: list[Any]) -> Tensor:
        read = reader(images=images, return_tensors="pt")
        held.grids = read["image_grid_thw"].tolist()
        with torch.no_grad():
            pixels = read["pixel_values"][None]
            seen = whole.visual(pixel_values=pixels, grid_thw=read["image_grid_thw"])
            return projected(seen.last_hidden_state.reshape(-1, 32), held.grids)

    return held, rows


@pytest.mark.parametrize(
    "architecture", ["KeyeForConditionalGeneration", "KeyeVL1_5ForConditionalGeneration"]
)
@pytest.mark.filterwarnings("ignore")
def test_keye(architecture: str, tmp_path: Path) -> None:
    model, rows = keye(tmp_path, architecture)
    check(tmp_path, model, "<|image_pad|>", MARK, rows)
