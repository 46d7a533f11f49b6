"""The processor of Moondream 2 and 3: the image as a whole and in overlapping crops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixlm.arch.media.config_json import Raw
from radixlm.arch.media.layouts.moondream import sizes_of
from radixlm.multimodal.custom_processor import HALF, CustomProcessor, joined, patches_of
from radixlm.multimodal.placeholders import check_parts

_LANCZOS = 1  # as Pillow counts


class MoondreamProcessor(CustomProcessor):
    """A start token, the image in a fixed number of placeholders, then the text. The placeholder is
    the token of a coordinate, which texts do not have."""

    image_token, placeholder = "<image>", "<|md_reserved_4|>"

    def __init__(self, raw: Raw, options: Raw, folder: Path, tokenizer: Any) -> None:
        super().__init__(tokenizer, folder)
        sizes = sizes_of(raw)
        self._side, self._patch = sizes["crop_size"], sizes["enc_patch_size"]
        self._max_crops, self._margin = sizes["max_crops"], sizes["overlap_margin"]
        tokens = (raw.get("config") or {}).get("tokenizer") or {}
        self._start = int(tokens.get("bos_id", 0))

    def __call__(
        self,
        text: list[str],
        images: Sequence[Any] | None = None,
        add_special_tokens: bool = True,
        **ignored: Any,
    ) -> dict[str, NDArray[Any]]:
        """The text may begin with the start token. ValueError where text and images do not fit."""
        start = self.tokenizer.convert_ids_to_tokens(self._start)
        parts = text[0].removeprefix(start).split(self.image_token)
        check_parts(parts, len(images or ()), "images")
        read = [self.read(image) for image in images or ()]
        places = [int(self.image_token_id or 0)] * (self._side // self._patch) ** 2 * len(read)
        words = self.tokenizer("".join(parts), add_special_tokens=False)["input_ids"]
        return {"input_ids": np.asarray([[self._start, *places, *words]], np.int64)} | joined(read)

    def read(self, image: Any, num_images: int = 1) -> dict[str, NDArray[Any]]:
        """``pixel_values`` float32 [crops, patches, numbers of one], ``image_tiles`` rows and
        columns of the crops behind the first one, which is the whole."""
        image, side, margin = image.convert("RGB"), self._side, 2 * self._margin * self._patch
        unit = side - margin
        rows, columns = self._grid(image.height - margin, image.width - margin)
        large = image.resize((columns * unit + margin, rows * unit + margin), _LANCZOS)
        corners = [(unit * x, unit * y) for y in range(rows) for x in range(columns)]
        crops = [
            image.resize((side, side), _LANCZOS),
            *(large.crop((x, y, x + side, y + side)) for x, y in corners),
        ]
        cut = [patches_of(one, self._patch, HALF, HALF).reshape(-1, 3 * self._patch**2)
               for one in crops]  # fmt: skip
        return {
            "pixel_values": np.stack(cut),
            "image_tiles": np.asarray([[rows, columns]], np.int64),
        }

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of at most ``max_crops``: at least as many as the image is large, and
        more of about its shape."""
        unit, most = self._side - 2 * self._margin * self._patch, self._max_crops
        if height <= unit or width <= unit:
            return 1, 1
        rows, columns = math.ceil(height / unit), math.ceil(width / unit)
        if rows * columns > most:
            shrink = math.sqrt(most / (rows * columns))
            return max(1, math.floor(rows * shrink)), max(1, math.floor(columns * shrink))
        rows = max(math.floor(math.sqrt(most * height / width)), rows)
        columns = max(math.floor(math.sqrt(most * width / height)), columns)
        if rows * columns > most and columns > rows:
            columns = most // rows
        elif rows * columns > most:
            rows = most // columns
        return max(1, rows), max(1, columns)
