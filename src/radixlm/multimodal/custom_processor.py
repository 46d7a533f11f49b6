"""The parts that processors of checkpoints share whose own ones are Python code, which is not run:
text with placeholders and images -> token ids, patches and grids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixlm.base.errors import CheckpointError
from radixlm.multimodal.placeholders import check_parts, ids_of

Size = tuple[int, int]  # columns and rows, as Pillow has them
BILINEAR, BICUBIC = 2, 3  # as Pillow counts
CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
HALF = [0.5, 0.5, 0.5]


def patches_of(image: Any, size: int, mean: Sequence[float], std: Sequence[float]) -> Any:
    """float32 [rows * columns, 3, size, size] of an image in whole patches of ``size``."""
    values = np.asarray(image.convert("RGB"), np.float32) / 255
    values = ((values - np.asarray(mean, np.float32)) / np.asarray(std, np.float32)).transpose(
        2, 0, 1
    )
    rows, columns = image.height // size, image.width // size
    cut = values.reshape(3, rows, size, columns, size).transpose(1, 3, 0, 2, 4)
    return np.ascontiguousarray(cut.reshape(rows * columns, 3, size, size))


def grids_of(max_tiles: int, min_tiles: int = 1) -> list[Size]:
    """All grids of so many tiles, columns and rows, the smallest first."""
    every = ((x, y) for x in range(1, max_tiles + 1) for y in range(1, max_tiles // x + 1))
    return sorted((grid for grid in every if grid[0] * grid[1] >= min_tiles), key=math.prod)


def best_grid(image: Any, side: int, grids: Sequence[Size]) -> Size:
    """The grid whose shape is nearest to the image's; an image that is larger than half of a grid
    takes the larger of equal shapes."""
    best, smallest = (1, 1), math.inf
    for grid in grids:
        distance = abs(image.width / image.height - grid[0] / grid[1])
        is_large = image.width * image.height > 0.5 * side**2 * grid[0] * grid[1]
        if distance < smallest or (distance == smallest and is_large):
            best, smallest = grid, distance
    return best


def cut_to(image: Any, side: int, grid: Size) -> list[Any]:
    """The tiles of a grid, row by row, each a square of ``side``."""
    large = image.resize((side * grid[0], side * grid[1]), BICUBIC)
    corners = [(side * x, side * y) for y in range(grid[1]) for x in range(grid[0])]
    return [large.crop((x, y, x + side, y + side)) for x, y in corners]


def best_tiles(image: Any, side: int, max_tiles: int) -> list[Any]:
    """The tiles of the best of all grids of so many."""
    return cut_to(image, side, best_grid(image, side, grids_of(max_tiles)))


def joined(read: Sequence[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """The arrays of all images, one behind the other."""
    names = read[0] if read else ()
    return {name: np.concatenate([one[name] for one in read]) for name in names}


class CustomProcessor:
    """The part of a Hugging Face processor's interface that ``MediaProcessor`` uses."""

    image_token = ""  # stands for an image in a text
    placeholder = ""  # the token in each of its positions

    def __init__(self, tokenizer: Any, folder: Path) -> None:
        """CheckpointError where the tokenizer lacks the placeholder."""
        self.tokenizer = tokenizer
        self.image_token_id = (
            tokenizer.convert_tokens_to_ids(self.placeholder) if self.placeholder else None
        )
        is_unknown = self.image_token_id == tokenizer.unk_token_id
        if self.image_token_id is None or (is_unknown and self.placeholder != tokenizer.unk_token):
            raise CheckpointError(f"{folder}: its tokenizer has no token {self.placeholder!r}")

    def __call__(
        self,
        text: list[str],
        images: Sequence[Any] | None = None,
        add_special_tokens: bool = True,
        **ignored: Any,
    ) -> dict[str, NDArray[Any]]:
        """ValueError where text and images do not fit."""
        parts = text[0].split(self.image_token)
        images = list(images or ())
        check_parts(parts, len(images), "images")
        read = [self.read(image, len(images)) for image in images]
        texts = [self.prompt_text(index, arrays) for index, arrays in enumerate(read)]
        ids = ids_of(self.tokenizer, parts, texts, add_special_tokens)
        return ids | joined(read)

    def read(self, image: Any, num_images: int = 1) -> dict[str, NDArray[Any]]:
        """The arrays of one image."""
        raise NotImplementedError

    def prompt_text(self, index: int, arrays: dict[str, NDArray[Any]]) -> str:
        """The text with placeholders for image number ``index``."""
        raise NotImplementedError
