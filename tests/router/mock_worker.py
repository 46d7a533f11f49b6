"""A mock worker: the routes that a gateway asks of a server. Its failures: `Faults`.

A raw protocol on httptools, so that a benchmark measures the gateway and not this file. In the loop
of a test: ``async with MockWorker(faults) as worker``; as a process: ``python -m
tests.router.mock_worker --port 31000`` (the flags of the reference's mock worker work too).

Streams speak the journal: with the header ``x-radixlm-journal`` each block begins with a comment
``: j <record>``, and ``"resume": {"journal": [...], "num_events": n}`` continues after block n.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import ssl
import struct
import time
from collections import deque
from dataclasses import replace
from typing import Any

import httptools
import orjson

from tests.router.mock_answers import BARE, BARE_ANSWER, Exchange, Faults, Headers, Seen, head_of


class MockWorker:
    """One worker. ``seen`` has all requests of data routes where ``record`` is set; ``raw`` the
    bytes of each connection; ``num_left`` counts clients that left before their answer's end."""

    def __init__(
        self,
        faults: Faults | None = None,
        *,
        worker_id: str = "",
        port: int = 0,
        host: str = "127.0.0.1",
        record: bool = True,
        info: dict[str, Any] | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """``info``: more fields for /server_info. ``port`` 0: any free one, drawn by `start`."""
        self.faults = faults or Faults()
        self.worker_id, self.host, self.port, self.record = worker_id, host, port, record
        self.info, self.ssl_context = info or {}, ssl_context
        self.seen: list[Seen] = []
        self.raw: list[bytearray] = []
        self.connections: set[Connection] = set()
        self.num_requests = self.num_inflight = self.num_left = self.num_malformed = 0
        self.num_resumed = 0
        self.started_s = time.monotonic()
        self.dies_with_process = False
        self.leaving = asyncio.Event()  # it shuts down
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """Address for --worker-urls."""
        return f"{'https' if self.ssl_context else 'http'}://{self.host}:{self.port}"

    async def start(self) -> MockWorker:
        """Listen. Started again after `kill`, it has the same port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self), self.host, self.port, ssl=self.ssl_context, backlog=1024
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self.worker_id = self.worker_id or f"worker-{self.port}"
        return self

    async def kill(self) -> None:
        """Die as a killed process does: all connections end at once, none is accepted."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.cut(reset=False)
        await asyncio.sleep(0)
        self._server = None

    async def __aenter__(self) -> MockWorker:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    def stats(self) -> dict[str, Any]:
        """What `GET /mock` answers."""
        names = ("num_requests", "num_inflight", "num_left", "num_malformed", "num_resumed")
        counts = {name: getattr(self, name) for name in names}
        return {**counts, "worker_id": self.worker_id, "num_connections": len(self.connections)}

    def server_info(self) -> dict[str, Any]:
        """Facts of a server that a gateway reads."""
        return {
            "worker_id": self.worker_id,
            "model_path": "mock",
            "served_model_name": "mock",
            "tp_size": 1,
            "dp_size": 1,
            "disaggregation_mode": "null",
            "resume_digest": "mock",
            "load_in_flight": self.num_inflight,
            **self.info,
        }

    def control(self, path: str) -> tuple[int, Any] | None:
        """Status and body of a route that is none for data; None where it is one."""
        faults = self.faults
        if path in ("/health", "/health_generate", "/ready", "/liveness"):
            age_s = time.monotonic() - self.started_s
            if faults.health_fail_after_s and age_s >= faults.health_fail_after_s:
                return 500, "bad"
            return faults.health_status, "ok"
        if path in ("/get_server_info", "/server_info"):
            return 200, self.server_info()
        if path in ("/get_model_info", "/model_info"):
            return 200, {"model_path": "mock", "model": "mock", "is_generation": True}
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "mock", "object": "model"}]}
        if path in ("/get_load", "/v1/loads"):
            load = {"dp_rank": 0, "num_reqs": self.num_inflight, "num_waiting_reqs": 0}
            return 200, [load | {"num_tokens": self.num_inflight}]
        if path == "/mock":
            return 200, self.stats()
        return (200, "ok") if path == "/flush_cache" else None


class Connection(asyncio.Protocol):
    """One connection: requests in, answers out in their order."""

    def __init__(self, worker: MockWorker) -> None:
        self.worker = worker
        self.parser = httptools.HttpRequestParser(self)
        self.queue: deque[Seen] = deque()
        self.task: asyncio.Task[None] | None = None
        self.can_write = asyncio.Event()
        self.can_write.set()
        self.num_served = 0
        self.target, self.body = b"", bytearray()
        self.headers: Headers = []

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.worker.connections.add(self)
        self.number = len(self.worker.raw)
        if self.worker.record:
            self.worker.raw.append(bytearray())
        if self.worker.faults.is_deaf:  # uvloop begins to read after this method
            asyncio.get_running_loop().call_soon(transport.pause_reading)

    def connection_lost(self, error: Exception | None) -> None:
        self.worker.connections.discard(self)
        self.can_write.set()
        if self.task is not None:
            self.worker.num_left += 1
            self.task.cancel()

    def pause_writing(self) -> None:
        self.can_write.clear()

    def resume_writing(self) -> None:
        self.can_write.set()

    def data_received(self, data: bytes) -> None:
        if self.worker.faults.is_deaf:
            return
        if self.worker.record:
            self.worker.raw[self.number] += data
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.worker.num_malformed += 1
            self.transport.write(head_of(400, ("content-length", "0"), ("connection", "close")))
            self.transport.close()

    # callbacks of the parser

    def on_message_begin(self) -> None:
        self.target, self.headers, self.body = b"", [], bytearray()

    def on_url(self, part: bytes) -> None:
        self.target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if any(key == b"expect" for key, _ in self.headers):
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, part: bytes) -> None:
        self.body += part

    def on_message_complete(self) -> None:
        method, target = self.parser.get_method().decode(), self.target.decode("latin-1")
        self.queue.append(Seen(method, target, self.headers, bytes(self.body), self.number))
        if self.task is None:
            self.next()

    # answers

    def next(self) -> None:
        """Answer the oldest request."""
        while self.queue and self.task is None and not self.transport.is_closing():
            self.answer(self.queue.popleft())

    def cut(self, *, reset: bool) -> None:
        """End the connection at once; by FIN what is in the socket's buffer still arrives."""
        if reset:
            linger = struct.pack("ii", 1, 0)
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.transport.abort()

    def reply(self, status: int, value: Any, *headers: tuple[str, str]) -> None:
        """A whole answer at once."""
        is_text = isinstance(value, str)
        body = value.encode() if is_text else orjson.dumps(value)
        kind = "text/plain" if is_text else "application/json"
        named = ("x-worker-id", self.worker.worker_id)
        length = ("content-length", str(len(body)))
        self.transport.write(
            head_of(status, ("content-type", kind), named, length, *headers) + body
        )

    def answer(self, seen: Seen) -> None:
        """Control routes at once, data routes by their faults."""
        worker, path = self.worker, seen.target.partition("?")[0]
        self.num_served += 1
        if path == "/mock" and seen.method == "POST":
            worker.faults = replace(worker.faults, **orjson.loads(seen.body))
        if path == "/ready" and "wait_s=" in seen.target and worker.faults.holds_ready:
            self.task = asyncio.ensure_future(self.hold())
            self.task.add_done_callback(self.ended)
            return
        if (known := worker.control(path)) is not None:
            self.reply(*known)
            return
        worker.num_requests += 1
        if worker.record:
            worker.seen.append(seen)
        faults = worker.faults
        if (own := seen.header(b"x-mock")) is not None:
            faults = replace(faults, **orjson.loads(own))
        if faults.drop_kept and self.num_served > 1:
            self.cut(reset=False)
            return
        if faults == BARE and b'"stream":true' not in seen.body.replace(b" ", b""):
            self.transport.write(BARE_ANSWER)
            return
        self.task = asyncio.ensure_future(Exchange(self, seen, faults).run())
        self.task.add_done_callback(self.ended)

    async def hold(self) -> None:
        """Answer when the worker shuts down."""
        await self.worker.leaving.wait()
        self.reply(503, {"error": {"code": "draining"}})

    def ended(self, task: asyncio.Task[None]) -> None:
        """Take the next request, or tell what went wrong."""
        self.task = None
        if not task.cancelled():
            task.result()
            self.next()


def main() -> None:
    """Serve as a process, until SIGTERM. Prints the url once it listens."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--worker-id", default="")
    parser.add_argument("--dp-size", type=int, default=1)
    parser.add_argument("--faults", default="{}", help="JSON of Faults")
    parser.add_argument("--info", default="{}", help="JSON of more facts for /server_info")
    for name in ("ssl-certfile", "ssl-keyfile", "ssl-ca-certs"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--no-echo", action="store_true", help="for benchmarks")
    parser.add_argument("--require-api-key", action="store_true")
    for flag, _, number in _PEER_FLAGS:
        kind = {"action": "store_true"} if number is None else {"type": float, "default": None}
        parser.add_argument(f"--{flag}", **kind)
    parser.add_argument("--api-key", default="")
    args = parser.parse_args()

    import uvloop

    uvloop.run(_serve(args))


_PEER_FLAGS = (  # flag of the reference's mock worker, field of Faults, unit; None: a switch
    ("latency-ms", "latency_s", 1e-3),
    ("timeout", "hang", None),
    ("status-code", "status", 1),
    ("fail-first-n", "fail_first", 1),
    ("random-fail-rate", "fail_rate", 1.0),
    ("max-payload-bytes", "max_payload", 1),
    ("stream", "always_stream", None),
    ("crash-on-request", "crash", None),
    ("health-fail-after-ms", "health_fail_after_s", 1e-3),
)


async def _serve(args: argparse.Namespace) -> None:
    faults = Faults(echo=not args.no_echo, api_key=args.api_key if args.require_api_key else "")
    for flag, name, unit in _PEER_FLAGS:
        if value := getattr(args, flag.replace("-", "_")):
            setattr(faults, name, True if unit is None else type(unit)(value * unit))
    context = None
    if args.ssl_certfile:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile)
        if args.ssl_ca_certs:
            context.load_verify_locations(args.ssl_ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    worker = MockWorker(
        replace(faults, **orjson.loads(args.faults)),
        worker_id=args.worker_id,
        host=args.host,
        port=args.port,
        record=False,
        info={"dp_size": args.dp_size, **orjson.loads(args.info)},
        ssl_context=context,
    )
    worker.dies_with_process = True
    print((await worker.start()).url, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    main()
