"""Audio decoding: reading of files, and resampling."""

from __future__ import annotations

import io
import struct
import wave
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.base.errors import InvalidRequest
from radixlm.multimodal import audio as audio_files
from radixlm.multimodal.audio import BLOCK_S, MAX_SECONDS, cut, read_audio, resample

RATE = 8000
TONE = np.sin(np.arange(RATE) * 2 * np.pi * 440 / RATE) * 0.5


def wav(samples: np.ndarray[Any, Any], width: int = 2, rate: int = RATE) -> bytes:
    """[samples] or [samples, channels] in -1..1, as integers of `width` bytes."""
    wide = np.round(samples * (2 ** (8 * width - 1) - 1)).astype("<i4")
    raw = wide.reshape(*wide.shape, 1).view(np.uint8)[..., :width]
    if width == 1:
        raw = raw + np.uint8(128)
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(raw.tobytes())
    return data.getvalue()


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_every_width_of_integers_is_read(width: int) -> None:
    found = read_audio(wav(TONE, width), RATE, "here")
    assert found.dtype == np.float32 and found.shape == TONE.shape
    assert np.abs(found - TONE).max() < 2.0 ** (2 - 8 * width) + 1e-6


def test_channels_are_mixed() -> None:
    stereo = np.stack((TONE, -TONE / 2), 1)
    assert np.abs(read_audio(wav(stereo), RATE, "here") - TONE / 4).max() < 1e-3


@pytest.mark.parametrize("wanted", [4000, 8000, 16000, 22050])
def test_resampling_keeps_a_tone(wanted: int) -> None:
    found = read_audio(wav(TONE), wanted, "here")
    inside = slice(wanted // 10, -wanted // 10)  # a cut tone has artefacts at its ends
    expected = np.sin(np.arange(wanted) * 2 * np.pi * 440 / wanted) * 0.5
    assert found.shape == expected.shape
    assert np.abs(found - expected)[inside].max() < 0.01


@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.integers(1, 400), st.integers(1000, 48000), st.integers(1000, 48000))
def test_resampling_keeps_level_and_length(count: int, rate: int, wanted: int) -> None:
    found = resample(np.full(count, 0.25, np.float32), rate, wanted)
    assert len(found) == round(count * wanted / rate)
    assert np.allclose(found, 0.25, atol=1e-4)


@pytest.mark.parametrize(("rate", "wanted"), [(1000, 1600), (1600, 1000), (1103, 800)])
def test_long_audio_is_resampled_equally_in_blocks(rate: int, wanted: int) -> None:
    count = int(2.3 * BLOCK_S * rate)
    at = np.arange(count) / rate
    audio = (np.sin(at * 300) * np.cos(at * 7)).astype(np.float32)
    found = resample(audio, rate, wanted)
    assert found.shape == (round(count * wanted / rate),) and found.dtype == np.float32
    at = np.arange(len(found)) / wanted
    expected = np.sin(at * 300) * np.cos(at * 7)
    assert np.abs(found - expected)[50:-50].max() < 2e-3


@pytest.mark.parametrize("longest_s", [0.5, 1.0])
def test_audio_is_cut_at_quiet_places(longest_s: float) -> None:
    rng = np.random.default_rng(3)
    audio = rng.normal(0, 0.3, 5 * RATE).astype(np.float32)
    for second in np.arange(0.45, 5, 0.45):
        audio[int((second - 0.03) * RATE) : int((second + 0.03) * RATE)] *= 0.01
    pieces = cut(audio, RATE, longest_s)
    assert np.array_equal(np.concatenate([one for _, one in pieces]), audio)
    assert max(len(one) for _, one in pieces) <= longest_s * RATE
    began = [began_s for began_s, _ in pieces]
    assert began[0] == 0 and len(began) > 4
    if longest_s == 0.5:  # the end of each window has a quiet place
        assert all(abs(b / 0.45 - round(b / 0.45)) < 0.07 for b in began)


def test_unreadable_audio_is_refused_by_name() -> None:
    good = wav(TONE)
    long = bytearray(wav(TONE))
    struct.pack_into("<I", long, 24, 1)  # one sample a second: hours
    too_fast = bytearray(good)
    struct.pack_into("<I", too_fast, 24, 0)
    for data in (
        b"", b"RIFF", b"no audio at all", good[:30], wav(TONE[:10]), wav(TONE[:0]), bytes(long),
        bytes(too_fast), good[:20] + b"\x55" + good[21:],
    ):  # fmt: skip
        with pytest.raises(InvalidRequest, match=r"^here"):
            read_audio(data, RATE, "here")
    assert len(TONE) > MAX_SECONDS


class Blocks:
    """A file of soundfile, of so many equal samples."""

    samplerate, channels = 8000, 2

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __enter__(self) -> Blocks:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def blocks(self, size: int, dtype: str, always_2d: bool) -> Iterator[np.ndarray]:
        assert always_2d
        for first in range(0, self._count - 10, size):  # less than the header says
            row = np.array([[0.25, 0.75]], dtype)
            yield row.repeat(min(size, self._count - 10 - first), 0)


def test_files_of_other_formats_are_mixed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Blocks(8000)
    library = SimpleNamespace(SoundFile=lambda file: made, SoundFileError=OSError)
    monkeypatch.setattr(audio_files, "extra", lambda *_: library)
    found = read_audio(b"fLaC", 8000, "here")
    assert len(found) == 7990 and (found == 0.5).all()
    monkeypatch.setattr(audio_files, "MAX_SAMPLES", 7999)
    with pytest.raises(InvalidRequest, match="here has 8000 samples of 2 channels"):
        read_audio(b"fLaC", 8000, "here")


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.data())
def test_a_damaged_file_is_read_or_refused(data: st.DataObject) -> None:
    raw = bytearray(wav(TONE[:2000]))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, 60))] = data.draw(st.integers(0, 255))
    try:
        found = read_audio(bytes(raw), RATE, "here")
    except InvalidRequest:
        return
    assert found.dtype == np.float32 and np.isfinite(found).all()
