"""Frames: what is packed comes back; any other byte, length, key or writer is a miss."""

import numpy as np
import pytest

from radixlm.tiers.frame import HEADER_BYTES, Framer

KEY, OTHER = bytes(range(32)), bytes(32)
PAYLOAD = np.random.default_rng(0).integers(0, 256, 500, np.uint8)


def _read(framer: Framer, frame: bytes, key: bytes = KEY, length: int = 500) -> str:
    out = np.zeros(length, np.uint8)
    fault = framer.unpack(frame, key, out)
    assert bool(fault) != np.array_equal(out, PAYLOAD[:length])
    return fault


@pytest.mark.parametrize("secret", [b"", b"secret"])
def test_a_frame_comes_back_and_no_other_byte_passes(secret: bytes) -> None:
    framer = Framer(b"model", secret)
    frame = framer.pack(KEY, PAYLOAD, parent=OTHER)
    assert len(frame) == Framer.max_bytes(500)
    assert _read(framer, frame) == ""
    for position in range(len(frame)):
        bad = bytearray(frame)
        bad[position] ^= 1 << position % 8
        assert _read(framer, bytes(bad))
    for length in range(0, len(frame), 7):
        assert _read(framer, frame[:length]) == "short"


def test_a_frame_of_another_page_model_or_length_is_foreign() -> None:
    framer = Framer(b"model")
    frame = framer.pack(KEY, PAYLOAD)
    assert _read(framer, frame, OTHER) == "foreign"
    assert _read(Framer(b"model, older weights"), frame) == "foreign"
    assert _read(framer, frame, length=499) == "foreign"


def test_only_who_has_the_secret_can_write() -> None:
    forged = [Framer(b"model", secret).pack(KEY, PAYLOAD) for secret in (b"", b"guess")]
    assert [_read(Framer(b"model", b"secret"), frame) for frame in forged] == ["damaged"] * 2
    signed = Framer(b"model", b"secret").pack(KEY, PAYLOAD)
    assert _read(Framer(b"model"), signed) == "damaged"


class _Zeros:
    """Keeps runs of zeros as their length; a hostile length must not be expanded."""

    def encode(self, payload: np.ndarray) -> tuple[int, bytes]:
        return (0, b"") if payload.any() else (3, len(payload).to_bytes(8, "little"))

    def decode(self, flags: int, data: memoryview, out: np.ndarray) -> bool:
        out[:] = 0
        return flags == 3 and int.from_bytes(data, "little") == len(out)


def test_a_codec_is_used_where_it_gains_and_checked_when_read() -> None:
    framer, zeros, out = Framer(b"", b"", _Zeros()), np.zeros(500, np.uint8), np.ones(500, np.uint8)
    frame = framer.pack(KEY, zeros)
    assert len(frame) == HEADER_BYTES + 8
    assert framer.unpack(frame, KEY, out) == "" and not out.any()
    assert Framer(b"").unpack(frame, KEY, out) == "damaged"  # a reader without the codec
    assert _read(framer, framer.pack(KEY, PAYLOAD)) == ""
