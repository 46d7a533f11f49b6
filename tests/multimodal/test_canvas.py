"""Image tokens on a canvas of slices against those of transformers' class."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL")
tf = pytest.importorskip("transformers")

from radixlm.arch.media.registry import multimodal_spec  # noqa: E402
from radixlm.base.errors import CheckpointError  # noqa: E402
from radixlm.multimodal.canvas import Crop, _spread, canvas_ids  # noqa: E402
from tests.multimodal.test_families import make_image  # noqa: E402
from tests.multimodal.tiny_newer import minicpmv4_7  # noqa: E402

NAME = "MiniCPMV4_7ForConditionalGeneration"
# without slices, with slices in a row, in a column and in both; and scaled by a fraction
SIZES = [(40, 30), (150, 50), (40, 170), (120, 110), (30, 64), (131, 70)]
TEXTS = [
    ["<|image_pad|> tell"],
    ["a <|image_pad|> and <|image_pad|>", "<|image_pad|>" * 2, "<|image_pad|>\n<|image_pad|> b"],
]


def crops_of(ids: Any, token: int, sizes: list[list[int]], merge: int) -> list[Crop]:
    at = np.flatnonzero(ids == token)
    runs = np.split(at, np.flatnonzero(np.diff(at) != 1) + 1)
    grids = [(rows // merge, columns // merge) for rows, columns in sizes]
    return [Crop(run[0], run[-1] + 1, grid) for run, grid in zip(runs, grids, strict=True)]


@pytest.mark.parametrize("mode", ["16x", "4x"])
@pytest.mark.filterwarnings("ignore")
def test_image_tokens_equal_those_of_the_class(mode: str) -> None:
    tiny = minicpmv4_7()
    tiny.config.downsample_mode = mode
    spec = multimodal_spec(NAME, tiny.config.to_dict())
    assert spec is not None and spec.canvas is not None
    canvas = spec.canvas
    kind = tf.models.minicpmv4_7.modeling_minicpmv4_7.MiniCPMV4_7Model
    theirs = kind.__new__(kind)
    object.__setattr__(theirs, "config", tiny.config)
    pairs = [(size,) for size in SIZES], list(itertools.permutations(SIZES, 2))[::3]
    num_sliced = 0
    for texts, chosen in zip(TEXTS, pairs, strict=True):
        for text, sizes in itertools.product(texts, chosen):
            images = [make_image(*size) for size in sizes]
            made = tiny.processor(
                text=[text], images=images, return_tensors="pt", downsample_mode=mode
            )
            want, _ = kind.get_rope_index(
                theirs, made["input_ids"], made["mm_token_type_ids"], made["target_sizes"]
            )
            ids = made["input_ids"][0].numpy().astype(np.int32)
            grids = made["target_sizes"].tolist()
            num_sliced += len(grids) > len(sizes)
            crops = crops_of(ids, tiny.config.image_token_id, grids, canvas.merge)
            got = canvas_ids(ids, crops, canvas)
            assert got.tolist() == want[:, 0].tolist(), (text, sizes)
    assert num_sliced > 10


def test_resize_steps_equal_torch() -> None:
    torch = pytest.importorskip("torch")
    for whole, count in itertools.product(range(1, 40), range(1, 14)):
        want = torch.linspace(0, whole - 1, count).round().tolist()
        assert np.rint(_spread(whole, count)).tolist() == want


def test_a_boundary_token_without_an_id_is_named() -> None:
    raw = dict.fromkeys(["slice_start_id", "slice_end_id", "image_start_id", "image_end_id"], 1)
    with pytest.raises(CheckpointError, match="newline_id"):
        multimodal_spec(NAME, raw)
