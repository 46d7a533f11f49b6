"""Malicious images: the refusal is in our words, without memory addresses, and comes before
gigabytes are unpacked."""

from __future__ import annotations

import io
import random
import struct
import zlib

import pytest

from radixlm.base.errors import InvalidRequest
from radixlm.multimodal.image import MAX_PIXELS, open_image

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.filterwarnings("ignore")  # Pillow warns about images that it refuses


def _png(width: int, height: int) -> bytes:
    """A PNG header that promises so many pixels, with little data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(60_000, 60_000), (MAX_PIXELS, 2), (2**31 - 1, 2**31 - 1)])
def test_a_bomb_is_refused_before_it_is_unpacked(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest, match=r"^there"):
        open_image(_png(*size), "there")


def test_spoiled_images_are_refused_in_our_words() -> None:
    rng = random.Random(3)
    good: list[bytes] = []
    for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"):
        buffer = io.BytesIO()
        Image.new("RGB", (31, 17), (9, 200, 3)).save(buffer, kind)
        good.append(buffer.getvalue())
    refused = 0
    for number in range(600):
        data = bytearray(good[number % len(good)])
        for _ in range(rng.choice((1, 3, 20))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        data = data[: rng.randrange(len(data)) + 1] if rng.random() < 0.3 else data
        try:
            open_image(bytes(data), "there")
        except InvalidRequest as error:
            refused += 1
            assert str(error).startswith("there") and "0x" not in str(error), error
    assert refused > 100
