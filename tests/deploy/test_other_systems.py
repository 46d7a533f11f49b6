"""Without what Linux alone has and without the C++ kernels, as on a Mac without OpenMP: torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "other_system"


def _run(*arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(HERE), "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_a_question_is_answered() -> None:
    assert _run("-c", "import os; print(hasattr(os, 'sched_getaffinity'))") == "False"
    assert _run("-m", "radixlm", "generate", "What is 17 + 25?") == "42"
    assert "none: torch computes" in _run("-m", "radixlm", "doctor")
