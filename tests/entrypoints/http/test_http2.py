"""HTTP/2: the answers of HTTP/1.1, many at once on one connection, and clients that misbehave."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import pytest_asyncio
from tests.entrypoints.http.conftest import SCRIPT
from tests.entrypoints.http.test_disconnect import until
from tests.entrypoints.http.test_tls import tls, trusting
from tests.fakes.http_server import ScriptedServer, listening, scripted_server
from tests.router.certificates import write_certificates

from radixlm.base.errors import ConfigError
from radixlm.entrypoints.http.app import make_uvicorn
from radixlm.entrypoints.http.uvicorn_protocol import Server

pytest.importorskip("h2")
from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from radixlm.entrypoints.http.http2 import PREFACE, scope_of

CHAT = "/v1/chat/completions"
LIMIT_S = 60.0  # default of --stall-timeout-s
OPTIONS = {"enable_http2": True, "http2_max_concurrent_streams": 4}


def asked(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **more}


def lasting(answer: httpx.Response) -> str:
    """What is the same in two answers to one question; streams may come in other pieces."""
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        parts = [json.loads(line) for line in lines]
        pieces = (one["choices"][0]["delta"]["content"] or "" for one in parts if "choices" in one)
        return "".join(pieces) or str(parts[-1]["text"])
    return re.sub(r'"(id|created|call_id)": ?("[^"]*"|\d+)|call_\w+', "", answer.text)


class Client:
    """A client by h2 itself, which sends what it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self._reader, self.writer = reader, writer
        self.seen: list[Any] = []
        self.bodies: dict[int, bytes] = {}

    def flush(self) -> None:
        self.writer.write(self.h2.data_to_send())

    def begin(self, path: str, num_bytes: int, **more: str) -> int:
        """Send the headers of a request with a body; its number."""
        number = self.h2.get_next_available_stream_id()
        start = [
            (":method", "POST"),
            (":path", path),
            (":scheme", "http"),
            (":authority", "127.0.0.1"),
        ]
        kind = [("content-type", "application/json"), ("content-length", str(num_bytes))]
        self.h2.send_headers(number, [*start, *kind, *more.items()])
        self.flush()
        return number

    def post(self, path: str, body: dict[str, Any]) -> int:
        data = json.dumps(body).encode()
        number = self.begin(path, len(data))
        self.h2.send_data(number, data, end_stream=True)
        self.flush()
        return number

    async def read(self, is_enough: Callable[[Any], bool], credits: bool = True) -> Any:
        """Read until an event is enough, which is the answer; None at the end of the connection.
        Without ``credits`` the server soon has no room."""
        while True:
            for event in self.seen:
                if is_enough(event):
                    return event
            try:
                async with asyncio.timeout(60):
                    data = await self._reader.read(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._take(data, credits)

    def _take(self, data: bytes, credits: bool) -> None:
        for event in self.h2.receive_data(data):
            self.seen.append(event)
            if isinstance(event, events.DataReceived):
                number, num_bytes = event.stream_id, event.flow_controlled_length
                self.bodies[number] = self.bodies.get(number, b"") + event.data
                if credits and num_bytes:
                    self.h2.acknowledge_received_data(num_bytes, number)
        self.flush()

    async def ended(self, number: int, credits: bool = True) -> Any:
        kinds = (events.StreamEnded, events.StreamReset)
        return await self.read(lambda e: isinstance(e, kinds) and e.stream_id == number, credits)


@pytest_asyncio.fixture
async def server(toy_folder: Path) -> AsyncIterator[ScriptedServer]:
    async with scripted_server(toy_folder, SCRIPT, **OPTIONS) as made:
        yield made


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


@asynccontextmanager
async def serving(server: ScriptedServer) -> AsyncIterator[tuple[Server, Client]]:
    """uvicorn's server, and a client that has begun."""
    sock = socket.create_server(("127.0.0.1", 0))
    made = cast(Server, make_uvicorn(server.app, server.config))
    task = asyncio.create_task(made.serve(sockets=[sock]))
    await until(lambda: made.started)
    try:
        async with connected(sock.getsockname()[1]) as client:
            client.h2.initiate_connection()
            client.flush()
            await client.read(lambda event: isinstance(event, events.RemoteSettingsChanged))
            yield made, client
    finally:
        made.should_exit = True
        await task


def connection_of(made: Server) -> Any:
    (found,) = made.server_state.connections
    return found


async def test_answers_are_those_of_http_1(server: ScriptedServer) -> None:
    questions: list[tuple[str, str, Any]] = [
        ("POST", CHAT, asked("hi")),
        ("POST", CHAT, asked("grüße", stream=True)),
        ("POST", CHAT, asked("hi", max_tokens=-1)),
        ("POST", "/generate", {"text": "hello", "stream": True}),
        ("POST", "/generate", {"text": "x" * 3_000_000}),  # more than the window
        ("GET", "/v1/models", None),
        ("HEAD", "/", None),
        ("GET", "/nothing?a=%20b", None),
        ("OPTIONS", CHAT, None),
    ]
    async with listening(server) as port:
        url = f"http://127.0.0.1:{port}"
        for method, path, body in questions:
            found = []
            for is_new in (False, True):
                async with httpx.AsyncClient(base_url=url, http1=not is_new, http2=is_new) as one:
                    found.append(await one.request(method, path, json=body))
            old, new = found
            assert (old.http_version, new.http_version) == ("HTTP/1.1", "HTTP/2")
            assert (new.status_code, lasting(new)) == (old.status_code, lasting(old)), path
            mine = {*old.headers} - {"connection", "transfer-encoding", "keep-alive"}
            assert {*new.headers} == mine, path


async def test_many_at_once_on_one_connection(server: ScriptedServer) -> None:
    """More than may run wait at the client."""
    async with listening(server) as port:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, http1=False, http2=True, timeout=60) as client:
            texts = [*SCRIPT] * 5
            texts.remove("forever")
            calls = [client.post(CHAT, json=asked(text, max_tokens=64)) for text in texts]
            together = await asyncio.gather(*calls)
        assert [one.status_code for one in together] == [200] * len(texts)
        for text, one in zip(texts, together, strict=True):
            alone = await server.post(CHAT, **asked(text, max_tokens=64))
            assert lasting(one) == lasting(alone)


async def test_over_tls_by_negotiation(toy_folder: Path, tmp_path: Path) -> None:
    write_certificates(tmp_path, "server", "client")
    async with scripted_server(toy_folder, {}, **OPTIONS, **tls(tmp_path)) as server:
        async with listening(server) as port:
            for is_new in (False, True):
                trusted = trusting(tmp_path)
                async with httpx.AsyncClient(verify=trusted, http2=is_new) as client:
                    got = await client.post(f"https://127.0.0.1:{port}{CHAT}", json=asked("hi"))
                assert got.status_code == 200
                assert got.http_version == ("HTTP/2" if is_new else "HTTP/1.1")


async def test_a_beginning_in_pieces(server: ScriptedServer) -> None:
    async with listening(server) as port, connected(port) as client:
        client.h2.initiate_connection()
        for byte in client.h2.data_to_send():
            client.writer.write(bytes((byte,)))
            await client.writer.drain()
            await asyncio.sleep(0)
        number = client.post("/generate", {"text": "hello"})
        assert isinstance(await client.ended(number), events.StreamEnded)
        assert json.loads(client.bodies[number])["text"] == "Hello there."
    async with listening(server) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(PREFACE[:2])  # of a method of HTTP/1.1
        await writer.drain()
        await asyncio.sleep(0)
        writer.write(b"OPFIND / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 4")
        writer.close()


async def test_a_client_that_cancels_frees_its_slot(server: ScriptedServer) -> None:
    server.engine.executor.is_slow = True
    async with serving(server) as (_, client):
        number = client.post(CHAT, asked("forever", stream=True, max_tokens=1500))
        await client.read(lambda event: isinstance(event, events.DataReceived))
        client.h2.reset_stream(number, ErrorCodes.CANCEL)
        client.flush()
        await until(lambda: not server.engine.intake.requests)
        other = client.post("/generate", {"text": "hello"})
        assert isinstance(await client.ended(other), events.StreamEnded)


async def test_more_streams_than_allowed_are_refused(server: ScriptedServer) -> None:
    """Those that a client has reset count until their calls have ended."""
    await server.post("/pause_generation", mode="in_place")
    async with serving(server) as (_, client):
        for _ in range(4):
            client.post("/generate", {"text": "hello"})
        await until(lambda: len(server.engine.intake.requests) == 4)
        client.h2.remote_settings[3] = 100  # the limit, from now on ignored by this client
        client.h2.remote_settings.acknowledge()
        client.post("/generate", {"text": "hello"})
        assert await client.read(lambda event: False) is None  # the connection is closed
        await until(lambda: not server.engine.intake.requests)
    await server.post("/continue_generation")


async def test_streams_that_are_opened_and_reset_at_once(server: ScriptedServer) -> None:
    """A thousand in one piece: few are begun, and the connection goes on."""
    async with serving(server) as (made, client):
        client.h2.remote_settings[3] = 2000  # this client heeds no limit
        client.h2.remote_settings.acknowledge()
        data = b""
        for _ in range(1000):
            number = client.h2.get_next_available_stream_id()
            start = {":method": "GET", ":path": "/health", ":scheme": "http", ":authority": "x"}
            client.h2.send_headers(number, list(start.items()), end_stream=True)
            client.h2.reset_stream(number, ErrorCodes.CANCEL)
            data += client.h2.data_to_send()
        client.writer.write(data)
        number = client.post("/generate", {"text": "hello"})
        ended = await client.ended(number)
        while isinstance(ended, events.StreamReset):
            assert ended.error_code == ErrorCodes.REFUSED_STREAM
            number = client.post("/generate", {"text": "hello"})
            ended = await client.ended(number)
        assert made.server_state.total_requests < 1000


async def test_running_answers_end_before_the_server_does(server: ScriptedServer) -> None:
    await server.post("/pause_generation", mode="in_place")
    async with serving(server) as (made, client):
        number = client.post("/generate", {"text": "hello"})
        await until(lambda: server.engine.intake.requests)
        made.should_exit = True
        await until(lambda: connection_of(made)._is_leaving)
        late = client.post("/generate", {"text": "hello"})
        assert (await client.ended(late)).error_code == ErrorCodes.REFUSED_STREAM
        await server.post("/continue_generation")
        assert await client.read(lambda event: False) is None
        assert json.loads(client.bodies[number])["text"] == "Hello there."


async def test_a_client_without_room_stalls_alone(server: ScriptedServer) -> None:
    """The stream that is not read is ended; another on its connection goes on."""
    async with serving(server) as (made, client):
        room = 4096  # of a stream: less than its answer, even if all of it comes in one piece
        client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: room})
        number = client.post("/generate", {"text": "forever", "stream": True} | tokens(1500))
        await client.read(lambda _: len(client.bodies.get(number, b"")) >= room, credits=False)
        streams = connection_of(made).streams
        await until(lambda: streams[number]._blocked_since_s)
        other = client.post("/generate", {"text": "hello"})
        await client.ended(other, credits=False)
        for seconds in range(0, int(LIMIT_S) + 10, 5):
            made.sweep(time.monotonic() + seconds)
        reset = await client.ended(number, credits=False)
        assert reset.error_code == ErrorCodes.CANCEL
        await until(lambda: not server.engine.intake.requests)


def tokens(count: int) -> dict[str, Any]:
    return {"sampling_params": {"max_new_tokens": count}}


async def test_half_a_body(server: ScriptedServer) -> None:
    """It is awaited for a while; a refused one is not read to its end."""
    async with serving(server) as (made, client):
        number = client.begin("/generate", 100)
        await until(lambda: connection_of(made).streams)
        for seconds in range(0, int(LIMIT_S) + 10, 5):
            made.sweep(time.monotonic() + seconds)
        assert (await client.ended(number)).error_code == ErrorCodes.CANCEL
        number = client.begin("/generate", 1 << 40)
        ended = await client.read(
            lambda e: isinstance(e, events.StreamReset) and e.stream_id == number
        )
        assert ended.error_code == ErrorCodes.NO_ERROR
        status = [e.headers[0] for e in client.seen if isinstance(e, events.ResponseReceived)]
        assert status == [(":status", "413")]


async def test_the_body_is_asked_for(server: ScriptedServer) -> None:
    data = json.dumps({"text": "hello"}).encode()
    async with serving(server) as (_, client):
        number = client.begin("/generate", len(data), expect="100-continue")
        await client.read(lambda e: isinstance(e, events.InformationalResponseReceived))
        client.h2.send_data(number, data, end_stream=True)
        client.flush()
        assert isinstance(await client.ended(number), events.StreamEnded)


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 1000,
        bytes(64),
        b"\x00\x00\x04\x08\x00\x00\x00\x00\x05\x00\x00\x00\x01",  # more room for no stream
        b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + bytes(20_000),  # a frame above the limit
    ],
)
async def test_what_is_no_http_2_closes_the_connection(server: ScriptedServer, junk: bytes) -> None:
    async with serving(server) as (made, client):
        client.writer.write(junk)
        assert await client.read(lambda event: False) is None
        await until(lambda: not made.server_state.connections)


async def test_an_idle_connection_is_closed(server: ScriptedServer) -> None:
    async with serving(server) as (made, client):
        made.config.timeout_keep_alive = 0
        number = client.post("/generate", {"text": "hello"})
        await client.ended(number)
        assert await client.read(lambda event: False) is None
        await until(lambda: not made.server_state.connections)


def test_scopes() -> None:
    base = {"root_path": "/r"}
    start = [(b":method", b"GET"), (b":path", b"/a%20b?c=%20"), (b":authority", b"x")]
    scope = scope_of([*start, (b"host", b"y"), (b"a", b"1"), (b"a", b"2")], base)
    assert scope is not None and (scope["path"], scope["raw_path"]) == ("/r/a b", b"/r/a%20b")
    assert (scope["query_string"], scope["method"]) == (b"c=%20", "GET")
    assert scope["headers"] == [(b"host", b"x"), (b"a", b"1"), (b"a", b"2")]
    for path in (b"", b"*", b"/\xc3\xa9", b"http://x/"):
        assert scope_of([(b":method", b"GET"), (b":path", path)], base) is None


async def test_without_the_package(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "h2", None)
    with pytest.raises(ConfigError, match=r"--enable-http2 needs .*'h2'.*radixlm\[http2\]"):
        make_uvicorn(server.app, server.config)
