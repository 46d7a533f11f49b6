"""A real server process for tests, on a free port, with its log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Self

import httpx
import psutil


class RunningServer:
    """`radixlm serve` on a checkpoint. Leaving the context ends it and all its children."""

    def __init__(
        self,
        *args: str,
        model: str | None = None,
        timeout_s: float = 600.0,
        max_descriptors: int | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``max_descriptors``: the server's limit of open files; ``environment``: of it and its
        engines, besides this process's."""
        model_args = ("--model-path", model) if model else ()
        command = [sys.executable, "-m", "radixlm", "serve", "--port", "0", "--cpu-threads", "1"]
        limit = ("prlimit", f"--nofile={max_descriptors}:{max_descriptors}")
        self.process = subprocess.Popen(
            [*(limit if max_descriptors else ()), *command, *model_args, *args],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        self.log: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(timeout_s) or not self.url:
            self.stop()
            raise AssertionError("the server did not start:\n" + "".join(self.log))
        self.client = httpx.Client(base_url=self.url, timeout=400.0)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            found = re.search(r"ready in .*: (http://\S+) serves", line)
            if found:
                self.url = found[1]
                self._ready.set()
        self._ready.set()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def engines(self) -> list[psutil.Process]:
        """The running engine processes."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if "radixlm.engine.worker" in " ".join(child.cmdline()):
                    found.append(child)
            except psutil.Error:  # it ended between the two calls
                continue
        return found

    def engine(self) -> psutil.Process:
        """The engine process."""
        found = self.engines()
        assert found, "no engine process"
        return found[0]

    def wait_ready(self, timeout_s: float = 300.0) -> None:
        """Wait until /ready answers 200."""
        deadline_s = time.monotonic() + timeout_s
        while self.client.get("/ready").status_code != 200:
            assert time.monotonic() < deadline_s, "not ready:\n" + "".join(self.log)
            time.sleep(0.05)

    def wait_for(self, is_true: Callable[[], Any], timeout_s: float = 300.0) -> None:
        """Wait until ``is_true``."""
        deadline_s = time.monotonic() + timeout_s
        while not is_true():
            assert time.monotonic() < deadline_s, "it never came:\n" + "".join(self.log)
            time.sleep(0.01)

    async def until_running(self, count: int, timeout_s: float = 300.0) -> None:
        """Wait until so many requests run, or more."""
        async with asyncio.timeout(timeout_s):
            while self.info().get("num_running_reqs", 0) < count:
                await asyncio.sleep(0.01)

    def info(self) -> dict[str, Any]:
        """The scheduler's part of /get_server_info."""
        found: dict[str, Any] = self.client.get("/get_server_info").json()["internal_states"][0]
        return found

    def terminate(self, signum: int = signal.SIGTERM, timeout_s: float = 120.0) -> int:
        """Send a signal and return the exit status. The log is complete then."""
        self.process.send_signal(signum)
        status = self.process.wait(timeout_s)
        self._reader.join(60)
        return status

    def stop(self) -> None:
        if self.process.poll() is None:
            family = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            self.process.wait(60)
            for child in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        self._reader.join(60)
        # closing would wait for ever while a process that is left keeps the other end open
        assert not self._reader.is_alive(), "a process has outlived the server"
        if self.process.stderr is not None:
            self.process.stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.client.close()
        self.stop()
