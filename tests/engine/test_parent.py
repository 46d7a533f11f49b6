"""An engine process ends with the process that started it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

CHILD = (
    "from radixlm.engine.startup import die_with_parent as d; d(); print(0, flush=True); input()"
)
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdin=sys.stdin, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
@pytest.mark.parametrize("how", ["kill", "terminate"])
def test_a_child_ends_with_its_parent_however_early(how: str) -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        getattr(parent, how)()  # its standard input, shared with this process, stays open
        assert psutil.wait_procs([child], timeout=30)[1] == []


def test_an_engine_without_standard_output_ends_in_order() -> None:
    """Its server was started with `>&-`, and ended before it sent a configuration."""
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "radixlm.engine.worker"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_engine_whose_server_is_gone_does_not_wait_for_torch(tmp_path: Path) -> None:
    """Its server ended before the kernel was asked to tell of that."""
    (tmp_path / "torch.py").write_text("import threading\nthreading.Event().wait()\n")
    command = [sys.executable, "-m", "radixlm.engine.worker"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, env=environment, timeout=60)
    assert done.returncode == 0
