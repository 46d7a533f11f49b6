"""Files of ``torch.save`` with one tensor: read without unpickling, anything else refused."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import numpy as np
import pytest
import torch

from radixlm.multimodal.torch_file import read_tensor

LIMIT = 1 << 20


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8],
)
def test_a_tensor_is_read_as_by_torch(dtype: torch.dtype) -> None:
    values = (torch.arange(24).reshape(4, 6) * 1.25).to(dtype)
    for one in (values, values.T, values[1:, ::2], values[:0], values.sum().to(dtype)):
        expected = one.float() if dtype == torch.bfloat16 else one
        got = read_tensor(saved(one), LIMIT)
        assert got.shape == tuple(one.shape)
        np.testing.assert_array_equal(got, expected.numpy())


class Evil:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit",)


@pytest.mark.parametrize(
    "value",
    [{"a": torch.ones(2)}, [torch.ones(2)], torch.nn.Parameter(torch.ones(2)), Evil(), 3, "text",
     torch.ones(2, 1).expand(2, 1 << 40), torch.eye(2).to_sparse()],
)  # fmt: skip
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(ValueError):
        read_tensor(saved(value), LIMIT)


def changed(name: str, data: bytes | None) -> bytes:
    """A file with one entry replaced, or left out."""
    source, target = zipfile.ZipFile(io.BytesIO(saved(torch.ones(3, 2)))), io.BytesIO()
    with zipfile.ZipFile(target, "w") as made:
        for entry in source.namelist():
            is_it = entry.endswith(name)
            if not is_it or data is not None:
                made.writestr(entry, data if is_it and data is not None else source.read(entry))
    return target.getvalue()


@pytest.mark.parametrize(
    ("name", "data"),
    [("data/0", b"\0" * 8), ("data/0", None), ("data.pkl", None), ("data.pkl", b"cos\nsystem\n."),
     ("data.pkl", b"\x80\x02."), ("data.pkl", b""), ("byteorder", b"big")],
)  # fmt: skip
def test_damaged_files_are_refused(name: str, data: bytes | None) -> None:
    with pytest.raises(ValueError):
        read_tensor(changed(name, data), LIMIT)


def test_a_file_is_bounded() -> None:
    with pytest.raises(ValueError, match="MiB"):
        read_tensor(saved(torch.zeros(1 << 19)), LIMIT)
    for raw in (b"PK", b"", b"PK\x03\x04" + b"\0" * 40):
        with pytest.raises(ValueError):
            read_tensor(raw, LIMIT)
