"""Folders of servers that were killed are removed by the next one, those of live ones are not."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixlm.engine.run_folder import RunFolder, remove_stale
from radixlm.lora.registry import Spool
from radixlm.weight_updates.tensor_spool import TensorSpool

KILLED = """
import os, signal
from MODULE import KIND
folder = KIND(*ARGS)
(folder.path / "flight").write_text("x")
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("kind", "args"), [(RunFolder, ()), (TensorSpool, ()), (Spool, ({}, b"weights"))]
)
def test_only_folders_of_dead_servers_are_removed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Callable[..., RunFolder | TensorSpool | Spool],
    args: tuple[Any, ...],
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    program = KILLED.replace("KIND", kind.__name__).replace("MODULE", kind.__module__)
    program = program.replace("ARGS", repr(args))
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    dead = Path(done.stdout.strip())
    alive = kind(*args)
    remove = alive.remove if isinstance(alive, RunFolder) else alive.delete
    foreign = tmp_path / "radixlm-weights-of-mine"
    foreign.mkdir()
    (tmp_path / "radixlm-link").symlink_to(dead)
    assert dead.parent == tmp_path and (dead / "flight").exists()
    assert alive.path.stat().st_mode & 0o777 == 0o700
    assert remove_stale() == [dead]
    assert not dead.exists() and alive.path.exists() and foreign.exists()
    remove()
    remove()
    assert not alive.path.exists()


def test_a_socket_that_a_cleaner_has_deleted_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the next engine connects, after systemd-tmpfiles or `rm -rf /tmp/*`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = RunFolder()
    address, later = (f"ipc://{folder.path}/{name}" for name in ("intake0", "intake1"))
    num_open = len(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address.removeprefix("ipc://"))
        server.listen()
        for _ in range(3):
            folder.hold([address, later])
        assert folder.reachable(address) == address
        shutil.rmtree(folder.path)
        folder.hold([address, later])
        assert folder.reachable(later) == later
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(folder.reachable(address).removeprefix("ipc://"))
            server.accept()[0].close()
        Path(address.removeprefix("ipc://")).touch()
        assert folder.reachable(address) == address
        with monkeypatch.context() as other:
            other.setattr(os, "geteuid", lambda: os.getuid() + 1)  # the folder is another user's
            assert folder.reachable(address).startswith("ipc:///proc/")
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()
    assert len(os.listdir("/proc/self/fd")) == num_open - 1  # its lock
    assert not folder.path.exists()
