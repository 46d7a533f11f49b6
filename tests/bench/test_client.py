"""The HTTP client against a scripted server, and its event reader against a split of the whole
text."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.base.errors import ConfigError, TransferError
from radixlm.bench.client import EventReader, HttpClient

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    events=st.lists(st.text('abc {}"é:', min_size=1).map(str.strip).filter(bool), max_size=6),
    end=st.sampled_from([b"\n\n", b"\r\n\r\n"]),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_events_do_not_depend_on_how_bytes_arrive(
    events: list[str], end: bytes, cuts: list[int]
) -> None:
    data = b"".join(b"data: " + event.encode() + end for event in events)
    got: list[bytes] = []
    reader = EventReader(lambda event, now_s: got.append(event))
    places = sorted({0, len(data), *(c for c in cuts if c < len(data))})
    for start, stop in pairwise(places):
        reader.feed(data[start:stop], 0.0)
    assert got == [event.encode() for event in events]


def test_comments_and_event_names_are_skipped() -> None:
    got: list[bytes] = []
    reader = EventReader(lambda event, now_s: got.append(event))
    reader.feed(b": ping\n\nevent: x\ndata: 1\ndata: 2\n\nretry: 5\n\ndata:3\n\n", 0.0)
    assert got == [b"1\n2", b"3"]


async def test_a_connection_is_used_again(scripted) -> None:
    client = HttpClient(scripted.url, {"X-Key": "k"})
    for _ in range(3):
        response = await client.ask("POST", "/path", {"a": "é"})
        assert (response.status, response.body) == (200, b"ok")
    client.close()
    assert scripted.num_connections == 1
    head, body = scripted.seen[0]
    assert head.startswith(b"POST /path HTTP/1.1\r\n") and b"X-Key: k\r\n" in head
    assert body == '{"a":"é"}'.encode()


async def test_a_stream_goes_to_the_callback_in_order(scripted) -> None:
    events = [f"data: {i}\n\n".encode() for i in range(5)]
    whole = b"".join(events)
    scripted.script = lambda head, body: [
        STREAM_HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
        chunk(whole[:13]), chunk(whole[13:14]), chunk(whole[14:]), b"0\r\n\r\n",
    ]  # fmt: skip
    client = HttpClient(scripted.url)
    got: list[tuple[bytes, float]] = []
    response = await client.ask("POST", "/", {}, lambda data, now_s: got.append((data, now_s)))
    assert [data for data, _ in got] == [b"0", b"1", b"2", b"3", b"4"]
    assert [at for _, at in got] == sorted(at for _, at in got)
    assert response.body == b""
    client.close()


async def test_an_error_is_not_taken_for_a_stream(scripted) -> None:
    scripted.script = lambda head, body: [
        b"HTTP/1.1 429 Too Many\r\nRetry-After: 1\r\nContent-Length: 7\r\n\r\n", b'{"a":1}',
    ]  # fmt: skip
    client = HttpClient(scripted.url)
    response = await client.ask("POST", "/", {}, lambda data, now_s: pytest.fail("an event"))
    assert (response.status, response.headers["retry-after"]) == (429, "1")
    assert response.json() == {"a": 1}
    client.close()


async def test_a_body_may_end_with_the_connection(scripted) -> None:
    scripted.script = lambda head, body: [b"HTTP/1.1 200 OK\r\n\r\nall", b" of it", None]
    client = HttpClient(scripted.url)
    assert (await client.ask("GET", "/")).body == b"all of it"


async def test_a_closed_idle_connection_is_replaced(scripted) -> None:
    scripted.script = lambda head, body: [
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n", b"x", None,
    ]  # fmt: skip
    client = HttpClient(scripted.url)
    for _ in range(4):
        assert (await client.ask("GET", "/")).body == b"x"
    assert len(scripted.seen) == 4
    client.close()


@pytest.mark.parametrize(
    "answer",
    [
        [None],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", None],
        [STREAM_HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b"data: 1\n\n"), None],
        [b"good day\r\n\r\n"],
    ],
    ids=["nothing", "half a body", "half a stream", "not HTTP"],
)
async def test_a_broken_answer_is_an_error(scripted, answer) -> None:
    scripted.script = lambda head, body: answer
    client = HttpClient(scripted.url)
    with pytest.raises(TransferError):
        await client.ask("GET", "/", None, lambda data, now_s: None)
    client.close()


@pytest.mark.parametrize("is_whole", [True, False])
async def test_an_event_that_is_not_understood_is_an_error(scripted, is_whole: bool) -> None:
    length = b"Content-Length: 9\r\n\r\n" if is_whole else b"\r\n"
    scripted.script = lambda head, body: [STREAM_HEAD + length + b"data: 1\n\n"]
    client = HttpClient(scripted.url)
    with pytest.raises(TransferError, match="not understood: ZeroDivisionError"):
        await client.ask("POST", "/", {}, lambda data, now_s: 1 // 0)
    client.close()


async def test_cancelling_closes_the_connection(scripted) -> None:
    started = asyncio.Event()
    scripted.script = lambda head, body: [
        STREAM_HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b"data: 1\n\n")
    ]
    client = HttpClient(scripted.url)
    task = asyncio.create_task(client.ask("GET", "/", None, lambda data, now_s: started.set()))
    await started.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.wait_for(scripted.closed.wait(), 60)


async def test_an_absent_server_is_named_by_its_address() -> None:
    with pytest.raises(TransferError, match=r"no server answers at http://127\.0\.0\.1:1: "):
        await HttpClient("http://127.0.0.1:1").ask("GET", "/")


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://host", "http://"])
def test_a_wrong_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--base-url"):
        HttpClient(url)
