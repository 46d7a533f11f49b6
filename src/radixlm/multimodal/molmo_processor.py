"""The processor of Molmo: the image in overlapping crops, and as a whole before them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixlm.arch.media.config_json import Raw
from radixlm.arch.media.layouts.molmo import ENCODER
from radixlm.multimodal.custom_processor import (
    BILINEAR,
    CLIP_MEAN,
    CLIP_STD,
    CustomProcessor,
    joined,
)
from radixlm.multimodal.placeholders import check_parts

Floats = NDArray[np.float32]
_WHOLE_MASK = -1.0  # of a row behind those of the crops


class MolmoProcessor(CustomProcessor):
    """Images stand before the text. Four patches make one placeholder, and a crop gives those that
    its neighbours, which overlap it, do not.

    The published processor counts the whole image first among the patches and last among the masks
    of margins, and so were the weights trained: the mask of a crop is that of the one behind it.
    """

    image_token, placeholder = "<|image|>", "<im_patch>"

    def __init__(self, raw: Raw, options: Raw, folder: Path, tokenizer: Any) -> None:
        super().__init__(tokenizer, folder)
        self.image_token_ids = [self.image_token_id]
        names = ("<im_patch>", "<im_col>", "<im_start>", "<im_end>")
        self._marks = [int(tokenizer.convert_tokens_to_ids(name)) for name in names]
        self._start = tokenizer.bos_token_id or tokenizer.eos_token_id
        self._side, self._patch = ENCODER["side"], ENCODER["patch"]
        self._max_crops = int(options.get("max_crops") or 12)
        left, right = options.get("overlap_margins") or (4, 4)
        self._margins = (int(left), int(right))
        self._window = self._side // self._patch - sum(self._margins)  # patches of a crop alone
        if self._margins[0] % 2 or self._side // self._patch % 2 or self._window < 2:
            raise ValueError(f"overlap_margins = {left, right}")
        self._mean = np.asarray(options.get("image_mean") or CLIP_MEAN, np.float32)
        self._std = np.asarray(options.get("image_std") or CLIP_STD, np.float32)

    def __call__(
        self,
        text: list[str],
        images: Sequence[Any] | None = None,
        add_special_tokens: bool = True,
        **ignored: Any,
    ) -> dict[str, NDArray[Any]]:
        """A start token, the images, and the text, which a space begins. ValueError where text and
        images do not fit."""
        parts = text[0].split(self.image_token)
        check_parts(parts, len(images or ()), "images")
        read = [self.read(image) for image in images or ()]
        ids = [] if self._start is None else [int(self._start)]
        for arrays in read:
            ids += arrays.pop("tokens").tolist()
        words = "".join(parts)
        words = words if not words or words.startswith(" ") else f" {words}"
        ids += self.tokenizer(words, add_special_tokens=False)["input_ids"]
        return {"input_ids": np.asarray([ids], np.int64)} | joined(read)

    def read(self, image: Any, num_images: int = 1) -> dict[str, NDArray[Any]]:
        """``pixel_values`` float32 [crops, patches, numbers of one], ``image_masks`` float32
        [crops, patches]: the share of each that is no margin, ``image_places`` int64
        [crops, squares]: the placeholder of each square of patches or -1, ``image_crops`` their
        number, ``tokens``."""
        pixels = np.asarray(image.convert("RGB"), np.float32) / np.float32(255)
        margin = self._patch * sum(self._margins)
        height, width = (size - margin for size in pixels.shape[:2])
        grid = self._grid(height, width)
        unit = self._window * self._patch
        large, shown = self._fitted(pixels, grid[0] * unit + margin, grid[1] * unit + margin)
        whole, _ = self._fitted(pixels, self._side, self._side)
        corners = [(unit * y, unit * x) for y in range(grid[0]) for x in range(grid[1])]
        crops = [whole, *(large[y : y + self._side, x : x + self._side] for y, x in corners)]
        masks = [shown[y : y + self._side, x : x + self._side] for y, x in corners]
        shares = [self._patches(mask[..., None]).mean(-1) for mask in masks]
        cut = np.stack([self._patches(crop) for crop in crops])
        rows, columns = (self._kept(count) for count in grid)
        return {
            "pixel_values": cut,
            "image_masks": np.stack([*shares, np.full_like(shares[0], _WHOLE_MASK)]),
            "image_places": self._places(rows, columns),
            "image_crops": np.asarray([len(cut)], np.int64),
            "tokens": np.asarray(self._tokens(rows[-1][1], columns[-1][1]), np.int64),
        }

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the crops that enlarge the image least, or reduce it least."""
        most, unit = self._max_crops, np.float32(self._window * self._patch)
        grids = [(y, x) for y in range(1, most + 1) for x in range(1, most // y + 1)]
        grids.sort(key=lambda grid: (grid[0] * grid[1], grid[0]))
        with np.errstate(divide="ignore"):
            sizes = np.asarray(grids, np.float32) * unit
            scales = (sizes / np.asarray([height, width], np.float32)).min(1)
        if (scales < 1).all():
            return grids[int(scales.argmax())]
        return grids[int(np.where(scales < 1, np.inf, scales).argmin())]

    def _fitted(self, pixels: Floats, height: int, width: int) -> tuple[Floats, Floats]:
        """The image in the middle of black margins, normalized; 1 where it is, 0 in the margins."""
        from PIL import Image  # noqa: PLC0415  (an extra)

        high, wide = (np.float32(size) for size in pixels.shape[:2])
        scale = min(np.float32(width) / wide, np.float32(height) / high)
        size = (int(wide * scale), int(high * scale))
        channels = [Image.fromarray(pixels[..., i]).resize(size, BILINEAR) for i in range(3)]
        small = np.stack([np.asarray(one) for one in channels], -1).clip(0, 1)
        top, left = (height - size[1]) // 2, (width - size[0]) // 2
        made = np.zeros((height, width, 3), np.float32)
        made[top : top + size[1], left : left + size[0]] = small
        shown = np.zeros((height, width), np.float32)
        shown[top : top + size[1], left : left + size[0]] = 1
        return (made - self._mean) / self._std, shown

    def _patches(self, crop: Floats) -> Floats:
        """[side, side, channels] -> [patches, numbers of one: rows, columns, channels]."""
        count, channels = self._side // self._patch, crop.shape[-1]
        cut = crop.reshape(count, self._patch, count, self._patch, channels).swapaxes(1, 2)
        return cut.reshape(count * count, -1)

    def _kept(self, count: int) -> list[tuple[int, int]]:
        """For crops one behind the other, which squares of all the image each gives: from, to."""
        left, right = self._margins
        patches = [
            self._window + left * (at == 0) + right * (at == count - 1) for at in range(count)
        ]
        ends = np.cumsum([0, *((one + 1) // 2 for one in patches)]).tolist()
        return list(pairwise(ends))

    def _places(
        self, rows: list[tuple[int, int]], columns: list[tuple[int, int]]
    ) -> NDArray[np.int64]:
        side = self._side // self._patch // 2
        whole = np.arange(side * side).reshape(side, side)
        first, width, made = self._margins[0] // 2, columns[-1][1], [whole]
        for top, bottom in rows:
            for left, right in columns:
                own = np.full((side, side), -1)
                y, x = first * (top > 0), first * (left > 0)
                places = np.arange(top, bottom)[:, None] * width + np.arange(left, right)
                own[y : y + bottom - top, x : x + right - left] = places + whole.size
                made.append(own)
        return np.stack(made).reshape(len(made), -1).astype(np.int64)

    def _tokens(self, rows: int, columns: int) -> list[int]:
        """The whole image's placeholders and those of all crops, each row with an end."""
        patch, end_of_row, start, end = self._marks
        side = self._side // self._patch // 2
        whole, large = ([patch] * width + [end_of_row] for width in (side, columns))
        return [start, *(whole * side), end, start, *(large * rows), end]
