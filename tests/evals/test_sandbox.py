"""Programs end within their limits and reach nothing."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from radixlm.evals import sandbox
from radixlm.evals.sandbox import run


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("assert 1 == 1", ""),
        ("assert 1 == 2", "AssertionError"),
        ("import os; os._exit(0)", "left the interpreter"),
        ("import os; os._exit(77)", "it was ended"),
        ("import sys; sys.exit()", "SystemExit"),
        ("x = bytearray(3 << 30)", "MemoryError"),
        ("open('big', 'wb').write(bytes(17 << 20))", ""),
        ("(", "SyntaxError"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ],
)
def test_program(program: str, error: str) -> None:
    found = run(program, 5.0)
    if "big" in program:
        assert not found.is_ok  # by a signal or an OSError
    else:
        assert found.is_ok == (not error) and error in found.error


def test_endless_programs_end_with_all_that_they_started() -> None:
    mark = "a-program-of-the-sandbox-test"
    program = (
        "import subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', 'while 1: pass', {mark!r}])\n"
        "while True:\n    try:\n        while True: pass\n    except TimeoutError: break\n"
        "raise ValueError('too late')\n"
    )
    start = time.monotonic()
    found = run(program, 0.5)
    assert not found.is_ok and time.monotonic() - start < 30
    if not found.has_network:  # namespaces: the child ended as well
        left = [p for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or ())]
        assert not left


def test_files_outside_the_folder_stay_as_they_are(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("before")
    assert run("open('own', 'w').write('x'); assert open('own').read() == 'x'", 5.0).is_ok
    undo = "import ctypes; ctypes.CDLL(None).mount(None, b'/', None, 0x5020, None)\n"
    found = run(f"{undo}open({str(kept)!r}, 'w').write('x')", 5.0)
    if not found.has_network:
        assert "Read-only" in found.error and kept.read_text() == "before"


def test_no_network_where_the_kernel_allows() -> None:
    program = "import socket\nsocket.create_connection(('127.0.0.1', 9), 1)"
    found = run(program, 5.0)
    assert not found.is_ok
    if not found.has_network:
        assert "unreachable" in found.error


def test_a_program_that_is_late_keeps_its_network_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_GRACE_S", 1.0)
    late = run("import signal, time\nsignal.alarm(0)\ntime.sleep(60)", 0.5)
    assert not late.is_ok and "timed out" in late.error
    assert late.has_network == run("", 5.0).has_network
