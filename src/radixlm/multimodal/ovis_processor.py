"""The processors of Ovis: 2.5 takes images in their own shape, in patches, 1.6 and 2 in tiles."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixlm.arch.media.config_json import Raw
from radixlm.arch.media.layouts.ovis import PLACEHOLDERS, encoder_sizes, tiles_config
from radixlm.multimodal.custom_processor import (
    BICUBIC,
    HALF,
    CustomProcessor,
    Size,
    grids_of,
    patches_of,
)

_LEAST, _MOST = 448 * 448, 1344 * 1792  # pixels
_LONGEST = 200  # times as long as wide
_MOST_TILES, _ENOUGH = 9, 0.9


class OvisProcessor(CustomProcessor):
    """A square of patches makes one placeholder; one more begins and one ends an image."""

    image_token, placeholder = "<image>", "<|image_pad|>"

    def __init__(self, raw: Raw, options: Raw, folder: Path, tokenizer: Any) -> None:
        super().__init__(tokenizer, folder)
        sizes = encoder_sizes(raw)
        self._patch, self._merge = int(sizes["patch_size"]), int(sizes["hidden_stride"])
        self._least = int(options.get("min_pixels") or _LEAST)
        self._most = int(options.get("max_pixels") or _MOST)
        self._resample = int(options.get("resample") or BICUBIC)
        self._mean = options.get("image_mean") or HALF
        self._std = options.get("image_std") or HALF

    def read(self, image: Any, num_images: int = 1) -> dict[str, NDArray[Any]]:
        """``pixel_values``, square by square of patches, and ``image_grid_thw``."""
        height, width = self._size(image.height, image.width)
        whole = image.convert("RGB").resize((width, height), self._resample)
        rows, columns, merge = height // self._patch, width // self._patch, self._merge
        cut = patches_of(whole, self._patch, self._mean, self._std)
        squares = cut.reshape(rows // merge, merge, columns // merge, merge, *cut.shape[1:])
        return {
            "pixel_values": squares.swapaxes(1, 2).reshape(cut.shape),
            "image_grid_thw": np.asarray([[1, rows, columns]], np.int64),
        }

    def prompt_text(self, index: int, arrays: dict[str, NDArray[Any]]) -> str:
        """A placeholder for each square of patches, and two more."""
        squares = int(arrays["image_grid_thw"].prod()) // self._merge**2
        return self.placeholder * (squares + 2)

    def _size(self, height: int, width: int) -> tuple[int, int]:
        """Whole squares of patches, between the least and the most pixels, of about this shape."""
        unit = self._patch * self._merge
        short, long = sorted((height, width))
        if short < unit:
            long, short = round(unit / short * long), unit
        elif long > _LONGEST * short:
            long = _LONGEST * short
        height, width = (short, long) if height < width else (long, short)
        sizes = [round(size / unit) * unit for size in (height, width)]
        if sizes[0] * sizes[1] > self._most:
            scale = math.sqrt(height * width / self._most)
            sizes = [math.floor(size / scale / unit) * unit for size in (height, width)]
        elif sizes[0] * sizes[1] < self._least:
            scale = math.sqrt(self._least / (height * width))
            sizes = [math.ceil(size * scale / unit) * unit for size in (height, width)]
        if not min(sizes):
            raise ValueError(f"an image of {width} x {height} pixels is too narrow")
        return sizes[0], sizes[1]


class OvisTilesProcessor(CustomProcessor):
    """The whole image and, of a large one, tiles; each keeps its shape in a square."""

    image_token = "<image>"

    def __init__(self, raw: Raw, options: Raw, folder: Path, tokenizer: Any) -> None:
        kind = str(raw["llm_config"]["model_type"])
        if kind not in PLACEHOLDERS:
            raise ValueError(f"llm_config: model_type = {kind!r} is not one of {[*PLACEHOLDERS]}")
        self.placeholder = PLACEHOLDERS[kind]
        super().__init__(tokenizer, folder)
        config = tiles_config(raw)
        vision = config["vision_config"]
        self._side = int(vision["image_size"])
        row = math.ceil(self._side / int(vision["patch_size"]))
        self._count = int(math.ceil(row / config["hidden_stride"]) ** 2)
        self._mean = options.get("image_mean") or HALF
        self._std = options.get("image_std") or HALF
        self._resample = int(options.get("resample") or BICUBIC)

    def read(self, image: Any, num_images: int = 1) -> dict[str, NDArray[Any]]:
        """``pixel_values`` of the whole and of its tiles [tiles, 3, side, side], ``tile_grid`` rows
        and columns."""
        image = image.convert("RGB")
        columns, rows = self._grid(image.size)
        boxes = _boxes(image.size, (columns, rows)) if rows * columns > 1 else []
        tiles = [self._square(one) for one in (image, *(image.crop(box) for box in boxes))]
        grid = np.asarray([[rows, columns]], np.int64)
        return {"pixel_values": np.stack(tiles), "tile_grid": grid}

    def prompt_text(self, index: int, arrays: dict[str, NDArray[Any]]) -> str:
        """Placeholders of the tiles and of the marks between them."""
        tiles = len(arrays["pixel_values"])
        marks = 3 + max(0, tiles - 2)
        return self.placeholder * (tiles * self._count + marks)

    def _square(self, image: Any) -> NDArray[np.float32]:
        """[3, side, side]: the image in the middle, zeros beside it."""
        side, (width, height) = self._side, image.size
        long = max(width, height)
        size = tuple(side if one == long else int(one / long * side) for one in (width, height))
        pixels = np.asarray(image.resize(size, self._resample), np.float32) / 255
        scaled = (pixels - np.asarray(self._mean, np.float32)) / np.asarray(self._std, np.float32)
        made = np.zeros((side, side, 3), np.float32)
        left, top = (side - size[0]) // 2, (side - size[1]) // 2
        made[top : top + size[1], left : left + size[0]] = scaled
        return made.transpose(2, 0, 1)

    def _grid(self, size: Size) -> Size:
        """The fewest tiles that show more than nine tenths of the pixels; else the most pixels."""
        shown = {grid: self._share(size, grid) for grid in grids_of(_MOST_TILES)}
        good = [grid for grid, share in shown.items() if share > _ENOUGH]
        if good:
            return min(good, key=lambda grid: (math.prod(grid), -shown[grid], grid[1]))
        return min(shown, key=lambda grid: (-shown[grid], math.prod(grid), grid[1]))

    def _share(self, size: Size, grid: Size) -> float:
        """Of the image's pixels that the tiles of a grid show."""
        area = 0.0
        for left, top, right, bottom in _boxes(size, grid):
            short, long = sorted((right - left, bottom - top))
            area += short * long if long <= self._side else short / long * self._side**2
        return area / (size[0] * size[1])


def _boxes(size: Size, grid: Size) -> list[tuple[int, int, int, int]]:
    """Left, top, right and bottom of each tile, row by row; the last ones take the rest."""
    (width, height), (columns, rows) = size, grid
    lefts = [*(x * (width // columns) for x in range(columns)), width]
    tops = [*(y * (height // rows) for y in range(rows)), height]
    return [
        (lefts[x], tops[y], lefts[x + 1], tops[y + 1]) for y in range(rows) for x in range(columns)
    ]
