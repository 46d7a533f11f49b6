"""Starts `radixlm serve` for a long run, samples its resources and stops it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import psutil

from radixlm.base.errors import TransferError
from radixlm.bench.client import HttpClient

_START_S = 120.0
_STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class Sample:
    """Resources of the server and its child processes at one moment."""

    at_s: float
    rss_bytes: int
    num_fds: int
    num_threads: int
    num_processes: int
    num_shared: int = 0  # mappings of shared memory
    cpu_s: float = 0.0  # processor time since the start


class ServerProcess:
    """`radixlm serve` on a free port, its output in `log`. An async context manager."""

    def __init__(self, options: Sequence[str], log: Path) -> None:
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._command = [
            sys.executable, "-m", "radixlm", "serve", "--host", "127.0.0.1",
            "--port", str(self.port), *options,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> Self:
        signal.signal(signal.SIGTERM, _end)  # as Ctrl-C does: servers are stopped on the way out
        with self.log.open("ab") as out:  # it may be started again
            self._process = subprocess.Popen(
                self._command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        client = HttpClient(self.base_url)
        try:
            await self._wait_ready(client)
        except BaseException:
            self.stop()
            raise
        finally:
            client.close()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    async def _wait_ready(self, client: HttpClient) -> None:
        """TransferError with the end of the log if the server exits or is not ready in time."""
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s:
            if self._process is None or self._process.poll() is not None:
                raise TransferError(f"the server exited during its start:\n{self.log_tail()}")
            try:
                if (await client.ask("GET", "/health")).status == 200:
                    return
            except TransferError:
                pass  # it does not listen yet
            await asyncio.sleep(0.1)
        raise TransferError(f"not ready after {_START_S:.0f} s:\n{self.log_tail()}")

    def log_tail(self, num_lines: int = 15) -> str:
        """The last lines of the server's output."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-num_lines:])

    def sample(self) -> Sample:
        """Memory, descriptors and threads of the whole process tree."""
        assert self._process is not None, "sampled while it runs"
        root = psutil.Process(self._process.pid)
        totals = [0, 0, 0, 0, 0]
        cpu_s = 0.0
        for process in [root, *root.children(recursive=True)]:
            try:
                with process.oneshot():
                    counts = (process.num_fds(), process.num_threads(), 1)
                    held = (process.memory_info().rss, *counts, _shared_mappings(process.pid))
                    times = process.cpu_times()
            except (psutil.NoSuchProcess, OSError):
                continue
            cpu_s += times.user + times.system
            totals = [total + part for total, part in zip(totals, held, strict=True)]
        rss, fds, threads, processes, shared = totals
        return Sample(time.monotonic(), rss, fds, threads, processes, shared, cpu_s)

    def engines(self) -> list[psutil.Process]:
        """The engine processes, rank 0 of a replica before the others."""
        assert self._process is not None, "asked while it runs"
        found = []
        for child in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended
                if "radixlm.engine.worker" in child.cmdline():
                    found.append(child)
        return found

    def kill(self, *, is_whole: bool) -> None:
        """SIGKILL to the server, or to its engine."""
        assert self._process is not None, "killed while it runs"
        victims = [psutil.Process(self._process.pid)] if is_whole else self.engines()[-1:]
        for victim in victims:
            victim.kill()
        if is_whole:
            self._process.wait()

    def stop(self) -> int | None:
        """Stop the server with SIGTERM; its exit status, or None if it had to be killed."""
        process = self._process
        if process is None:
            return None
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            return process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


def _end(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _shared_mappings(pid: int) -> int:
    """Mappings of shared memory: POSIX objects, and anonymous memory shared with a child."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum("/dev/shm/" in line or "/memfd:" in line or "/SYSV" in line for line in lines)


def free_port() -> int:
    """A TCP port of loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
