"""Folders of servers that were killed are removed by the next one, those of live ones are not."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from radixlm.engine.run_folder import RunFolder, remove_stale

KILLED = """
import os, signal
from radixlm.engine.run_folder import RunFolder
folder = RunFolder()
(folder.path / "flight").write_text("x")
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_only_folders_of_dead_servers_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", KILLED], env=environment, capture_output=True, text=True
    )
    dead = Path(done.stdout.strip())
    alive = RunFolder()
    foreign = tmp_path / "radixlm-notes"
    foreign.mkdir()
    (tmp_path / "radixlm-link").symlink_to(dead)
    assert dead.parent == tmp_path and (dead / "flight").exists()
    assert alive.path.stat().st_mode & 0o777 == 0o700
    assert remove_stale() == [dead]
    assert not dead.exists() and alive.path.exists() and foreign.exists()
    alive.remove()
    alive.remove()
    assert not alive.path.exists()
