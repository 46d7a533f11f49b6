"""The processor of Ovis 2.5: images in their own shape, in patches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixlm.arch.media.config_json import Raw
from radixlm.arch.media.layouts.ovis import encoder_sizes
from radixlm.multimodal.custom_processor import BICUBIC, HALF, CustomProcessor, patches_of

_LEAST, _MOST = 448 * 448, 1344 * 1792  # pixels
_LONGEST = 200  # times as long as wide


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
