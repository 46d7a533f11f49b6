"""What goes through the gateway is what came: requests, answers and streams, byte for byte."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.router.data_routes import DATA_ROUTES
from tests.router.client import Connection, Response, ask, exchange
from tests.router.front import Front
from tests.router.hostile import garbled, split_answers
from tests.router.mock_worker import Faults, MockWorker

Check = Callable[[Front, MockWorker, Any], Coroutine[Any, Any, None]]
Header = tuple[str, str]

NAMES = st.from_regex(r"x-[a-z0-9!#$%&'*+.^_`|~-]{1,12}", fullmatch=True)
VALUES = st.text(st.characters(min_codepoint=0x21, max_codepoint=0xFF, exclude_characters="\x7f"))
SEVERAL = st.lists(st.tuples(NAMES, VALUES), max_size=4)
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)
BODIES = st.binary(max_size=200) | st.from_regex(
    rb'\{("[a-z\\u00e9"{ }]{0,9}" ?: ?[0-9.e"{}\[\]]{0,6},? ?){0,5}\}', fullmatch=True
)
LINES = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=20)
EVENTS = st.lists(st.tuples(st.sampled_from(["data: ", ": ", "event: ", "id:", ""]), LINES))


def every(check: Check, cases: st.SearchStrategy[Any], count: int = 80) -> None:
    """Check that many examples against one gateway in front of one mock worker."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        worker = runner.run(MockWorker(Faults()).start())
        front = Front([worker])
        runner.run(front.__aenter__())
        front.gateway.health = SimpleNamespace(reported=lambda worker, outcome: None)
        try:
            settings(max_examples=count)(
                given(cases)(lambda case: runner.run(check(front, worker, case)))
            )()
        finally:
            runner.run(front.__aexit__())
            runner.run(worker.kill())


def pieces(data: bytes, seed: int) -> list[bytes]:
    """``data`` in random pieces."""
    draw = random.Random(seed)
    cuts = sorted(draw.randrange(len(data) + 1) for _ in range(draw.randrange(6)))
    return [data[i:j] for i, j in zip([0, *cuts], [*cuts, len(data)], strict=True) if i < j]


def framed(status: int, kind: str, headers: list[Header], body: bytes, how: str, seed: int) -> str:
    """The text of an answer; ``how``: its length is told, it comes in chunks, or until the end."""
    lines = [f"HTTP/1.1 {status} Any", f"Content-Type: {kind}"]
    lines += [f"{name}: {value}" for name, value in headers]
    if how == "length":
        lines.append(f"Content-Length: {len(body)}")
    elif how == "chunks":
        lines.append("Transfer-Encoding: chunked")
        body = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces(body, seed)) + b"0\r\n\r\n"
    return "\r\n".join([*lines, "", body.decode("latin-1")])


def test_requests_reach_the_worker_as_they_came() -> None:
    """Target, headers in order and body; whole or in chunks."""

    async def check(front: Front, worker: MockWorker, case: Any) -> None:
        path, query, headers, body, seed = case
        worker.seen.clear()
        target = f"{path}?{query}" if query else path
        lines = [f"POST {target} HTTP/1.1", "Host: x"] + [f"{k}: {v}" for k, v in headers]
        if seed % 2:
            chunks = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces(body, seed))
            lines, data = [*lines, "Transfer-Encoding: chunked"], chunks + b"0\r\n\r\n"
        else:
            lines, data = [*lines, f"Content-Length: {len(body)}"], body
        async with Connection(front.url) as connection:
            connection.writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + data)
            await connection.read()
        (seen,) = worker.seen
        assert (seen.target, seen.body) == (target, body)
        ours = [(k.decode(), v.decode("latin-1")) for k, v in seen.headers if k[:2] == b"x-"]
        sent = [(k, v) for k, v in headers if k != "x-request-id"]
        assert [h for h in ours if h[0] not in ("x-request-id", "x-radixlm-journal")] == sent

    query = st.from_regex(r"[a-zA-Z0-9%&=+._~-]{0,20}", fullmatch=True)
    every(
        check, st.tuples(st.sampled_from(DATA_ROUTES), query, SEVERAL, BODIES, st.integers(0, 99))
    )


def test_answers_reach_the_client_as_they_came() -> None:
    """Status, headers in order and body, of any type and form."""

    async def check(front: Front, worker: MockWorker, case: Any) -> None:
        status, kind, headers, body, how, seed = case
        worker.faults.raw = framed(status, kind, headers, body, how, seed)
        worker.faults.until_close = how == "end"
        answer = await ask(front.url, "POST", "/v1/chat/completions", b"{}")
        assert (answer.status, answer.body, answer.is_complete) == (status, body, True)
        assert answer.header(b"content-type") == kind.encode()
        ours = [(k.decode(), v.decode("latin-1")) for k, v in answer.headers if k[:2] == b"x-"]
        added = ("x-request-id", "x-smg-routed-worker-id")
        assert [h for h in ours if h[0] not in added] == [h for h in headers if h[0] not in added]

    kinds = st.sampled_from(["application/json", "audio/wav", "text/plain", "application/x-ndjson"])
    statuses = st.sampled_from([200, 201, 400, 404, 413, 422, 501])
    how = st.sampled_from(["length", "chunks", "end"])
    every(check, st.tuples(statuses, kinds, SEVERAL, BODIES, how, st.integers(0, 99)))


def test_streams_reach_the_client_as_they_came() -> None:
    """Events, comments, empty blocks and an end without an empty line."""

    async def check(front: Front, worker: MockWorker, case: Any) -> None:
        events, end, tail, how, seed = case
        blocks = [f"{name}{line}" for name, line in events]
        body = "".join(block + end + end for block in blocks).encode() + tail
        body = re.sub(rb"^: j .*", b"", body, flags=re.MULTILINE)  # those are the journal's
        worker.faults.raw = framed(200, "text/event-stream", [], body, how, seed)
        worker.faults.until_close = how == "end"
        answer = await ask(front.url, "POST", "/v1/chat/completions", {"stream": True})
        assert (answer.status, answer.body, answer.is_complete) == (200, body, True)

    tails = st.sampled_from([b"", b"data: x", b"\n", b"data: [DONE]\n\n", b"\xff\xfe\n\n"])
    ends, how = st.sampled_from(["\n", "\r\n"]), st.sampled_from(["length", "chunks", "end"])
    every(check, st.tuples(EVENTS, ends, tails, how, st.integers(0, 99)))


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
def test_workers_that_answer_nonsense(kind: str) -> None:
    """The client gets a whole answer that is well formed, or a connection that ends early; the next
    client gets its own answer."""

    async def check(front: Front, worker: MockWorker, seed: int) -> None:
        how = ("length", "chunks", "end")[seed % 3]
        body = b'{"a": 1}' if kind == "application/json" else b"data: {}\n\ndata: [DONE]\n\n"
        data = framed(200, kind, [("x-a", "b")], body, how, seed).encode("latin-1")
        worker.faults.raw = garbled(random.Random(seed), data).decode("latin-1")
        worker.faults.until_close = True
        request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        async with asyncio.timeout(5):
            answer = await exchange(front.url, request + b"Content-Length: 2\r\n\r\n{}", 0.05)
        if answer and b"content-length" in answer.lower():
            assert len(split_answers(answer)) <= 1, (worker.faults.raw, answer)
        worker.faults = Faults()
        honest: Response = await front.chat(user=str(seed))
        assert honest.json["echo"]["user"] == str(seed)

    every(check, st.integers(0, 1 << 30), 50)
