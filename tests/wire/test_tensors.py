"""The layout of safetensors files without torch, against the format's own library."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from radixlm.weights.safetensors_file import DTYPES
from radixlm.wire.tensors import (
    CODES,
    ITEM_BYTES,
    TensorInfo,
    dtype_code,
    make_header,
    read_header,
    split_bucket,
    tensor_info,
)


def test_a_file_of_ours_is_read_by_the_library_and_back(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        "b": torch.ones(4, dtype=torch.uint8),
        "empty": torch.empty(0, 7),
        "scalar": torch.tensor(2.5),
    }
    infos = [tensor_info(name, one.dtype, list(one.shape)) for name, one in tensors.items()]
    data = b"".join(_raw(one) for one in tensors.values())
    ours = tmp_path / "ours.safetensors"
    ours.write_bytes(make_header(infos) + data)
    found = load_file(ours)
    assert all(torch.equal(found[name], one) for name, one in tensors.items())

    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"k": "v"})
    entries, metadata = read_header(tmp_path / "theirs.safetensors")
    whole = (tmp_path / "theirs.safetensors").read_bytes()
    assert metadata == {"k": "v"}
    for name, one in tensors.items():
        entry = entries[name]
        assert entry.shape == tuple(one.shape)
        assert whole[entry.start : entry.start + entry.num_bytes] == _raw(one)


def test_codes_are_those_of_the_loader() -> None:
    assert set(ITEM_BYTES) == set(DTYPES) == set(CODES.values())
    for code, dtype in DTYPES.items():
        assert ITEM_BYTES[code] == dtype.itemsize
        assert dtype_code(dtype) == dtype_code(code) == code


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "says"),
    [
        ("a", "float4", [1], "a: the dtype 'float4' is none of"),
        ("a", "float32", [-1], "no shape"),
        ("a", "float32", [True], "no shape"),
        ("a", "float32", "22", "no shape"),
        ("", "float32", [1], "no name"),
        (None, "float32", [1], "no name"),
        ("__metadata__", "float32", [1], "no name"),
    ],
)
def test_bad_descriptions_are_refused(name: Any, dtype: Any, shape: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        tensor_info(name, dtype, shape)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "truncated"),
        (struct.pack("<Q", 1 << 60) + b"{}", "truncated"),
        (struct.pack("<Q", 2) + b"[]", "no JSON object"),
        (struct.pack("<Q", 2) + b"{!", "no JSON"),
        (struct.pack("<Q", 8) + b'{"a": 1}', "malformed entry of 'a'"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ValueError, match=says):
        read_header(tmp_path / "x")


def test_a_truncated_file_names_the_tensor(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(9)}, tmp_path / "x")
    whole = (tmp_path / "x").read_bytes()
    (tmp_path / "x").write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=f"a ends at byte {len(whole)} of {len(whole) - 1}"):
        read_header(tmp_path / "x")


def test_two_tensors_of_one_name_are_no_file() -> None:
    with pytest.raises(ValueError, match="two tensors are called a"):
        make_header([TensorInfo("a", "U8", (1,))] * 2)


def test_a_bucket_of_bytes_or_of_one_dtype_is_split() -> None:
    places = [_place("b", [3], "bfloat16", 8, 14), _place("a", [2], "torch.float32", 0, 8)]
    a, b = split_bucket(TensorInfo("flat", "U8", (14,), 100), places)
    assert (a.name, a.start, b.name, b.start, b.dtype) == ("a", 100, "b", 108, "BF16")
    (one,) = split_bucket(TensorInfo("flat", "F32", (4,)), [_place("a", [2, 2], "float32", 0, 4)])
    assert one.shape == (2, 2)


@pytest.mark.parametrize(
    ("places", "says"),
    [
        ([], "give a list"),
        ([{"name": "a"}], "needs a start_idx"),
        ([("a", [2], "float32", 0, 7)], "elements 0 to 7"),
        ([("a", [1], "float32", 4, 8)], "elements 4 to 8"),
        ([("a", [1], "float32", 0, 4)], "the bucket has 8 bytes, its tensors 4"),
        ([("a", [4], "bfloat16", 0, 4)], "flatten views of uint8"),
    ],
)
def test_other_buckets_are_refused(places: Any, says: str) -> None:
    given = [_place(*one) if isinstance(one, tuple) else one for one in places]
    with pytest.raises(ValueError, match=says):
        split_bucket(TensorInfo("flat", "U8", (8,)), given)


def _place(name: str, shape: list[int], dtype: str, start: int, end: int) -> dict[str, Any]:
    return {"name": name, "shape": shape, "dtype": dtype, "start_idx": start, "end_idx": end}


def _raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
