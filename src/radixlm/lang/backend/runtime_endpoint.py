"""Backends of a server: RuntimeEndpoint for one that runs, Runtime for one of your own."""

from __future__ import annotations

import asyncio
import atexit
import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

from radixlm.base.lazy import load
from radixlm.lang.backend.generate_api import GenerateBackend
from radixlm.lang.http import HttpClient
from radixlm.lang.model_template import from_tokenizer_info, template_of
from radixlm.text.chat import ChatTemplate as Rendered

FIRST_PORT, LAST_PORT = 30000, 40000
START_S = 1200.0
_POLL_S, _PROBE_S = 0.1, 10.0


class RuntimeEndpoint(GenerateBackend):
    """A server of RadixLM or SGLang at ``base_url``. RuntimeError or OSError if it does not
    answer."""

    support_concate_and_append = True

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: str | bool | None = None,
        chat_template_name: str | None = None,
    ) -> None:
        super().__init__()
        self.base_url, self.api_key, self.verify = base_url, api_key, verify
        self._http = HttpClient(base_url, api_key, verify)
        self.model_info = self._http.request("GET", "/get_model_info")
        self.has_score_choices = bool(self.model_info.get("has_score_choices"))
        self.chat_template = template_of(self.get_model_name(), chat_template_name, self._own)

    @cached_property
    def streams_new_text(self) -> bool:  # type: ignore[override]
        with suppress(RuntimeError):  # a gateway that does not tell
            info = self.get_server_info()
            return bool(info.get("stream_output") or info.get("incremental_streaming_output"))
        return False

    def _own(self) -> tuple[Rendered, str] | None:
        """The chat template of a server of RadixLM."""
        if not self.has_score_choices:
            return None
        with suppress(RuntimeError):  # one without a tokenizer
            return from_tokenizer_info(self._http.request("GET", "/tokenizer_info"))
        return None

    def get_model_name(self) -> str:
        return str(self.model_info["model_path"])

    def flush_cache(self) -> None:
        self._http.request("POST", "/flush_cache")

    def get_server_info(self) -> Any:
        return self._http.request("GET", "/get_server_info")

    def encode(self, prompt: Any) -> Any:
        return self._http.request("POST", "/encode", {"text": prompt})

    def start_profile(self) -> None:
        self._http.request("POST", "/start_profile")

    def stop_profile(self) -> None:
        self._http.request("POST", "/stop_profile")

    def _post(self, body: dict[str, Any]) -> Any:
        return self._http.request("POST", "/generate", body)

    def _stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        return self._http.events("/generate", body)


class Runtime:
    """A model to run programs on: in this process, or with ``process`` by a server of its own at
    ``url``. Other arguments are the server's options."""

    def __init__(
        self,
        log_level: str = "error",
        *,
        process: bool = False,
        chat_template_name: str | None = None,
        **options: Any,
    ) -> None:
        self.url = ""
        self._server: subprocess.Popen[bytes] | None = None
        options = {"log_level": log_level, **options}
        atexit.register(self.shutdown)
        try:
            if process:
                self._start(options, chat_template_name)
                return
            options.pop("port", None)
            engine = load("radixlm.entrypoints.offline:Engine")(**options)
            self.endpoint: GenerateBackend = load("radixlm.lang.backend.engine:EngineBackend")(
                engine, chat_template_name
            )
        except BaseException:
            self.shutdown()
            raise

    def _start(self, options: dict[str, Any], chat_template_name: str | None) -> None:
        port = options.pop("port", None) or _free_port()
        command = [sys.executable, "-m", "radixlm", "serve", f"--port={port}", *_flags(options)]
        self._server = subprocess.Popen(command)
        self.url = f"http://127.0.0.1:{port}"
        self.generate_url = f"{self.url}/generate"
        client = HttpClient(self.url, timeout_s=_PROBE_S)
        deadline_s = time.monotonic() + START_S
        while True:
            with suppress(OSError, RuntimeError, http.client.HTTPException):
                client.request("GET", "/health")
                break
            if self._server.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError("the server did not start: its messages above say why")
            time.sleep(_POLL_S)
        self.endpoint = self._client = RuntimeEndpoint(
            self.url, options.get("api_key"), chat_template_name=chat_template_name
        )

    def shutdown(self) -> None:
        """End the engine or the server; calling it twice is fine."""
        atexit.unregister(self.shutdown)  # which would keep the engine in memory
        server, self._server = self._server, None
        if server is not None:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
        elif not self.url and hasattr(self, "endpoint"):
            self.endpoint.shutdown()

    def cache_prefix(self, prefix: str) -> None:
        self.endpoint.cache_prefix(prefix)

    def get_tokenizer(self) -> Any:
        """The tokenizer of an engine in this process."""
        if self.url:
            raise RuntimeError("get_tokenizer: the server has it; Runtime(process=False) works")
        return self.endpoint.engine.tokenizer  # type: ignore[attr-defined]

    def generate(
        self, prompt: str | list[str], sampling_params: dict[str, Any] | None = None, **fields: Any
    ) -> str:
        """The answer of /generate as JSON text."""
        body = {"text": prompt, "sampling_params": sampling_params or {}, **fields}
        return json.dumps(self.endpoint._post(body))

    def encode(self, prompt: Any) -> str:
        """The answer of /encode as JSON text."""
        if self.url:
            return json.dumps(self._client.encode(prompt))
        return json.dumps(self.endpoint.engine.encode(prompt))  # type: ignore[attr-defined]

    async def async_generate(
        self, prompt: str, sampling_params: dict[str, Any] | None = None
    ) -> AsyncIterator[str]:
        """The pieces of an answer as they come."""
        body = {"text": prompt, "sampling_params": sampling_params or {}, "stream": True}
        events, length = self.endpoint._stream(body), 0
        while (event := await asyncio.to_thread(next, events, None)) is not None:
            if len(event["text"]) > length:
                yield event["text"][length:]
                length = 0 if self.endpoint.streams_new_text else len(event["text"])

    add_request = async_generate

    async def get_server_info(self) -> Any:
        return await asyncio.to_thread(self.endpoint.get_server_info)


def _flags(options: Mapping[str, Any]) -> Iterator[str]:
    """The options as a command's arguments; those that are None are left out."""
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif isinstance(value, list | tuple):
            yield from (f"--{flag}", *map(str, value))
        elif value is not None:
            yield f"--{flag}={json.dumps(value) if isinstance(value, dict) else value}"


def _free_port() -> int:
    for port in range(FIRST_PORT, LAST_PORT):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"no port from {FIRST_PORT} to {LAST_PORT} is free; port=... names one")
