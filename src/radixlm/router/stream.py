"""Stream: an answer that goes to the client as it comes, from one worker or several in turn."""

from __future__ import annotations

import time
from collections.abc import Callable

import orjson

from radixlm.router.call import Call, Headers
from radixlm.router.client_stream import ClientStream
from radixlm.router.exchange import Cut, Exchange
from radixlm.router.journal import Journal
from radixlm.router.worker import Worker


class Stream:
    """``edit``: applied to whole blocks on their way. ``begun_s``: when its first worker answered,
    ``first_s``: when the first block came, 0 if none did (monotonic). ``last``: the last blocks
    that were sent. ``is_moving``: its worker is to be left."""

    __slots__ = (
        "_client",
        "_exchange",
        "_head",
        "begun_s",
        "edit",
        "first_s",
        "is_moving",
        "journal",
        "last",
        "worker",
    )

    def __init__(self, client: ClientStream, journal: Journal, status: int, head: Headers) -> None:
        """``status``, ``head``: of the first worker's answer."""
        self._client, self.journal = client, journal
        self._head: tuple[int, Headers] | None = (status, head)
        self._exchange: Exchange | None = None
        self.edit: Callable[[bytes], bytes] | None = None
        self.worker: Worker | None = None
        self.begun_s, self.first_s = time.monotonic(), 0.0
        self.last, self.is_moving = b"", False

    def sink(self, chunk: bytes) -> None:
        """Some bytes of the worker's answer."""
        data = self.journal.feed(chunk)
        if data:
            self._send(data)

    def _send(self, data: bytes) -> None:
        if self.edit is not None:
            data = self.edit(data)
        if self._head is not None:
            self._begin()
        self.last = data
        self._client.write(data)

    def _begin(self) -> None:
        """The head goes with the first block: until then another answer can take its place."""
        assert self._head
        self.first_s = time.monotonic()
        self._client.begin(*self._head)
        self._head = None

    def restart(self, worker: Worker, head: Headers) -> None:
        """Another worker answers, before anything was sent."""
        self.journal.restart(worker)
        self._head = (200, head)

    async def relay(self, exchange: Exchange, worker: Worker) -> None:
        """Pass the body on. Cut: it ended early, or ``move`` was called."""
        self._exchange, self.worker, self.is_moving = exchange, worker, False
        worker.streams.add(self)
        try:
            exchange.start(self.sink)
            self._client.on_pressure(exchange.pause, exchange.resume)  # start has resumed it
            await exchange.wait()
        except Cut:
            if not self.last.rstrip().endswith(b"data: [DONE]"):  # else nothing was lost
                raise
        finally:
            worker.streams.discard(self)

    def move(self) -> None:
        """Leave the worker: the stream goes on at another one."""
        if self._exchange is not None:
            self.is_moving = True
            self._exchange.close()

    def end(self) -> None:
        """The last worker's answer is complete."""
        if rest := self.journal.end():
            self._send(rest)
        if self._head is not None:
            self._begin()
        self._client.end()

    def fail(self, call: Call, message: str, code: str) -> None:
        """End with an error that the client can read."""
        self._client.write(error_blocks(call.path, message, code))
        self._client.end()


def error_blocks(path: str, message: str, code: str) -> bytes:
    """An error as the last event of a stream, in the form of its route."""
    if path.startswith("/api/"):
        return orjson.dumps({"error": message}) + b"\n"
    error = {"message": message, "type": "server_error", "code": code, "param": None}
    if path == "/v1/messages":
        kind = {"type": "error", "error": {"type": "api_error", "message": message}}
        return b"event: error\ndata: " + orjson.dumps(kind) + b"\n\n"
    if path == "/v1/responses":
        event = {"type": "error", "code": code, "message": message, "param": None}
        return b"event: error\ndata: " + orjson.dumps(event) + b"\n\n"
    return b"data: " + orjson.dumps({"error": error}) + b"\n\ndata: [DONE]\n\n"
