"""Runs one engine: sends prompts and measures times."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
from server_process import free_port

from peers.engines import MODEL_NAME, Engine
from peers.workload import FIRST_TOKEN, Prompts, Timed
from radixlm.base.errors import TransferError
from radixlm.bench.backends import DONE, error_text
from radixlm.bench.client import HttpClient

_LINE_LIMIT = 1 << 24
_STOP_S = 15.0
_POLL_S = 0.02


class Refused(TransferError):
    """The server does not accept such a request, now or later."""


class Stream:
    """Reads the events of one streamed /v1/completions answer."""

    def __init__(self) -> None:
        self.first_s = self.last_s = 0.0
        self.num_tokens = 0
        self.error = ""

    def event(self, data: bytes, now_s: float) -> None:
        """Read one event. A choice counts as one token until the usage gives the count."""
        if data == DONE:
            return
        answer: dict[str, Any] = orjson.loads(data)
        if answer.get("error"):
            self.error = error_text(answer["error"])
        if answer.get("choices"):
            self.first_s = self.first_s or now_s
            self.last_s = now_s
            self.num_tokens += 1
        if answer.get("usage"):
            self.num_tokens = answer["usage"]["completion_tokens"]


class Running:
    """The process of an engine. An async context manager. `start_s`: seconds from the start of the
    process to its first token."""

    def __init__(self, engine: Engine, num_threads: int, log: Path, timeout_s: float) -> None:
        self.engine = engine
        self.start_s = 0.0
        self._log, self._timeout_s = log, timeout_s
        self._environ = engine.environ(num_threads)
        self._port = free_port()
        self._client = HttpClient(f"http://127.0.0.1:{self._port}")
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Root of the process tree."""
        assert self._process is not None, "asked for while it runs"
        return self._process.pid

    async def __aenter__(self) -> Self:
        command = [part.replace("{port}", str(self._port)) for part in self.engine.command]
        begun_s = time.perf_counter()
        with self._log.open("wb") as out:
            self._process = await asyncio.create_subprocess_exec(
                *command, env=self._environ, start_new_session=True, limit=_LINE_LIMIT,
                stdin=subprocess.DEVNULL if self.engine.is_http else subprocess.PIPE,
                stdout=out if self.engine.is_http else subprocess.PIPE, stderr=out,
            )  # fmt: skip
        try:
            first = await self._first_token(begun_s)
        except BaseException:
            await self.stop()
            raise
        self.start_s = first.first_s - begun_s
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def _first_token(self, begun_s: float) -> Timed:
        """Send requests until one is answered. TransferError with the end of the log otherwise."""
        [prompt] = Prompts(0).of(FIRST_TOKEN)
        problem: object = "it was never ready"
        while time.perf_counter() - begun_s < self._timeout_s:
            if self._process is None or self._process.returncode is not None:
                problem = "its process has left"
                break
            try:
                return await self.generate([prompt], FIRST_TOKEN.num_output)
            except Refused as error:
                problem = error
                break
            except TransferError as error:
                problem = error
                await asyncio.sleep(_POLL_S)
        raise TransferError(f"{self.engine.name} did not start: {problem}\n{self.log_tail()}")

    def log_tail(self, num_lines: int = 12) -> str:
        """The last lines of its output."""
        text = self._log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-num_lines:])

    async def generate(self, prompts: Sequence[Sequence[int]], num_output: int) -> Timed:
        """Send all prompts at once, greedy, without end token. TransferError if it fails or takes
        longer than the limit."""
        start_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                if not self.engine.is_http:
                    return await self._by_pipe(start_s, prompts, num_output)
                streams = await asyncio.gather(*(self._stream(ids, num_output) for ids in prompts))
        except TimeoutError as error:
            raise TransferError(f"no answer within {self._timeout_s:.0f} s") from error
        return Timed(
            start_s,
            min(stream.first_s for stream in streams),
            max(stream.last_s for stream in streams),
            sum(stream.num_tokens for stream in streams),
        )

    async def _stream(self, ids: Sequence[int], num_output: int) -> Stream:
        body = {
            "model": MODEL_NAME, "prompt": ids, "max_tokens": num_output, "temperature": 0.0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        stream = Stream()
        response = await self._client.ask("POST", "/v1/completions", body, stream.event)
        if response.status != 200:
            kind = Refused if 400 <= response.status < 500 else TransferError
            raise kind(f"status {response.status}: {error_text(response.json())[:300]}")
        if stream.error or not stream.num_tokens:
            raise TransferError(stream.error or "the answer has no token")
        return stream

    async def _by_pipe(
        self, start_s: float, prompts: Sequence[Sequence[int]], num_output: int
    ) -> Timed:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        job = {"prompts": [list(ids) for ids in prompts], "num_output": num_output}
        process.stdin.write(json.dumps(job).encode() + b"\n")
        while line := await process.stdout.readline():
            if line.startswith(b'{"first_s"'):  # other lines are logs of the package
                answer = json.loads(line)
                return Timed(start_s, answer["first_s"], answer["end_s"], answer["num_tokens"])
        raise TransferError(f"the worker has left:\n{self.log_tail()}")

    async def stop(self) -> None:
        """Kill the whole process group."""
        self._client.close()
        process = self._process
        if process is None or process.returncode is not None:
            return
        os.killpg(process.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), _STOP_S)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
