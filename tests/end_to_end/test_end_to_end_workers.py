"""--tokenizer-worker-num: several HTTP processes, one engine; a dead one is replaced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from radixlm.engine.modelinfo import ASSETS, DEFAULT_MODEL

pytestmark = pytest.mark.skipif(
    not (ASSETS / DEFAULT_MODEL / "config.json").is_file(), reason="the bundled model is not here"
)
WAIT_S = 120


def ask(url: str) -> str:
    """One chat over a connection of its own."""
    body = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "max_tokens": 5}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        got: Any = json.loads(answer.read())
    return str(got["choices"][0]["message"]["content"])


def workers_of(pid: int) -> list[int]:
    """The HTTP processes of a server."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    lines = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    return [child for child, line in lines.items() if b"radixlm.entrypoints.http.workers" in line]


def until_ready(url: str, times: int) -> None:
    """Wait until so many answers in a row say that the server is ready."""
    good, until_s = 0, time.monotonic() + WAIT_S
    while good < times:
        assert time.monotonic() < until_s
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=10):
                good += 1
        except OSError:
            good = 0
            time.sleep(0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_share_an_engine_and_are_replaced(unused_tcp_port: int) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    command = [sys.executable, "-m", "radixlm", "serve", "--port", str(unused_tcp_port)]
    command += ["--tokenizer-worker-num", "2", "--max-total-tokens", "8192"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        until_ready(url, 10)
        answers = {ask(url) for _ in range(6)}
        assert len(answers) == 1, "greedy, whoever answers"
        first = workers_of(process.pid)
        assert len(first) == 2
        os.kill(first[0], signal.SIGKILL)
        until_s = time.monotonic() + WAIT_S
        while len(set(workers_of(process.pid)) - set(first)) < 1:
            assert time.monotonic() < until_s
            time.sleep(0.05)
        until_ready(url, 20)
        assert {ask(url) for _ in range(6)} == answers
    finally:
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=WAIT_S)[1]
    assert process.returncode == 0, rest
    assert "Traceback" not in rest, rest


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_worker_that_stands_still_and_an_engine_that_dies(unused_tcp_port: int) -> None:
    """Two HTTP processes and two engines: whichever is struck, the others answer meanwhile."""
    url = f"http://127.0.0.1:{unused_tcp_port}"
    command = [sys.executable, "-m", "radixlm", "serve", "--port", str(unused_tcp_port)]
    command += ["--tokenizer-worker-num", "2", "--dp-size", "2", "--max-total-tokens", "8192"]
    command += ["--watchdog-timeout", "4", "--cpu-threads", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        until_ready(url, 10)
        answers = {ask(url) for _ in range(4)}
        first = workers_of(process.pid)
        os.kill(first[0], signal.SIGSTOP)
        until_s = time.monotonic() + WAIT_S
        while first[0] in workers_of(process.pid) or len(workers_of(process.pid)) < 2:
            assert time.monotonic() < until_s
            time.sleep(0.05)
        until_ready(url, 10)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        engines = [
            int(child)
            for child in children
            if b"radixlm.engine.worker" in Path(f"/proc/{child}/cmdline").read_bytes()
        ]
        assert len(engines) == 2
        for engine in engines:  # one after the other: one of them is always there, or comes back
            os.kill(engine, signal.SIGKILL)
            assert {ask(url) for _ in range(4)} == answers
    finally:
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=WAIT_S)[1]
    assert process.returncode == 0, rest
    assert "no sign of life from HTTP worker" in rest and "Traceback" not in rest, rest
