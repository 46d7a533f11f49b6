"""A test that breaks the GPU does not fail other tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("xdist")

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest, torch

broken = []

def synchronize():
    if broken:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, synchronize

@pytest.mark.parametrize("number", range(12))
def test_one(number):
    if number in (1, 6):
        broken.append(number)
    assert not broken
"""


def test_other_tests_still_run(tmp_path: Path) -> None:
    (tmp_path / "test_numbers.py").write_text(TESTS)
    plugins = ["-p", "xdist.plugin", "-p", "tests.gpu.device_failures"]
    command = [sys.executable, "-m", "pytest", *plugins, "-n", "1", "-c", os.devnull]
    environment = {
        "PYTHONPATH": f"{ROOT}/src{os.pathsep}{ROOT}",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # three processes import them
    }
    run = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "-rf", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
        timeout=200,
    )
    assert "10 passed" in run.stdout, run.stdout[-3000:]
    failed = {line.split()[1] for line in run.stdout.splitlines() if line.startswith("FAILED")}
    assert {name.rpartition("[")[2] for name in failed} == {"1]", "6]"}
