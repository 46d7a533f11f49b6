"""Downloads under faults: two processes at once, kills, stalls, full disks; and what is shown."""

import errno
import io
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from radixlm.base.errors import CheckpointError, ConfigError, TransferError
from radixlm.hub import fetch, progress
from radixlm.hub.locate import locate_model
from tests.fakes.hub import FakeHub, Fault
from tests.hub.conftest import TINY

WEIGHTS = "model.safetensors"
SIZE = (TINY / WEIGHTS).stat().st_size
PROGRAM = """
from radixlm.base.log import set_up_logging
from radixlm.hub.locate import locate_model
set_up_logging("t")
print(locate_model("org/radix-tiny"))
"""


@contextmanager
def process(hub: FakeHub, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that wants the model; its stderr is a pipe."""
    environment = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "0",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running: Any = subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, **pipes)
    try:
        yield running
    finally:
        running.kill()
        running.communicate(timeout=30)


def is_whole(folder: Path) -> bool:
    return (folder / WEIGHTS).read_bytes() == (TINY / WEIGHTS).read_bytes()


def test_two_processes_download_once(hub: FakeHub, tmp_path: Path) -> None:
    release = threading.Event()
    hub.faults[WEIGHTS] = fault = Fault(hold=release)
    with process(hub, tmp_path) as first:
        assert fault.held.wait(60)
        with process(hub, tmp_path) as second:
            assert second.stderr is not None and first.stdout and second.stdout
            assert any("another process downloads it" in line for line in second.stderr)
            release.set()
            folders = {first.stdout.readline(), second.stdout.readline()}
    assert len(folders) == 1 and is_whole(Path(folders.pop().strip()))
    asked = [path for _, path, _ in hub.requests if "/cdn/" in path and path.endswith(WEIGHTS)]
    assert len(asked) == 1


def test_a_killed_download_is_gone_on_with(hub: FakeHub, tmp_path: Path) -> None:
    release = threading.Event()
    hub.faults[WEIGHTS] = fault = Fault(hold=release)
    with process(hub, tmp_path) as first:
        assert fault.held.wait(60)
        partial = list((tmp_path / "cache").rglob("*.incomplete"))
        first.send_signal(signal.SIGKILL)
        first.wait(30)
        release.set()
    kept = sum(path.stat().st_size for path in partial if path.exists())
    assert not list((tmp_path / "cache").rglob("refs/main"))
    assert is_whole(locate_model("org/radix-tiny"))
    ranges = [found for _, path, found in hub.requests if path.endswith(WEIGHTS) and found]
    assert ranges == ([f"bytes={kept}-"] * 2 if kept else [])  # at the hub, then at its content


def test_a_stalled_connection_is_opened_again(hub: FakeHub, monkeypatch: Any) -> None:
    release = threading.Event()
    hub.faults[WEIGHTS] = Fault(hold=release)
    monkeypatch.setattr(fetch, "TIMEOUT_S", 0.5)
    try:
        assert is_whole(locate_model("org/radix-tiny"))
    finally:
        release.set()


def test_a_server_without_ranges_sends_all_again(hub: FakeHub) -> None:
    hub.ignores_ranges = True
    hub.faults[WEIGHTS] = Fault(cut=0.7)
    assert is_whole(locate_model("org/radix-tiny"))
    assert hub.sent[WEIGHTS] == int(SIZE * 0.7) + SIZE


def test_a_hub_that_is_down_ends_the_download(hub: FakeHub) -> None:
    hub.faults[WEIGHTS] = Fault(times=99, status=503)
    with pytest.raises(TransferError, match="start again to go on"):
        locate_model("org/radix-tiny")
    hub.faults["info"] = Fault(times=99, status=503)
    with pytest.raises(TransferError, match="answers 503"):
        locate_model("org/radix-tiny")


def test_a_disk_that_gets_full(hub: FakeHub, monkeypatch: Any) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="no space is left in"):
        patch.setattr(fetch, "_receive", full)
        locate_model("org/radix-tiny")
    assert is_whole(locate_model("org/radix-tiny"))


def test_lines_in_the_log_without_a_terminal(
    hub: FakeHub, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    with caplog.at_level(logging.INFO):
        locate_model("org/radix-tiny")
    assert "org/radix-tiny: downloading 9.6 MiB" in caplog.text
    assert any(" of 9.6 MiB, " in line and line.endswith(" left") for line in caplog.messages)
    assert any("downloaded 9.6 MiB in" in line for line in caplog.messages)


def test_one_bar_on_a_terminal(hub: FakeHub, monkeypatch: Any) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    locate_model("org/radix-tiny")
    last = shown.getvalue().rpartition("\r")[2]
    assert last.startswith("org/radix-tiny: 100%") and "9.58M/9.58M" in last and "B/s" in last


def test_without_the_library(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", None)
    with pytest.raises(ConfigError, match=r"pip install 'radixlm\[hub\]'"):
        locate_model("org/radix-tiny")


def test_a_server_that_sends_more_than_it_said_is_left(hub: FakeHub, tmp_path: Path) -> None:
    commit = hub.repos["org/radix-tiny"].commit("main")
    url = f"{hub.url}/cdn/org/radix-tiny/{commit}/config.json"
    file = fetch.Download("config.json", url, tmp_path / "config.json", size=10)
    with pytest.raises(CheckpointError, match="sends more than 10 bytes"):
        fetch.fetch_all("t", [file], tmp_path)
    assert not file.path.exists()
