"""Images of every kind that clients send, and bytes that are not an image."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.base.errors import InvalidRequest
from radixlm.multimodal.image import open_image

Image = pytest.importorskip("PIL.Image")

NOISE = np.random.default_rng(0).integers(0, 255, (12, 20, 3), np.uint8)


def file_of(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def noise(mode: str = "RGB") -> Any:
    return Image.fromarray(NOISE).convert(mode)


def pixels(data: bytes) -> np.ndarray[Any, Any]:
    image = open_image(data, "there")
    assert image.mode == "RGB"
    return np.asarray(image)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L", "LA", "1"])
def test_colours_are_those_of_the_file(mode: str) -> None:
    image = noise(mode)
    assert (pixels(file_of(image)) == np.asarray(image.convert("RGB"))).all()


def test_a_palette_with_transparency() -> None:
    image = noise("P")
    image.info["transparency"] = bytes(range(256))
    assert (pixels(file_of(image)) == np.asarray(noise("P").convert("RGB"))).all()


def test_cmyk_becomes_rgb() -> None:
    image = noise("CMYK")
    got = pixels(file_of(image, "JPEG", quality=95)).astype(int)
    assert abs(got - np.asarray(image.convert("RGB"))).mean() < 12


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_keep_their_shades(kind: str) -> None:
    shades = (np.arange(240, dtype=np.uint16) * 273).reshape(12, 20)
    got = pixels(file_of(Image.fromarray(shades), kind))
    assert (abs(got[..., 0].astype(int) - shades / 257) <= 1).all()


def test_an_animation_gives_its_first_frame() -> None:
    frames = [noise("L"), noise("L").point(lambda v: 255 - v)]
    video = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert (pixels(video) == np.asarray(frames[0].convert("RGB"))).all()


def test_exif_rotation_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was rotated by 90 degrees
    got = open_image(file_of(noise(), "JPEG", exif=exif), "there")
    assert got.size == (12, 20)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (5, 1), (7, 3), (1, 5)])
def test_small_images_are_not_mistaken_for_channels(width: int, height: int) -> None:
    image = noise().crop((0, 0, width, height))
    got = open_image(file_of(image), "there")
    assert got.height not in (1, 3)
    assert got.getpixel((0, 0)) == image.getpixel((0, 0))


def header(width: int, height: int) -> bytes:
    """A PNG header with a large size and no data."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    return b"\x89PNG\r\n\x1a\n" + chunk


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\0", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"<!DOCTYPE html><html>",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"%PDF-1.4", file_of(noise())[:90],
        file_of(noise())[:-90], file_of(noise(), "JPEG")[:200], header(20_000, 20_000),
        header(10_000, 10_000), header(8, 8), b"GIF89a", b"RIFF\0\0\0\0WEBPVP8 ",
    ],
)  # fmt: skip
def test_unreadable_images_are_named(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"^there"):
        open_image(data, "there")


FILES = tuple(file_of(noise(), kind) for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"))


@settings(max_examples=100, derandomize=True, deadline=None)
@given(
    st.sampled_from(FILES),
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), min_size=1, max_size=8),
    st.integers(0, 300),
)
@pytest.mark.filterwarnings("ignore")  # Pillow's warnings about the file
def test_broken_files_are_images_or_refused(
    data: bytes, changes: list[tuple[int, int]], cut: int
) -> None:
    broken = bytearray(data[: len(data) - cut])
    for place, value in changes:
        broken[place % len(broken)] = value
    try:
        assert open_image(bytes(broken), "there").mode == "RGB"
    except InvalidRequest as error:
        assert error.param == "there"
