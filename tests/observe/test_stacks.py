"""Stacks of processes, also of one that hangs without giving the GIL back."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixlm.observe import stacks
from radixlm.observe.stacks import collect_stacks, offer_stacks

CODE = """
import ctypes, sys, threading
from pathlib import Path
from radixlm.observe.stacks import offer_stacks

def waits_in_a_thread():
    threading.Event().wait()

def hangs_with_the_gil():
    print(flush=True)
    ctypes.PyDLL(None).pause()  # keeps the GIL

offer_stacks(Path(sys.argv[1]), "child")
threading.Thread(target=waits_in_a_thread, daemon=True).start()
while True:
    hangs_with_the_gil()
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            yield process
        finally:
            process.kill()


def test_a_process_that_hangs_shows_its_stacks(
    child: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    gc.collect()  # threads of pools that tests before have left: a hundred are shown at most
    for _ in range(2):
        own, other = collect_stacks([tmp_path]).split(f"== child, pid {child.pid} ==")
        assert f"pid {os.getpid()}" in own and "test_a_process_that_hangs" in own
        assert other.count("hangs_with_the_gil") == other.count("waits_in_a_thread") == 1
    assert child.poll() is None


def test_a_dead_process_is_left_out_and_its_pid_gets_no_signal(
    child: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child.kill()
    child.wait(10)
    (tmp_path / f"stacks-other-{os.getppid()}").touch()  # nobody locks it: the pid is another's
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("a signal was sent"))
    assert collect_stacks([tmp_path]).count(" ==\n") == 1  # this process only
    assert not list(tmp_path.iterdir())


def test_a_stopped_process_is_waited_for_no_longer_than_the_limit(
    child: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "WAIT_S", 0.1)
    child.send_signal(signal.SIGSTOP)
    assert "no answer within 0.1 s" in collect_stacks([tmp_path])


def test_the_answer_and_the_file_are_bounded(
    child: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "MAX_BYTES", 100)
    (file,) = tmp_path.iterdir()
    for _ in range(4):
        assert len(collect_stacks([tmp_path])) < 400
        assert file.stat().st_size < 5000


def test_a_disk_that_fails_costs_the_stacks_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*args: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "open", refused)
    offer_stacks(tmp_path, "engine")
    assert "no stacks of this process: Read-only file system" in caplog.text
