"""No kernel computes an index in 32 bits that can overflow them: see int32_overflow.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kernels.triton.gate import ENVIRONMENT, MODULES

Found = list[tuple[str, list[str]]]


def look(*arguments: str) -> Found:
    """The program's findings for each variant, in a process that compiles kernels."""
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("int32_overflow.py")), *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_a_kernel_with_an_overflow_is_found() -> None:
    (careless, (why,)), (careful, nothing) = look("--examples")
    assert "arith.muli %row, %x_stride" in why and "2.75e+11" in why
    assert (careless, careful, nothing) == ("careless_kernel", "careful_kernel", [])


def test_no_offset_passes_32_bits() -> None:
    found = look(*MODULES)
    assert len(found) > 50
    assert [one for one in found if one[1]] == []


@pytest.mark.slow
def test_no_offset_of_any_variant_passes_32_bits() -> None:
    assert [one for one in look("--all", *MODULES) if one[1]] == []
