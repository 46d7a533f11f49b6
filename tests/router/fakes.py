"""Fakes of the gateway's parts: an upstream without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson

from radixlm.base.errors import TransferError
from radixlm.base.record import Record
from radixlm.router.registry import Registry
from radixlm.router.worker import State, Worker


class Response(Record):
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Servers:
    """Answers of servers by (url, path): a JSON value, a status, or an exception."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], Any] = {}
        self.asked: list[tuple[str, str, str, str | None]] = []

    def up(self, url: str, **facts: Any) -> None:
        """A server with /health, /server_info, /model_info and /v1/models."""
        model = facts.get("served_model_name", "m")
        self.answers[url, "/health"] = {}
        self.answers[url, "/server_info"] = {"served_model_name": model, "model_path": "p"} | facts
        self.answers[url, "/model_info"] = {"model_type": "llama", "architectures": ["L"]}
        self.answers[url, "/v1/models"] = {"data": [{"id": model}]}

    def down(self, url: str) -> None:
        """Nothing listens there any more."""
        for key in [key for key in self.answers if key[0] == url]:
            del self.answers[key]

    async def fetch(
        self, url: str, method: str, target: str, *, api_key: str | None = None, **settings: Any
    ) -> Response:
        self.asked.append((url, method, target, api_key))
        await asyncio.sleep(0)
        if not any(known == url for known, _ in self.answers):
            raise TransferError(f"{url}: connection refused")
        answer = self.answers.get((url, target), 404)
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, int):
            return Response(answer, [], b"")
        body = answer if isinstance(answer, bytes) else orjson.dumps(answer)
        return Response(200, [], body)


async def until(is_so: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Let other tasks run until ``is_so``."""

    async def wait() -> None:
        while not is_so():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(wait(), timeout_s)


async def joined(registry: Registry, *workers: Worker) -> None:
    """Wait until workers are ready."""
    await until(lambda: all(one.state is not State.JOINING for one in workers))
