"""Mock workers and gateways as processes of their own, with limits on every wait."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import orjson

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Process:
    """A server in a process of its own. ``url`` is where it listens."""

    def __init__(self, command: list[str], url: str = "", *, limit_s: float = 30.0) -> None:
        """``url`` empty: the process prints it as its first line. Otherwise its /health is asked
        until it answers."""
        self.command, self.url, self.log = command, url, b""
        out = None if url else subprocess.PIPE
        self.popen = subprocess.Popen(command, cwd=ROOT, stdout=out)
        deadline_s = time.monotonic() + limit_s
        try:
            if url:
                self._wait_health(deadline_s)
            else:
                self.url = self._first_line(limit_s)
        except BaseException:
            self.kill()
            raise

    def _first_line(self, limit_s: float) -> str:
        out = self.popen.stdout
        assert out is not None
        ready, _, _ = select.select([out], [], [], limit_s)
        line = out.readline().decode().strip() if ready else ""
        assert line, f"{self.command} did not start within {limit_s} s"
        return line

    def _wait_health(self, deadline_s: float) -> None:
        while time.monotonic() < deadline_s:
            assert self.popen.poll() is None, f"{self.command} ended with {self.popen.returncode}"
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.02)
        raise TimeoutError(f"{self.command} did not answer /health")

    def ask(self, target: str, value: Any = None) -> Any:
        """JSON of an answer; a ``value`` is posted."""
        data = None if value is None else orjson.dumps(value)
        request = urllib.request.Request(
            self.url + target, data, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return orjson.loads(answer.read())

    def end(self, limit_s: float = 10.0) -> int:
        """SIGTERM; SIGKILL where it takes longer than ``limit_s``. The exit status."""
        if self.popen.poll() is None:
            self.popen.terminate()
        try:
            return self.popen.wait(limit_s)
        except subprocess.TimeoutExpired:
            return self.kill()
        finally:
            self._close()

    def kill(self) -> int:
        """SIGKILL."""
        if self.popen.poll() is None:
            os.kill(self.popen.pid, signal.SIGKILL)
        self._close()
        return self.popen.wait(10)

    def _close(self) -> None:
        if self.popen.stdout is not None:
            self.popen.stdout.close()


def mock_process(*flags: str, port: int = 0) -> Process:
    """A mock worker with flags of its own."""
    return Process([sys.executable, "-m", "tests.router.mock_worker", "--port", str(port), *flags])


def gateway_process(*flags: str, port: int = 0) -> Process:
    """``radixlm router`` with ``flags``."""
    port = port or free_port()
    command = [sys.executable, "-m", "radixlm", "router", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(free_port()), *flags]
    return Process(command, f"http://127.0.0.1:{port}")
