"""A rolling restart of real servers behind a gateway: every stream says what it would have said."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "bench" / "router_rolling.py"


@pytest.mark.parametrize("num_workers, num_streams", [(2, 12), (4, 256)])
@pytest.mark.slow
def test_a_rolling_restart_under_load_changes_no_stream(num_workers: int, num_streams: int) -> None:
    command = [sys.executable, str(PROGRAM), "--workers", str(num_workers), "--tokens", "60"]
    command += ["--streams", str(num_streams), "--limit-s", "240"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = re.search(r"'identical': (\d+)", done.stdout)
    assert found and int(found[1]) >= num_streams
    assert len(re.findall(r"[1-9]\d* streams moved", done.stdout)) == num_workers
