"""Processors of checkpoints that bring theirs as Python code, which is not run: text with
placeholders and images -> token ids, patches and grids."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixlm.arch.json_file import object_or_empty
from radixlm.arch.media.config_json import Raw
from radixlm.arch.media.layouts.phi3 import encoder_sizes
from radixlm.arch.media.layouts.vila import spatial_merge_size
from radixlm.arch.media.registry import row_of
from radixlm.base.errors import CheckpointError
from radixlm.multimodal.custom_processor import (
    BICUBIC,
    BILINEAR,
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    CustomProcessor,
    Size,
    best_tiles,
    joined,
    patches_of,
)
from radixlm.multimodal.kimi_processor import KimiProcessor, LocateAnythingProcessor
from radixlm.multimodal.molmo_processor import MolmoProcessor
from radixlm.multimodal.moondream_processor import MoondreamProcessor
from radixlm.multimodal.ovis_processor import OvisProcessor, OvisTilesProcessor
from radixlm.multimodal.placeholders import check_parts
from radixlm.multimodal.tile_processors import (
    Glm4vProcessor,
    H2oProcessor,
    MantisProcessor,
    NvlmProcessor,
    TarsierProcessor,
)

_TRANSPOSED = 5
_NUMBERED = re.compile(r"<\|image(?:_(\d+))?\|>")
_IMAGENET_MEAN, _IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
_GRID_HW = "image_grid_hw"


class MiniCpmProcessor(CustomProcessor):
    """The whole image and, of a large one, slices of about ``scale_resolution`` squared."""

    image_token = "(<image>./</image>)"

    def __init__(self, raw: Raw, options: Raw, folder: Path, tokenizer: Any) -> None:
        self.placeholder = str(tokenizer.unk_token or "<unk>")
        super().__init__(tokenizer, folder)
        config = {**raw, **(raw.get("slice_config") or {}), **options}
        vision = raw.get("vision_config") or {}
        self._patch = int(config.get("patch_size") or vision.get("patch_size") or 14)
        self._max_tiles = (
            int(config.get("max_slice_nums") or 9) if config.get("slice_mode", True) else 1
        )
        self._side = int(config.get("scale_resolution") or 448)
        self._num_queries = int(raw.get("query_num") or options.get("image_feature_size") or 64)
        self._has_number = bool(config.get("use_image_id", True))
        self._mean = options.get("norm_mean") or options.get("image_mean") or HALF
        self._std = options.get("norm_std") or options.get("image_std") or HALF

    def read(self, image: Any, num_images: int = 1) -> dict[str, NDArray[Any]]:
        """``pixel_values`` and ``tgt_sizes`` of the slices; ``grid`` columns and rows of them."""
        slices, grid = self._slices(image)
        cut = [patches_of(one, self._patch, self._mean, self._std) for one in slices]
        sizes = [(one.height // self._patch, one.width // self._patch) for one in slices]
        return {
            "pixel_values": np.concatenate(cut),
            "tgt_sizes": np.asarray(sizes, np.int64),
            "grid": np.asarray([grid], np.int64),
        }

    def prompt_text(self, index: int, arrays: dict[str, NDArray[Any]]) -> str:
        """Number, image, then its slices, a line for each row."""
        tokens = self.placeholder * self._num_queries
        number = f"<image_id>{index}</image_id>" if self._has_number else ""
        columns, rows = arrays["grid"][0].tolist()
        row = f"<slice>{tokens}</slice>" * columns
        return f"{number}<image>{tokens}</image>" + "\n".join([row] * rows)

    def _slices(self, image: Any) -> tuple[list[Any], Size]:
        grid = self._grid(image.size)
        whole = image.resize(self._fit(image.size, grid is None), BICUBIC)
        if grid is None:
            return [whole], (0, 0)
        columns, rows = grid
        width, height = (self._even(n, parts) for n, parts in zip(image.size, grid, strict=True))
        tile = self._fit((width / columns, height / rows), True)
        size = (tile[0] * columns, tile[1] * rows)
        large = image.resize(size, BICUBIC)
        boxes = [
            (tile[0] * x, tile[1] * y, tile[0] * (x + 1), tile[1] * (y + 1))
            for y in range(rows)
            for x in range(columns)
        ]
        return [whole, *(large.crop(box) for box in boxes)], grid

    def _grid(self, size: Size) -> Size | None:
        """Columns and rows nearest to the image's shape, of about as many slices as it is large;
        None for a small one."""
        width, height = size
        wanted = min(math.ceil(width * height / self._side**2), self._max_tiles)
        if wanted <= 1:
            return None
        counts = [n for n in (wanted - 1, wanted, wanted + 1) if n != 1 and n <= self._max_tiles]
        grids = [(x, n // x) for n in counts for x in range(1, n + 1) if n % x == 0]
        shape = math.log(width / height)
        return min(grids, key=lambda grid: abs(shape - math.log(grid[0] / grid[1])))

    def _fit(self, size: tuple[float, float], may_grow: bool) -> Size:
        """Of the same shape with ``scale_resolution`` squared pixels, in whole patches."""
        width, height = size
        if may_grow or width * height > self._side**2:
            shape = width / height
            height = int(self._side / math.sqrt(shape))
            width = int(height * shape)
        return self._even(width, self._patch), self._even(height, self._patch)

    @staticmethod
    def _even(length: float, divisor: int) -> int:
        return max(round(length / divisor) * divisor, divisor)


class DeepseekVl2Processor(CustomProcessor):
    """The whole image in a square and, of at most two images, tiles of the size that fits the
    image best; each padded with the mean."""

    image_token = placeholder = "<image>"

    def __init__(self, raw: Raw, options: Raw, folder: Path, tokenizer: Any) -> None:
        super().__init__(tokenizer, folder)
        config = {**raw, **options}
        sizes = config.get("candidate_resolutions") or [[384, 384]]
        self._sizes: list[Size] = [(int(width), int(height)) for width, height in sizes]
        self._side = self._sizes[0][0]
        self._patch = int(options.get("patch_size") or raw["vision_config"].get("patch_size") or 14)
        ratio = (raw.get("projector_config") or {}).get("downsample_ratio", 2)
        self._row = math.ceil(self._side // self._patch / int(ratio))
        self._mean = options.get("image_mean") or HALF
        self._std = options.get("image_std") or HALF

    def read(self, image: Any, num_images: int = 1) -> dict[str, NDArray[Any]]:
        """``pixel_values`` of the whole and of its tiles, ``images_spatial_crop`` columns and rows
        of these."""
        image, side = image.convert("RGB"), self._side
        size = self._best(image.size) if num_images <= 2 else (side, side)
        large = self._padded(image, size)
        boxes = [
            (x, y, x + side, y + side)
            for y in range(0, size[1], side)
            for x in range(0, size[0], side)
        ]
        tiles = [self._padded(image, (side, side)), *(large.crop(box) for box in boxes)]
        return {
            "pixel_values": np.concatenate(
                [patches_of(tile, side, self._mean, self._std) for tile in tiles]
            ),
            "images_spatial_crop": np.asarray([[size[0] // side, size[1] // side]], np.int64),
        }

    def prompt_text(self, index: int, arrays: dict[str, NDArray[Any]]) -> str:
        """The rows of the whole image and of the tiles, each with a newline, and a separator."""
        columns, rows = (int(count) for count in arrays["images_spatial_crop"][0])
        tiles = self._row * rows * (self._row * columns + 1)
        return self.placeholder * (self._row * (self._row + 1) + 1 + tiles)

    def _best(self, size: Size) -> Size:
        """The first size that keeps most pixels of the image with the least padding."""

        def worth(one: Size) -> tuple[int, int]:
            scale = min(one[0] / size[0], one[1] / size[1])
            shown = min(int(size[0] * scale) * int(size[1] * scale), size[0] * size[1])
            return shown, shown - one[0] * one[1]

        return max(self._sizes, key=worth)

    def _padded(self, image: Any, size: Size) -> Any:
        from PIL import ImageOps  # noqa: PLC0415  (an extra)

        color = tuple(int(share * 255) for share in self._mean)
        return ImageOps.pad(image, size, method=BICUBIC, color=color)


class VilaProcessor(CustomProcessor):
    """A prompt's only image in up to twelve tiles and as a whole, several each as a whole. Behind
    a tile's placeholders stands a newline."""

    image_token = placeholder = "<image>"

    def __init__(self, raw: Raw, options: Raw, folder: Path, tokenizer: Any) -> None:
        token = tokenizer.convert_ids_to_tokens(int(raw.get("image_token_id", -1)))
        self.image_token = self.placeholder = token or "<image>"
        super().__init__(tokenizer, folder)
        vision = raw["vision_config"]
        size = options.get("size") or {}
        self._side = int(size.get("height") or vision.get("image_size") or 448)
        per_side = self._side // int(vision.get("patch_size") or 14)
        self._count = math.ceil(per_side / spatial_merge_size(raw)) ** 2
        self._max_tiles = int(options.get("max_tiles") or 12)
        self._mean = options.get("image_mean") or HALF
        self._std = options.get("image_std") or HALF
        self._newline = int(tokenizer("\n", add_special_tokens=False)["input_ids"][0])

    def __call__(
        self,
        text: list[str],
        images: Sequence[Any] | None = None,
        add_special_tokens: bool = True,
        **ignored: Any,
    ) -> dict[str, NDArray[Any]]:
        """The last of each tile's placeholders becomes a newline."""
        outputs = super().__call__(text, images, add_special_tokens, **ignored)
        places = np.flatnonzero(outputs["input_ids"][0] == self.image_token_id)
        outputs["input_ids"][0, places[self._count :: self._count + 1]] = self._newline
        outputs.pop("is_only", None)
        return outputs

    def read(self, image: Any, num_images: int = 1) -> dict[str, NDArray[Any]]:
        """``pixel_values`` of the tiles; ``is_only``: whether there is no other image."""
        image, side = image.convert("RGB"), self._side
        square = image.resize((side, side), BICUBIC)
        tiles = best_tiles(image, side, self._max_tiles) if num_images == 1 else []
        parts = [*tiles, square] if len(tiles) != 1 else tiles
        cut = [patches_of(one, side, self._mean, self._std) for one in parts]
        return {"pixel_values": np.concatenate(cut), "is_only": np.asarray([num_images == 1])}

    def prompt_text(self, index: int, arrays: dict[str, NDArray[Any]]) -> str:
        """A tile's placeholders and its newline; an only image has one newline more."""
        tile = self.placeholder * (self._count + 1)
        return (tile + "\n" * bool(arrays["is_only"][0])) * len(arrays["pixel_values"])


class Phi3Processor(CustomProcessor):
    """Tiles of an image that keeps its shape, between white margins. Each part of the text is
    tokenized alone; its images may be numbered."""

    image_token = placeholder = "<|image|>"

    def __init__(self, raw: Raw, options: Raw, folder: Path, tokenizer: Any) -> None:
        super().__init__(tokenizer, folder)
        encoder = encoder_sizes(raw)
        self._side = int(encoder["image_size"])
        self._row = self._side // int(encoder["patch_size"])
        self._max_tiles = int(options.get("num_crops") or 1)
        self._mean = options.get("image_mean") or CLIP_MEAN
        self._std = options.get("image_std") or CLIP_STD

    def __call__(
        self,
        text: list[str],
        images: Sequence[Any] | None = None,
        add_special_tokens: bool = True,
        **ignored: Any,
    ) -> dict[str, NDArray[Any]]:
        """ValueError where text and images do not fit, and for numbers in another order."""
        split = _NUMBERED.split(text[0])
        parts, numbers = split[::2], split[1::2]
        if any(number not in (None, str(at)) for at, number in enumerate(numbers, 1)):
            raise ValueError(f"images are numbered {', '.join(map(str, numbers))}, not from 1 on")
        check_parts(parts, len(images or ()), "images")
        read = [self.read(image) for image in images or ()]
        ids: list[int] = []
        counts = [*map(self._count, read), 0]
        for part, count in zip(parts, counts, strict=True):
            ids += self.tokenizer(part, add_special_tokens=add_special_tokens)["input_ids"]
            ids += [int(self.image_token_id or 0)] * count
        made = {"input_ids": np.asarray([ids], np.int64)}
        return made | joined(read)

    def read(self, image: Any, num_images: int = 1) -> dict[str, NDArray[Any]]:
        """``pixel_values`` of the tiles, ``image_tiles`` rows and columns of them."""
        image = image.convert("RGB")
        is_high = image.width < image.height
        large = self._padded(image.transpose(_TRANSPOSED) if is_high else image)
        large = large.transpose(_TRANSPOSED) if is_high else large
        grid = [large.height // self._side, large.width // self._side]
        tiles = patches_of(large, self._side, self._mean, self._std)
        return {"pixel_values": tiles, "image_tiles": np.asarray([grid], np.int64)}

    def _count(self, arrays: dict[str, NDArray[Any]]) -> int:
        """Placeholders of an image: squares of four patches, row ends and a separator."""
        half = self._row // 2
        rows, columns = (int(one) * half for one in arrays["image_tiles"][0])
        return rows * (columns + 1) + 1 + half * (half + 1)

    def _padded(self, image: Any) -> Any:
        """A wide image as large as the tiles allow, in the middle of whole rows of tiles."""
        from PIL import Image  # noqa: PLC0415  (an extra)

        ratio, scale = image.width / image.height, 1
        while (scale + 1) * math.ceil((scale + 1) / ratio) <= self._max_tiles:
            scale += 1
        width = scale * self._side
        height = int(width / ratio)
        large = image.resize((width, height), BILINEAR)
        margin = -height % self._side
        padded = Image.new("RGB", (width, height + margin), "white")
        padded.paste(large, (0, margin // 2))
        return padded


class NemotronProcessor(CustomProcessor):
    """Up to twelve tiles of an image, then the whole image, as patches."""

    def __init__(self, raw: Raw, options: Raw, folder: Path, tokenizer: Any) -> None:
        self.image_token = self.placeholder = str(raw.get("img_context_token") or "<image>")
        super().__init__(tokenizer, folder)
        vision = raw["vision_config"]
        self._side = int(vision.get("image_size") or raw.get("force_image_size") or 512)
        self._patch = int(vision.get("patch_size") or raw.get("patch_size") or 16)
        self._count = int(self._side // self._patch * raw.get("downsample_ratio", 0.5)) ** 2
        self._max_tiles = int(options.get("max_num_tiles") or 12)
        self._has_whole = bool(raw.get("use_thumbnail", True))
        self._mean = raw.get("norm_mean") or _IMAGENET_MEAN
        self._std = raw.get("norm_std") or _IMAGENET_STD
        self._ends = tuple(
            str(raw.get(f"img_{one}_token") or default)
            for one, default in (("start", "<img>"), ("end", "</img>"))
        )

    def read(self, image: Any, num_images: int = 1) -> dict[str, NDArray[Any]]:
        """``pixel_values`` of the tiles' patches, ``image_grid_hw`` rows and columns of each."""
        image, side = image.convert("RGB"), self._side
        tiles = best_tiles(image, side, self._max_tiles)
        if self._has_whole and len(tiles) != 1:
            tiles.append(image.resize((side, side), BICUBIC))
        cut = [patches_of(one, self._patch, self._mean, self._std) for one in tiles]
        grids = np.full((len(tiles), 2), side // self._patch, np.int64)
        return {"pixel_values": np.concatenate(cut).reshape(-1, cut[0][0].size), _GRID_HW: grids}

    def prompt_text(self, index: int, arrays: dict[str, NDArray[Any]]) -> str:
        """The placeholders of all tiles between two marks."""
        return (self.placeholder * (self._count * len(arrays[_GRID_HW]))).join(self._ends)


PROCESSORS: dict[str, Callable[[Raw, Raw, Path, Any], CustomProcessor]] = {
    "minicpm": MiniCpmProcessor,
    "molmo": MolmoProcessor,
    "kimi": KimiProcessor,
    "locate_anything": LocateAnythingProcessor,
    "deepseek": DeepseekVl2Processor,
    "vila": VilaProcessor,
    "nemotron": NemotronProcessor,
    "moondream": MoondreamProcessor,
    "ovis": OvisProcessor,
    "ovis_tiles": OvisTilesProcessor,
    "phi3": Phi3Processor,
    "glm4v": Glm4vProcessor,
    "h2o": H2oProcessor,
    "nvlm": NvlmProcessor,
    "mantis": MantisProcessor,
    "tarsier": TarsierProcessor,
}


def load_custom_processor(raw: Raw, folder: Path, transformers: Any) -> CustomProcessor | None:
    """The processor of a checkpoint if it is one of these. CheckpointError for a tokenizer without
    the placeholder and for options that make no sense."""
    row = row_of(raw)
    if row is None or row.custom not in PROCESSORS:
        return None
    options: dict[str, Any] = {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        options |= object_or_empty(folder / name)
    try:
        tokenizer = _tokenizer(folder, transformers)
        return PROCESSORS[row.custom](raw, options, folder, tokenizer)
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise CheckpointError(f"{folder}: its processor cannot be made: {error}") from error


def _tokenizer(folder: Path, transformers: Any) -> Any:
    """Of tokenizer.json where there is one: classes in the checkpoint folder are not run."""
    if (folder / "tokenizer.json").exists():
        return transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
