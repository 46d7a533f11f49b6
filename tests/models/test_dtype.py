"""--dtype: what is stored and what is computed in."""

from __future__ import annotations

import pytest
import torch

from radixlm.base.errors import ConfigError
from radixlm.models.dtype import resolve_dtypes

BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16


@pytest.mark.parametrize(
    ("flag", "device", "expected"),
    [
        ("auto", "cpu", (FP32, None)),
        ("float", "cpu", (FP32, FP32)),
        ("half", "cpu", (FP32, FP16)),
        ("bfloat16", "cpu", (FP32, BF16)),
        ("auto", "cuda", (BF16, BF16)),
        ("float16", "cuda", (FP16, FP16)),
        ("float32", "cuda", (FP32, FP32)),
    ],
)
def test_policy(flag: str, device: str, expected: tuple[torch.dtype, torch.dtype | None]) -> None:
    assert resolve_dtypes(flag, torch.device(device), BF16) == expected


def test_unknown_name() -> None:
    with pytest.raises(ConfigError, match=r"--dtype 'int8'.*float16"):
        resolve_dtypes("int8", torch.device("cpu"))
