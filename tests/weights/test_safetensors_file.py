"""Inconsistent safetensors headers are refused at once, with the name of the file."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from radixlm.base.errors import CheckpointError
from radixlm.weights.safetensors_file import SafetensorsSource, read_header


def _file(folder: Path, header: bytes, num_data: int = 64) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(num_data))
    return path


def _entry(start: int, end: int, shape: list[Any]) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


_JSON = json.dumps(_entry(0, 16, [4])).encode()


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"[" * 200_000, "no JSON"),
        (b'{"a":' * 100_000, "no JSON"),
        (b"[]", "no JSON object"),
        (json.dumps({"a": _entry(0, 16, [True, 4])}).encode(), "malformed entry for a"),
        (json.dumps({"a": _entry(-8, 8, [4])}).encode(), "malformed entry for a"),
        (json.dumps({"a": _entry(0, 0, [0, 1 << 70])}).encode(), "malformed entry for a"),
        (json.dumps({"a": _entry(0, 0, [1 << 40, 0, 1 << 40])}).encode(), "malformed entry for a"),
        (b'{"a": %b, "a": %b}' % (_JSON, _JSON), "a is there twice"),
        (json.dumps({"a": _entry(0, 16, [5])}).encode(), "16 bytes do not make"),
        (json.dumps({"a": _entry(0, 4 << 40, [1 << 40])}).encode(), "truncated: a ends"),
        (
            json.dumps({"a": _entry(0, 16, [4]), "b": _entry(8, 24, [4])}).encode(),
            "a and b lie in the same bytes",
        ),
    ],
)
def test_an_inconsistent_header_is_named(header: bytes, reason: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"model\.safetensors.*{reason}"):
        read_header(_file(tmp_path, header))


def test_adjacent_and_empty_tensors_are_valid(tmp_path: Path) -> None:
    entries = {"a": _entry(0, 16, [4]), "none": _entry(16, 16, [0, 4]), "b": _entry(16, 32, [4])}
    found = read_header(_file(tmp_path, json.dumps(entries).encode()))
    assert [entry.shape for entry in found.values()] == [(4,), (0, 4), (4,)]


def test_floats_of_4_bits_are_bytes(tmp_path: Path) -> None:
    """Rows of an odd number of them have none."""
    stored = torch.arange(8, dtype=torch.uint8).view(2, 4)
    save_file({"a": stored.view(torch.float4_e2m1fn_x2)}, tmp_path / "a.safetensors")
    read = SafetensorsSource([tmp_path / "a.safetensors"]).read("a")
    assert read.dtype == torch.int8 and torch.equal(read.view(torch.uint8), stored)
    entry = {"a": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}
    header = json.dumps(entry).encode()
    damaged = tmp_path / "b.safetensors"
    damaged.write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    with pytest.raises(CheckpointError, match="unknown dtype 'F4'"):
        SafetensorsSource([damaged])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_8_bit_floats_of_other_makers(dtype: torch.dtype, tmp_path: Path) -> None:
    value = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    save_file({"a": value}, tmp_path / "a.safetensors")
    assert SafetensorsSource([tmp_path / "a.safetensors"]).read("a").dtype == dtype
