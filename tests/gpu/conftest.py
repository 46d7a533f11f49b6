"""Tests that need an NVIDIA GPU. Without one they are skipped.

TRITON_INTERPRET=0 python -m pytest tests/gpu -m gpu
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent


def _reason() -> str:
    if not torch.cuda.is_available():
        return "no NVIDIA GPU"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "kernels are interpreted: set TRITON_INTERPRET=0"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _reason()
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
