"""``scripts/peers-tests``: without a folder of tests it says so; with one it runs them against a
server of this package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEST = """
import httpx, unittest
from sglang.srt.utils import kill_process_tree
from sglang.test.test_utils import (
    DEFAULT_SMALL_MODEL_NAME_FOR_TEST, DEFAULT_URL_FOR_TEST, popen_launch_server
)

class TestOne(unittest.TestCase):
    def test_one(self):
        args = ["--attention-backend", "flashinfer", "--device=cuda", "--cpu-threads", "1"]
        name = DEFAULT_SMALL_MODEL_NAME_FOR_TEST
        server = popen_launch_server(name, DEFAULT_URL_FOR_TEST, 100, other_args=args)
        self.addCleanup(kill_process_tree, server.pid)
        body = {"text": "a", "model": None, "sampling_params": {"max_new_tokens": 8}}
        got = httpx.post(DEFAULT_URL_FOR_TEST + "/generate", json=body, timeout=60)
        assert got.status_code == 200
"""


def _run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts" / "peers-tests"), *args]
    environment = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "PEERS_PORT": "21917"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


def test_without_a_folder_it_is_skipped(tmp_path: Path) -> None:
    for args in ((), (str(tmp_path / "none"),)):
        got = _run(*args)
        assert got.returncode == 0 and got.stdout.startswith("skipped: no folder")


def test_a_folder_is_run_against_our_server(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(TEST)
    got = _run(str(tmp_path))
    assert got.returncode == 0 and "1 passed" in got.stdout, got.stdout + got.stderr


def test_a_failure_is_an_exit_status(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_one():\n    assert not 1\n")
    got = _run(str(tmp_path))
    assert got.returncode == 1 and "1 failed" in got.stdout, got.stdout + got.stderr
