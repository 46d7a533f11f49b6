"""The names that SGLang's tests take from ``sglang.test.test_utils``. Every model is the one of
``PEERS_MODEL`` (the bundled model), every server a RadixLM on ``PEERS_PORT``."""

import asyncio
import os
import subprocess
import sys
import time
import unittest
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import httpx

MODEL = os.environ.get("PEERS_MODEL", "radix-tiny")
DEFAULT_URL_FOR_TEST = f"http://127.0.0.1:{os.environ.get('PEERS_PORT', '21900')}"
DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH = 300
STDOUT_FILENAME, STDERR_FILENAME = "peers-stdout.txt", "peers-stderr.txt"
LEFT_OUT = (
    "--attention-backend",
    "--device",
    "--cuda-graph-max-bs",
    "--tp",
    "--mem-fraction-static",
)
CustomTestCase = unittest.TestCase


def __getattr__(name: str) -> Any:
    """All names of models are one model."""
    if name.startswith("DEFAULT_") and "MODEL" in name:
        return MODEL
    raise AttributeError(name)


def _arguments(given: Sequence[Any]) -> list[str]:
    """Without options of a device, which this server has chosen."""
    kept, args = [], iter(str(one) for one in given)
    for arg in args:
        if arg.partition("=")[0] in LEFT_OUT:
            if "=" not in arg:
                next(args, None)
            continue
        kept.append(arg)
    return kept


def popen_launch_server(
    model: str,
    base_url: str,
    timeout: float,
    api_key: str | None = None,
    other_args: Sequence[Any] = (),
    env: dict[str, str] | None = None,
    return_stdout_stderr: tuple[IO[str], IO[str]] | None = None,
    **_: Any,
) -> subprocess.Popen[bytes]:
    """A server in a process group of its own; returns when it serves."""
    command = [sys.executable, "-m", "radixlm", "serve", "--model-path", model]
    command += ["--port", base_url.rpartition(":")[2], *_arguments(other_args)]
    command += ["--api-key", api_key] if api_key else []
    out, err = return_stdout_stderr or (None, None)
    made = subprocess.Popen(command, env=env, stdout=out, stderr=err, start_new_session=True)
    until_s = time.monotonic() + timeout
    while time.monotonic() < until_s:
        if made.poll() is not None:
            raise RuntimeError(f"the server ended with status {made.returncode}")
        try:
            with urllib.request.urlopen(base_url + "/health_generate", timeout=5):
                return made
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise TimeoutError("the server does not serve")


def _generate(base_url: str) -> int:
    body: dict[str, Any] = {
        "text": "The capital of France is",
        "sampling_params": {"max_new_tokens": 400},
    }
    body["sampling_params"]["ignore_eos"] = True
    return httpx.post(base_url + "/generate", json=body, timeout=120).status_code


def send_generate_requests(base_url: str, num_requests: int) -> list[int]:
    """The statuses of requests, one after the other."""
    return [_generate(base_url) for _ in range(num_requests)]


async def send_concurrent_generate_requests(base_url: str, num_requests: int) -> list[int]:
    """The statuses of requests that are sent together, sorted."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(num_requests) as threads:
        calls = [loop.run_in_executor(threads, _generate, base_url) for _ in range(num_requests)]
        return sorted(await asyncio.gather(*calls))
