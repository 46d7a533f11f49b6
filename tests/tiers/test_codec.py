"""Payloads of every kind of pool come back bit for bit, and hostile blobs do not."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from radixlm.tiers import codec as codec_module
from radixlm.tiers.codec import RAW, Codec, byte_planes

from .faulty_files import payload

RNG = np.random.default_rng(0)
KINDS = {
    "bf16": payload(0, 1 << 19),
    "fp16": RNG.standard_normal(1 << 15).astype(np.float16).view(np.uint8),
    "fp32 states": RNG.standard_normal(1 << 17).astype(np.float32).view(np.uint8),
    "int8 rows and scales": np.concatenate(
        [
            (RNG.standard_normal(1 << 14) * 20).astype(np.int8).view(np.uint8),
            RNG.standard_normal(128).astype(np.float32).view(np.uint8),
        ]
    ),
    "zeros": np.zeros(4096, np.uint8),
    "noise": RNG.integers(0, 256, 4096, np.uint8),
    "odd length": payload(1, 4096)[:4095].copy(),
    "short": np.arange(3, dtype=np.uint8),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_payload_comes_back(kind: str) -> None:
    codec, data = Codec(), KINDS[kind]
    for _ in range(2):  # with a sample, and without
        flags, blob = codec.encode(data)
        out = np.full_like(data, 7)
        assert codec.decode(flags, blob, out) and np.array_equal(out, data)
        assert len(blob) <= len(data)


def test_numbers_are_smaller_as_planes() -> None:
    pytest.importorskip("zstandard")
    flags, blob = Codec().encode(KINDS["bf16"])
    assert flags == 2 and len(blob) < 0.75 * len(KINDS["bf16"])
    assert Codec().encode(KINDS["fp32 states"])[0] in (2, 3)
    assert Codec().encode(KINDS["noise"])[0] == RAW


def test_without_the_library_payloads_stay_raw(monkeypatch: pytest.MonkeyPatch) -> None:
    flags, blob = Codec().encode(KINDS["bf16"])
    monkeypatch.setattr(codec_module, "zstandard", None)
    assert Codec().encode(KINDS["bf16"])[0] == RAW
    if flags != RAW:  # written by a server that has it
        assert not Codec().decode(flags, blob, np.zeros(1 << 19, np.uint8))


def test_hostile_blobs_are_refused() -> None:
    zstandard = pytest.importorskip("zstandard")
    codec, out = Codec(), np.zeros(4096, np.uint8)
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    without_size = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(4096))
    for flags in (0, 1, 2, 3, 9):
        for blob in (b"", b"garbage" * 9, bomb, without_size):
            assert not codec.decode(flags, blob, out)


@pytest.mark.parametrize("width", [2, 4])
def test_planes_of_the_kernel_are_those_of_numpy(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("radixlm.kernels.cpu.extension").native()
    data = RNG.integers(0, 256, 4096 + width, np.uint8)
    native, plain, back = (np.empty_like(data) for _ in range(3))
    byte_planes(data, width, native, joins=False)
    byte_planes(native, width, back, joins=True)
    monkeypatch.delitem(sys.modules, "radixlm._cpu")
    byte_planes(data, width, plain, joins=False)
    assert np.array_equal(native, plain) and np.array_equal(back, data)
