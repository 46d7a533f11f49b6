"""Processors of checkpoints with Kimi-VL's encoder, whose own ones are Python code, which is not
run: text with placeholders and images in their own size -> token ids, patches and grids."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixlm.arch.media.config_json import Raw
from radixlm.multimodal.custom_processor import BICUBIC, HALF, CustomProcessor, Size, patches_of

_NUMBERED = re.compile(r"<image-(\d+)>")


class KimiProcessor(CustomProcessor):
    """Images in their own size, in patches; a square of patches makes one placeholder."""

    image_token = placeholder = "<|media_pad|>"

    def __init__(self, raw: Raw, options: Raw, folder: Path, tokenizer: Any) -> None:
        super().__init__(tokenizer, folder)
        vision = raw["vision_config"]
        self._patch = int(options.get("patch_size") or vision.get("patch_size") or 14)
        merge = options.get("merge_kernel_size") or vision.get("merge_kernel_size") or (2, 2)
        self._merge: Size = (int(merge[0]), int(merge[1]))
        self._max_patches = int(options.get("in_token_limit") or 4096)
        self._pads = bool(options.get("pad_input", False))
        self._mean = options.get("image_mean") or HALF
        self._std = options.get("image_std") or HALF

    def read(self, image: Any, num_images: int = 1) -> dict[str, NDArray[Any]]:
        """``pixel_values`` and ``image_grid_thw``. ValueError for more than 511 patches a side."""
        whole = self._even(self._small(image.convert("RGB")))
        grid = [1, whole.height // self._patch, whole.width // self._patch]
        if max(grid) >= 512:
            raise ValueError("an image of more than 511 patches a side")
        return {
            "pixel_values": patches_of(whole, self._patch, self._mean, self._std),
            "image_grid_thw": np.asarray([grid], np.int64),
        }

    def prompt_text(self, index: int, arrays: dict[str, NDArray[Any]]) -> str:
        """A placeholder for each square of patches."""
        num_patches = int(arrays["image_grid_thw"].prod())
        return self.placeholder * (num_patches // (self._merge[0] * self._merge[1]))

    def _small(self, image: Any) -> Any:
        patches = (image.width // self._patch) * (image.height // self._patch)
        if patches <= self._max_patches:
            return image
        scale = math.sqrt(self._max_patches / patches)
        size = (int(image.width * scale), int(image.height * scale))
        return image.resize(size, BICUBIC)

    def _even(self, image: Any) -> Any:
        """Whole squares of patches: black at the right and below, or the middle of it."""
        down, across = (self._patch * merge for merge in self._merge)
        if self._pads:
            width, height = (
                math.ceil(n / unit) * unit
                for n, unit in ((image.width, across), (image.height, down))
            )
            return image.crop((0, 0, width, height))
        width, height = image.width // across * across, image.height // down * down
        if not width or not height:
            raise ValueError(f"an image smaller than {across} x {down} pixels")
        left, top = round((image.width - width) / 2), round((image.height - height) / 2)
        return image.crop((left, top, left + width, top + height))


class LocateAnythingProcessor(KimiProcessor):
    """Images stretched to whole squares of patches, each behind its number in words. Its chat
    template writes ``<image-1>``."""

    image_token = placeholder = "<IMG_CONTEXT>"

    def __call__(
        self,
        text: list[str],
        images: Sequence[Any] | None = None,
        add_special_tokens: bool = True,
        **ignored: Any,
    ) -> dict[str, NDArray[Any]]:
        """ValueError where text and images do not fit, and for numbers in another order."""
        numbers = [int(number) for number in _NUMBERED.findall(text[0])]
        if numbers != list(range(1, len(numbers) + 1)):
            raise ValueError(f"images are numbered {', '.join(map(str, numbers))}, not from 1 on")
        named = _NUMBERED.sub(self.image_token, text[0])
        return super().__call__([named], images, add_special_tokens, **ignored)

    def prompt_text(self, index: int, arrays: dict[str, NDArray[Any]]) -> str:
        """The placeholders between marks."""
        return f"<image {index + 1}><img>{super().prompt_text(index, arrays)}</img>"

    def _even(self, image: Any) -> Any:
        sizes = zip(image.size, reversed(self._merge), strict=True)
        width, height = (math.ceil(n / (self._patch * m)) * self._patch * m for n, m in sizes)
        return image.resize((width, height), BICUBIC)
