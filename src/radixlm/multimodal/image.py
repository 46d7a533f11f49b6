"""A picture's bytes as Pillow's image."""

from __future__ import annotations

import io
from typing import Any

from radixlm.base.errors import ConfigError, InvalidRequest

MAX_PIXELS = 64 << 20  # of one picture: a few bytes may unpack to gigabytes


def open_picture(data: bytes, where: str) -> Any:
    """A picture in RGB, upright; InvalidRequest for what is none or too large."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError  # noqa: PLC0415  (an extra)
    except ImportError:
        raise ConfigError("pictures need Pillow: install it") from None
    try:
        image = Image.open(io.BytesIO(data))
        if image.width * image.height > MAX_PIXELS:
            raise InvalidRequest(
                f"{where} has {image.width} x {image.height} pixels, at most {MAX_PIXELS}", where
            )
        return ImageOps.exif_transpose(image).convert("RGB")
    except UnidentifiedImageError:
        raise InvalidRequest(f"{where} is no picture that can be read", where) from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InvalidRequest(f"{where} cannot be read: {error}", where) from None
