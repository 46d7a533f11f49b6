"""Decodes image files with Pillow."""

import io
import struct
import zlib
from typing import Any

from radixlm.base.errors import ConfigError, InvalidRequest

MAX_PIXELS = 64 << 20  # of one image: a few bytes may unpack to gigabytes
# formats that Pillow decodes itself; for others (EPS) it would run programs
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "ICO", "QOI")
# heights that processors take for a number of channels, and by how much such images are enlarged
_LIKE_CHANNELS, _ENLARGED = (1, 3), 4
# what Pillow raises for bytes that break off, lie or do not fit together
_BROKEN = (
    OSError, ValueError, SyntaxError, TypeError, KeyError, IndexError, AttributeError, EOFError,
    ArithmeticError, AssertionError, RuntimeError, MemoryError, struct.error, zlib.error,
)  # fmt: skip


def open_image(data: bytes, where: str) -> Any:
    """An upright RGB image, the first one of an animation; InvalidRequest for what is no image file
    or too large."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError  # noqa: PLC0415  (an extra)
    except ImportError:
        raise ConfigError("images need Pillow: install it") from None
    Image.init()
    formats = [name for name in FORMATS if name in Image.OPEN]
    try:
        image = Image.open(io.BytesIO(data), formats=formats)
        if image.width * image.height > MAX_PIXELS:
            raise InvalidRequest(
                f"{where} has {image.width} x {image.height} pixels, at most {MAX_PIXELS}", where
            )
        return _enlarged(_rgb(ImageOps.exif_transpose(image)))
    except UnidentifiedImageError:
        raise InvalidRequest(f"{where} is no image file that can be read", where) from None
    except (*_BROKEN, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidRequest(f"{where} cannot be read: {error}", where) from None


def _rgb(image: Any) -> Any:
    """Of any mode; Pillow would cut off what is above 255 in modes of 16 bits and more."""
    if image.mode.startswith("I;16"):
        image = image.convert("I")
    if image.mode == "I":
        image = image.point(lambda value: value * (1 / 257)).convert("L")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # as Pillow wants it; the colours are the same
    return image.convert("RGB")


def _enlarged(image: Any) -> Any:
    if image.height not in _LIKE_CHANNELS:
        return image
    return image.resize((image.width * _ENLARGED, image.height * _ENLARGED), resample=0)
