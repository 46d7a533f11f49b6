"""Processors of models whose prompts are their own: H2OVL and NVLM-D cut images into tiles, Mantis,
Tarsier and GLM-4V take them as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixlm.arch.media.config_json import Raw
from radixlm.arch.media.layouts.glm4v import encoder_sizes
from radixlm.base.lazy import load
from radixlm.multimodal.custom_processor import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    CustomProcessor,
    best_grid,
    cut_to,
    grids_of,
    patches_of,
)

_IMAGENET_MEAN, _IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


class H2oProcessor(CustomProcessor):
    """Tiles of an image and, of more than one, the whole image. ``use_msac``: a prompt's only image
    is cut in two ways, and the tiles of the finer one come first."""

    image_token, placeholder = "<image>", "<IMG_CONTEXT>"

    def __init__(self, raw: Raw, options: Raw, folder: Path, tokenizer: Any) -> None:
        super().__init__(tokenizer, folder)
        vision = raw["vision_config"]
        self._side = int(raw.get("force_image_size") or vision.get("image_size", 448))
        ratio = float(raw.get("downsample_ratio", 0.5))
        self._count = int((self._side // int(vision.get("patch_size", 14))) ** 2 * ratio**2)
        is_dynamic = raw.get("dynamic_image_size", True)
        self._least, self._most = (
            int(raw.get(f"{one}_dynamic_patch") or default) if is_dynamic else 1
            for one, default in (("min", 1), ("max", 12))
        )
        self._has_whole = bool(raw.get("use_thumbnail", True))
        self._cuts_twice = bool(raw.get("use_msac", False))

    def read(self, image: Any, num_images: int = 1) -> dict[str, NDArray[Any]]:
        """``pixel_values`` of the tiles [tiles, 3, side, side], ``num_tiles``."""
        image, side = image.convert("RGB"), self._side
        grids = grids_of(self._most, 1 if self._cuts_twice else self._least)
        grid = best_grid(image, side, grids)
        tiles = cut_to(image, side, grid)
        if self._cuts_twice and num_images == 1:
            others = [
                other
                for other in grids_of(self._most, 3)
                if grid[0] % other[0] and grid[1] % other[1]
            ]
            fine = cut_to(image, side, best_grid(image, side, others))
            tiles = [tile for cut in (fine, tiles) if len(cut) > 1 for tile in cut]
            tiles.append(image.resize((side, side), BICUBIC))
        elif (self._has_whole or self._cuts_twice) and len(tiles) > 1:
            tiles.append(image.resize((side, side), BICUBIC))
        cut = [patches_of(one, side, _IMAGENET_MEAN, _IMAGENET_STD) for one in tiles]
        return {"pixel_values": np.concatenate(cut), "num_tiles": np.asarray([len(tiles)])}

    def prompt_text(self, index: int, arrays: dict[str, NDArray[Any]]) -> str:
        """The placeholders of all tiles between two marks."""
        return f"<img>{self.placeholder * self._count * len(arrays['pixel_values'])}</img>"


class NvlmProcessor(H2oProcessor):
    """Every tile has a tag."""

    placeholder = "<|vision_pad|>"

    def prompt_text(self, index: int, arrays: dict[str, NDArray[Any]]) -> str:
        """A tag and the placeholders of each tile between two marks."""
        count = len(arrays["pixel_values"]) - self._has_whole
        tags = [f"<tile_{number}>" for number in range(1, count + 1)]
        tags += ["<tile_global_thumbnail>"] * self._has_whole
        inside = "".join(tag + self.placeholder * self._count for tag in tags)
        return f"<Image>{inside}</Image>"


class _WholeImageProcessor(CustomProcessor):
    """An image in one size, read by the folder's image processor."""

    def __init__(self, raw: Raw, options: Raw, folder: Path, tokenizer: Any) -> None:
        token = raw.get("image_token_index", raw.get("image_token_id", -1))
        self.image_token = self.placeholder = str(tokenizer.convert_ids_to_tokens(int(token)))
        super().__init__(tokenizer, folder)
        vision = raw["vision_config"]
        self._row = int(vision["image_size"]) // int(vision["patch_size"])
        read = load("radixlm.multimodal.checkpoint:load_image_processor")
        self._images = read(folder)

    def read(self, image: Any, num_images: int = 1) -> dict[str, NDArray[Any]]:
        """``pixel_values`` [1, 3, side, side]."""
        outputs = self._images(image.convert("RGB"), return_tensors="np")
        return {"pixel_values": np.asarray(outputs["pixel_values"], np.float32)}


class MantisProcessor(_WholeImageProcessor):
    """Images are numbered."""

    def prompt_text(self, index: int, arrays: dict[str, NDArray[Any]]) -> str:
        """The number and the placeholders."""
        places = self.placeholder * self._row**2
        return f"(image {index + 1}: <Image>{places}</Image>)"


class TarsierProcessor(_WholeImageProcessor):
    """Each row of patches and the image end with a token of the text model."""

    def __init__(self, raw: Raw, options: Raw, folder: Path, tokenizer: Any) -> None:
        super().__init__(raw, options, folder, tokenizer)
        self._ends = [
            str(tokenizer.convert_ids_to_tokens(int(raw[key])))
            for key in ("image_newline_idx", "image_new_idx")
        ]

    def prompt_text(self, index: int, arrays: dict[str, NDArray[Any]]) -> str:
        """The rows, each with its end, and the end of the image."""
        row_end, image_end = self._ends
        return (self.placeholder * self._row + row_end) * self._row + image_end


class Glm4vProcessor(CustomProcessor):
    """An image in one size: a placeholder for each square of four patches, one before and one
    behind. All have the token that begins images; the text's own placeholder would end texts."""

    placeholder = "<|begin_of_image|>"
    image_token = "<|begin_of_image|><|endoftext|><|end_of_image|>"

    def __init__(self, raw: Raw, options: Raw, folder: Path, tokenizer: Any) -> None:
        super().__init__(tokenizer, folder)
        sizes = encoder_sizes(raw)
        self._side = int(sizes["image_size"])
        self._count = (self._side // int(sizes["patch_size"]) // 2) ** 2 + 2

    def read(self, image: Any, num_images: int = 1) -> dict[str, NDArray[Any]]:
        """``pixel_values`` [1, 3, side, side]."""
        square = image.convert("RGB").resize((self._side, self._side), BICUBIC)
        return {"pixel_values": patches_of(square, self._side, CLIP_MEAN, CLIP_STD)}

    def prompt_text(self, index: int, arrays: dict[str, NDArray[Any]]) -> str:
        """The placeholders."""
        return self.placeholder * self._count
