"""Runs a program that a model wrote, in a process of its own with limits.

`python sandbox.py SECONDS` reads the program from stdin and runs it in a child. Where the kernel
allows, user, mount, network, process and IPC namespaces cut it off: it reaches no network, writes
to its own folder only, and all that it starts ends with it. Limits: CPU time, memory, file sizes,
open files. It can still read files of this machine: run programs of a model that you do not trust
in a container.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import secrets
import signal
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass

_MEMORY_BYTES, _FILE_BYTES, _NUM_FILES = 2 << 30, 16 << 20, 64
_NEWUSER, _NEWNET, _NEWPID, _NEWIPC = 0x10000000, 0x40000000, 0x20000000, 0x08000000
_NEWNS, _BIND, _PRIVATE = 0x00020000, 0x1000, 0x44000
_MOUNT_SETATTR, _HERE, _RECURSIVE = 442, -100, 0x8000  # of Linux 5.12; no libc names it
_DEATH_SIGNAL, _NO_NEW_PRIVILEGES = 1, 38
_GRACE_S = 2.0  # for the process to start and to end by its own limits


@dataclass(frozen=True, slots=True)
class Run:
    """How a program ended. `has_network`: whether it could have reached a network."""

    is_ok: bool
    error: str
    has_network: bool


def run(program: str, limit_s: float) -> Run:
    """Run Python source; it is right if it ends without an exception within `limit_s` seconds. A
    random word that is told after its last line proves that; an exit status does not."""
    proof = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(limit_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder},
            start_new_session=True,
        )
        try:
            source = f"{proof}\n{program}".encode("utf-8", "replace")
            output, _ = process.communicate(source, limit_s + _GRACE_S)
        except subprocess.TimeoutExpired as late:
            output = (late.output or b"0\n") + b"timed out"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
            if process.stdout is not None:
                process.stdout.close()
    first, _, rest = output.partition(b"\n")
    error = rest.decode("utf-8", "replace").strip()
    is_ok = error == proof
    if not error:
        error = "it left the interpreter" if process.returncode == 0 else "it was ended"
    return Run(is_ok, "" if is_ok else error[-300:], first != b"1")


def _confine(limit_s: float) -> bool:
    """Apply the limits to this process; whether it is in namespaces of its own."""
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    is_apart = bool(library.unshare(_NEWUSER | _NEWNS | _NEWNET | _NEWPID | _NEWIPC) == 0)
    if is_apart:
        _protect_files(library)
    library.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    cpu_s = max(1, int(limit_s + 1))
    for limit, value in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_NOFILE, _NUM_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(limit)[1] % (1 << 64)  # -1: none
        resource.setrlimit(limit, (min(value, hard), min(value, hard)))
    return is_apart


def _protect_files(library: ctypes.CDLL) -> None:
    """Mount everything but the working folder read-only, and give up the right to undo that."""
    folder = os.getcwd().encode()
    library.mount(None, b"/", None, _PRIVATE, None)
    library.mount(folder, folder, None, _BIND, None)
    for path, flags, to_set, to_clear in ((b"/", _RECURSIVE, 1, 0), (folder, 0, 0, 1)):
        change = struct.pack("4Q", to_set, to_clear, 0, 0)
        library.syscall(_MOUNT_SETATTR, _HERE, path, flags, change, len(change))
    os.chdir(folder)
    library.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))


def _execute(source: str, limit_s: float, proof: str) -> int:
    """The exit status after the program ran in this process, its output thrown away; `proof` is
    written if it ended in order."""

    def too_late(*_: object) -> None:
        raise TimeoutError(f"longer than {limit_s} s")

    signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    report = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    try:
        exec(compile(source, "answer.py", "exec"), {"__name__": "__main__"})
    except BaseException as error:
        os.write(report, f"{type(error).__name__}: {error}"[:300].encode("utf-8", "replace"))
        return 1
    os.write(report, proof.encode())
    return 0


def _main() -> None:
    limit_s = float(sys.argv[1])
    proof, _, source = sys.stdin.buffer.read().decode("utf-8").partition("\n")
    is_apart = _confine(limit_s)
    sys.stdout.write(f"{int(is_apart)}\n")
    sys.stdout.flush()
    child = os.fork()  # the first process of the new process namespace: its end ends all in it
    if child == 0:
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        os._exit(_execute(source, limit_s, proof))
    _, status = os.waitpid(child, 0)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


if __name__ == "__main__":
    _main()
