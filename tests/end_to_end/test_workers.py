"""--tokenizer-worker-num: several HTTP processes, one engine; a dead worker is replaced."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from radixlm.engine.model_info import ASSETS, DEFAULT_MODEL
from tests.end_to_end.server import RunningServer

pytestmark = pytest.mark.skipif(
    not (ASSETS / DEFAULT_MODEL / "config.json").is_file(), reason="the bundled model is not here"
)
WAIT_S = 120


def ask(url: str) -> str:
    """One chat over its own connection."""
    body = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "max_tokens": 5}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        got: Any = json.loads(answer.read())
    return str(got["choices"][0]["message"]["content"])


def _num_requests(url: str) -> float:
    """Requests that have ended, by /metrics over a connection of its own."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        found = re.search(r"^sglang:num_requests_total\S* (\S+)$", answer.read().decode(), re.M)
    assert found is not None
    return float(found[1])


def workers_of(pid: int) -> list[int]:
    """The HTTP processes of a server."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = []
    for child in children:
        with contextlib.suppress(OSError):  # it ended between the two calls
            if b"radixlm.entrypoints.http.workers" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found


def until_ready(url: str, times: int) -> None:
    """Wait until so many answers in a row report a ready server."""
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
def test_workers_share_an_engine_and_are_replaced() -> None:
    flags = ("--tokenizer-worker-num", "2", "--max-total-tokens", "8192", "--enable-metrics")
    with RunningServer(*flags) as server:
        url, pid = server.url, server.process.pid
        until_ready(url, 10)
        answers = {ask(url) for _ in range(6)}
        assert len(answers) == 1, "greedy, whoever answers"
        first = workers_of(pid)
        assert len(first) == 2
        os.kill(first[0], signal.SIGKILL)
        until_s = time.monotonic() + WAIT_S
        while len(set(workers_of(pid)) - set(first)) < 1:
            assert time.monotonic() < until_s
            time.sleep(0.05)
        until_ready(url, 20)
        assert {ask(url) for _ in range(6)} == answers
        # what a worker counted outlives it; whoever is asked knows all
        assert {_num_requests(url) for _ in range(6)} == {12.0}
        assert server.terminate() == 0, server.log
    assert "Traceback" not in "".join(server.log), server.log


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_worker_that_stands_still_and_an_engine_that_dies() -> None:
    """Two HTTP processes and two engines; after any failure the others answer."""
    flags = ("--tokenizer-worker-num", "2", "--dp-size", "2", "--max-total-tokens", "8192")
    with RunningServer(*flags, "--watchdog-timeout", "4") as server:
        url, pid = server.url, server.process.pid
        until_ready(url, 10)
        answers = {ask(url) for _ in range(4)}
        first = workers_of(pid)
        os.kill(first[0], signal.SIGSTOP)
        until_s = time.monotonic() + WAIT_S
        while first[0] in workers_of(pid) or len(workers_of(pid)) < 2:
            assert time.monotonic() < until_s
            time.sleep(0.05)
        until_ready(url, 10)
        engines = server.engines()
        assert len(engines) == 2
        for engine in engines:  # one after the other, so that one of them always runs
            engine.kill()
            assert {ask(url) for _ in range(4)} == answers
        assert server.terminate() == 0, server.log
    log = "".join(server.log)
    assert "has sent no report" in log and "Traceback" not in log, log
