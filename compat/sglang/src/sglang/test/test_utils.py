"""The names of ``sglang.test.test_utils`` that tests of programs use.

Each ``DEFAULT_..MODEL..`` is the model of ``RADIXLM_TEST_MODEL``, or the bundled one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import unittest
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import Any

import radixlm
from sglang.srt.utils import get_device, is_port_available, kill_process_tree
from sglang.utils import HttpResponse, http_request, normalize_base_url, wait_for_http_ready
from sglang.utils import is_in_ci as is_in_ci

_MODEL = os.environ.get("RADIXLM_TEST_MODEL") or str(files("radixlm") / "assets" / "radix-tiny")
DEFAULT_PORT_FOR_SRT_TEST_RUNNER = 20000
DEFAULT_URL_FOR_TEST = f"http://127.0.0.1:{DEFAULT_PORT_FOR_SRT_TEST_RUNNER + 1000}"
DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH = 600
STDOUT_FILENAME, STDERR_FILENAME = "/tmp/stdout.txt", "/tmp/stderr.txt"


def __getattr__(name: str) -> str:
    if name.startswith("DEFAULT_") and "MODEL" in name:
        return _MODEL
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class CustomTestCase(unittest.TestCase):
    """A test case."""


def auto_config_device() -> str:
    """The value of ``--device`` on this machine."""
    return get_device()


def find_available_port(base_port: int) -> int:
    """The first free port from ``base_port`` on. RuntimeError if there is none."""
    for port in range(base_port, 1 << 16):
        if is_port_available(port):
            return port
    raise RuntimeError(f"no port from {base_port} on is free")


def popen_launch_server(
    model: str,
    base_url: str,
    timeout: float,
    api_key: str | None = None,
    other_args: Sequence[Any] = (),
    env: Mapping[str, str] | None = None,
    return_stdout_stderr: tuple[Any, Any] | None = None,
    device: str = "auto",
) -> subprocess.Popen[bytes]:
    """Start `radixlm serve`, and wait until it generates. ``return_stdout_stderr``: the files that
    get its output. TimeoutError after ``timeout`` seconds; RuntimeError if it ends before."""
    host, port = base_url.split("://")[-1].rsplit(":", 1)
    words = ["--model-path", model, "--host", host, "--port", port, *map(str, other_args)]
    if "--device" not in words:
        words += ["--device", get_device() if device == "auto" else device]
    if api_key:
        words += ["--api-key", api_key]
    out, err = return_stdout_stderr or (None, None)
    command = [sys.executable, "-m", "radixlm", "serve", *words]
    process = subprocess.Popen(command, stdout=out, stderr=err, env={**os.environ, **(env or {})})
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
    try:
        wait_for_http_ready(f"{base_url}/health_generate", timeout, process, headers)
    except BaseException:
        kill_process_tree(process.pid)
        raise
    return process


def terminate_and_kill_process_tree(
    process: subprocess.Popen[Any], terminate_timeout: float = 60, **kill: Any
) -> None:
    """Ask a server to end, and kill what is left of it after ``terminate_timeout`` seconds."""
    process.terminate()
    try:
        process.wait(timeout=terminate_timeout)
    except subprocess.TimeoutExpired:
        kill_process_tree(process.pid, **kill)


def add_common_other_args_and_parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Add the flags of benchmarks that send requests without the frontend, and read the command
    line."""
    parser.add_argument("--parallel", type=int, default=64)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int)
    parser.add_argument("--backend", required=True, choices=["vllm", "srt-raw"])
    parser.add_argument("--n-ctx", type=int, default=4096)
    parser.add_argument("--model-path", default=_MODEL)
    parser.add_argument("--result-file", default="result.jsonl")
    args = parser.parse_args()
    if args.port is None:
        args.port = 21000 if args.backend == "vllm" else 30000
    return args


def add_common_sglang_args_and_parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Add the flags that benchmarks of programs share, and read the command line."""
    parser.add_argument("--parallel", type=int, default=64)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--backend", default="srt")
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "rocm", "cpu"])
    parser.add_argument("--result-file", default="result.jsonl")
    parser.add_argument("--raw-result-file")
    return parser.parse_args()


def select_sglang_backend(args: argparse.Namespace) -> Any:
    """The backend that ``--backend`` names. ValueError for an unknown one."""
    if args.backend.startswith("srt"):
        return radixlm.RuntimeEndpoint(normalize_base_url(args.host, args.port))
    if args.backend.startswith("gpt-"):
        return radixlm.OpenAI(args.backend)
    raise ValueError(f"--backend {args.backend}: srt works")


def _checked(answer: HttpResponse) -> Any:
    if answer.status_code != 200:
        raise RuntimeError(f"status {answer.status_code}: {answer.text}")
    return answer.json()


def call_generate_srt_raw(
    prompt: str, temperature: float, max_tokens: int, stop: Any = None, url: str = ""
) -> str:
    """The text that ``/generate`` answers."""
    params = {"temperature": temperature, "max_new_tokens": max_tokens, "stop": stop}
    answer = _checked(http_request(url, json={"text": prompt, "sampling_params": params}))
    return str(answer["text"])


def call_generate_vllm(
    prompt: str,
    temperature: float,
    max_tokens: int,
    stop: Any = None,
    n: int = 1,
    url: str = "",
) -> str | list[str]:
    """The text, or the n texts, that the ``/generate`` of vLLM's demonstration server answers."""
    body = {"prompt": prompt, "temperature": temperature, "max_tokens": max_tokens}
    answer = _checked(http_request(url, json={**body, "stop": stop, "n": n}))
    texts = [text[len(prompt) :] for text in answer["text"]]
    return texts[0] if n == 1 else texts


def get_call_generate(args: argparse.Namespace) -> Any:
    """The function that asks the server of ``--backend``. ValueError for an unknown one."""
    calls: dict[str, Any] = {"vllm": call_generate_vllm, "srt-raw": call_generate_srt_raw}
    if args.backend not in calls:
        raise ValueError(f"--backend {args.backend}: srt-raw works")
    url = f"{normalize_base_url(args.host, args.port)}/generate"
    return lambda *words, **options: calls[args.backend](*words, **options, url=url)


_QUESTION = {
    "text": "What is the capital of France?",
    "sampling_params": {"temperature": 0, "max_new_tokens": 500},
}


def send_generate_requests(base_url: str, num_requests: int) -> list[int]:
    """The status codes of requests that are sent one after another."""
    url = f"{base_url}/generate"
    return [http_request(url, json=_QUESTION).status_code for _ in range(num_requests)]


async def send_concurrent_generate_requests(base_url: str, num_requests: int) -> list[int]:
    """The status codes of requests that are sent at once."""
    params: list[dict[str, Any]] = [{}] * num_requests
    found = await send_concurrent_generate_requests_with_custom_params(base_url, params)
    return [status for status, _ in found]


async def send_concurrent_generate_requests_with_custom_params(
    base_url: str, custom_params: Sequence[Mapping[str, Any]]
) -> list[tuple[int, Any]]:
    """(status, JSON) of requests that are sent at once, with these fields in each."""

    def ask(fields: Mapping[str, Any]) -> tuple[int, Any]:
        answer = http_request(f"{base_url}/generate", json={**_QUESTION, **fields})
        return answer.status_code, answer.json()

    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(max(1, len(custom_params))) as pool:
        asked = [loop.run_in_executor(pool, ask, one) for one in custom_params]
        return list(await asyncio.gather(*asked))
