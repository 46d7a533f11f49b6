"""The functions of ``sglang.utils`` that programs and notebooks use."""

from __future__ import annotations

import base64
import importlib
import json
import os
import shlex
import socket
import ssl
import subprocess
import tempfile
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from radixlm.lang.media import encode_image

_CHUNK = 1 << 16


def read_jsonl(filename: str) -> Iterator[Any]:
    """The values of the lines that are no comments."""
    with open(filename, encoding="utf-8") as file:
        for line in file:
            if not line.startswith("#"):
                yield json.loads(line)


def is_in_ci() -> bool:
    """Whether ``SGLANG_IS_IN_CI`` is set to true."""
    return os.environ.get("SGLANG_IS_IN_CI", "").lower() in ("1", "true", "yes", "y")


def get_exception_traceback() -> str:
    """The traceback of the exception that is being handled."""
    return traceback.format_exc()


def normalize_base_url(host: str, port: int) -> str:
    """The URL of a host, which may have a scheme already, and a port."""
    return f"{host if '://' in host else f'http://{host}'}:{port}"


def dump_state_text(filename: str, states: Sequence[Any], mode: str = "w") -> None:
    """Write the texts of states, or texts, under numbers."""
    with open(filename, mode, encoding="utf-8") as file:
        for number, state in enumerate(states):
            text = state if isinstance(state, str) else state.text()
            file.write(f"{'=' * 40} {number} {'=' * 40}\n{text}\n{'=' * 80}\n\n")


class HttpResponse:
    """An answer: ``status_code``, ``text`` and ``json()``."""

    def __init__(self, status_code: int, body: bytes) -> None:
        self.status_code, self._body = status_code, body

    @property
    def text(self) -> str:
        return self._body.decode("utf-8", "replace")

    def json(self) -> Any:
        return json.loads(self._body)


def http_request(
    url: str,
    json: Any = None,
    stream: bool = False,
    api_key: str | None = None,
    verify: str | None = None,
    method: str | None = None,
) -> Any:
    """GET, or POST with ``json``; with ``stream`` the open answer, whose lines are its events.
    ``verify``: a file with the authorities of https."""
    headers = {"Content-Type": "application/json; charset=utf-8"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if json is None else _dumps(json)
    request = urllib.request.Request(url, data, headers, method=method)
    context = ssl.create_default_context(cafile=verify) if verify else None
    if stream:
        return urllib.request.urlopen(request, context=context)
    try:
        with urllib.request.urlopen(request, context=context) as answer:
            return HttpResponse(answer.status, answer.read())
    except urllib.error.HTTPError as error:
        return HttpResponse(error.code, error.read())


def _dumps(value: Any) -> bytes:
    return json.dumps(value).encode()


def encode_image_base64(image_path: Any) -> str:
    """The base64 text of an image: a file's path, its bytes, or a PIL image."""
    return encode_image(image_path)


def encode_video_base64(video_path: str, num_frames: int = 16) -> str:
    """The base64 text of a video's file; the server chooses the frames."""
    return "video:" + base64.b64encode(Path(video_path).read_bytes()).decode()


class LazyImport:
    """A class or function that is imported when it is used."""

    def __init__(self, module_name: str, class_name: str) -> None:
        self.module_name, self.class_name = module_name, class_name

    def _load(self) -> Any:
        return getattr(importlib.import_module(self.module_name), self.class_name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._load(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._load()(*args, **kwargs)


def download_and_cache_file(url: str, filename: str | None = None) -> str:
    """The path of the file, downloaded if it is not there."""
    path = Path(filename or Path(tempfile.gettempdir()) / url.rsplit("/", 1)[-1])
    if path.exists():
        return str(path)
    part = path.with_suffix(path.suffix + ".part")
    with urllib.request.urlopen(url) as answer, part.open("wb") as file:
        total = int(answer.headers.get("Content-Length") or 0) or None
        with tqdm(total=total, unit="B", unit_scale=True, desc=path.name) as bar:
            while chunk := answer.read(_CHUNK):
                file.write(chunk)
                bar.update(len(chunk))
    part.rename(path)
    return str(path)


def convert_json_schema_to_str(json_schema: Any) -> str:
    """A schema as text: of a dict, a text, or a pydantic class."""
    if isinstance(json_schema, str):
        return json_schema
    if isinstance(json_schema, dict):
        return json.dumps(json_schema)
    return json.dumps(json_schema.model_json_schema())


def print_highlight(text: Any) -> None:
    """Print, in bold on a terminal."""
    print(f"\033[1m{text}\033[0m")


def execute_shell_command(command: str) -> subprocess.Popen[str]:
    """Start a command; backslashes at ends of lines are dropped."""
    words = shlex.split(command.replace("\\\n", " ").replace("\\", " "))
    return subprocess.Popen(words, text=True, stderr=subprocess.STDOUT)


def launch_server_cmd(
    command: str, host: str = "0.0.0.0", port: int | None = None
) -> tuple[subprocess.Popen[str], int]:
    """Start a server; its process and its port."""
    if port is None:
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = int(probe.getsockname()[1])
    return execute_shell_command(f"{command} --host {host} --port {port}"), port


def wait_for_http_ready(
    url: str,
    timeout: float | None = None,
    process: Any = None,
    headers: dict[str, str] | None = None,
) -> None:
    """Wait until GET ``url`` answers 200. TimeoutError after ``timeout`` seconds; RuntimeError when
    ``process`` has ended."""
    end_s = None if timeout is None else time.monotonic() + timeout
    while True:
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"the server has ended with exit code {process.returncode}")
        try:
            request = urllib.request.Request(url, headers=headers or {})
            with urllib.request.urlopen(request, timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass
        if end_s is not None and time.monotonic() > end_s:
            raise TimeoutError(f"{url} did not answer within {timeout} s")
        time.sleep(0.2)


def wait_for_server(base_url: str, timeout: int | None = None, process: Any = None) -> None:
    """``wait_for_http_ready`` of a server's list of models."""
    wait_for_http_ready(f"{base_url}/v1/models", timeout, process)


def terminate_process(process: subprocess.Popen[str]) -> None:
    """End a server, by force if it takes longer than 30 s."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def execute_once(func: Callable[..., Any]) -> Callable[..., Any]:
    """Call ``func`` the first time only."""
    called: list[bool] = []

    def once(*args: Any, **kwargs: Any) -> None:
        if not called:
            called.append(True)
            func(*args, **kwargs)

    return once


def stream_and_merge(llm: Any, prompt: str, sampling_params: dict[str, Any]) -> str:
    """The whole text of a prompt, read as a stream."""
    text = ""
    for chunk in llm.generate(prompt, sampling_params, stream=True):
        text = chunk["text"]
    return text


async def async_stream_and_merge(
    llm: Any, prompt: str, sampling_params: dict[str, Any]
) -> AsyncIterator[str]:
    """The new text of each event of a stream."""
    length = 0
    async for chunk in await llm.async_generate(prompt, sampling_params, stream=True):
        yield chunk["text"][length:]
        length = len(chunk["text"])
