"""Dispatch before mock workers: bytes, headers, retries, outcomes, streams that move."""

from __future__ import annotations

import asyncio
import errno
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixlm.router.call import Call
from radixlm.router.forwarding import is_stream, seen_model, to_client, to_worker
from radixlm.router.options import Options
from radixlm.router.retry import backoff
from radixlm.router.worker import State, Worker
from tests.router.client import Connection, Response, ask, until
from tests.router.conftest import StartWorkers
from tests.router.front import Front

BODY = b'{ "model":"mock", "messages":[], "x": 1.50, "rid":"r", "u":"\\u00e9\xc3\xa9", "x": 2 }'


async def test_bytes_pass_as_they_came(start_workers: StartWorkers) -> None:
    (worker,) = await start_workers(1)
    async with Front([worker]) as front:
        answer = await ask(front.url, "POST", "/v1/chat/completions?a=%20b", BODY)
        direct = await ask(worker.url, "POST", "/v1/chat/completions?a=%20b", BODY)
    assert [seen.body for seen in worker.seen] == [BODY, BODY]
    assert {seen.target for seen in worker.seen} == {"/v1/chat/completions?a=%20b"}
    assert answer.status == direct.status == 200
    assert answer.body.replace(b"cmpl-1", b"cmpl-2") == direct.body
    assert front.outcomes(worker) == ["ok"] and front.is_idle


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/embeddings", "/responses"])
async def test_openai_routes_without_v1(start_workers: StartWorkers, path: str) -> None:
    (worker,) = await start_workers(1)
    async with Front([worker]) as front:
        await ask(front.url, "POST", f"{path}?a=1", BODY)
    assert [(seen.target, seen.body) for seen in worker.seen] == [(f"/v1{path}?a=1", BODY)]


@pytest.mark.parametrize(
    ("method", "path", "says"),
    [("GET", "/v1/realtime", "transcriptions"), ("POST", "/v1/interactions", "/v1/responses")],
)
async def test_routes_of_other_gateways(
    start_workers: StartWorkers, method: str, path: str, says: str
) -> None:
    (worker,) = await start_workers(1)
    async with Front([worker]) as front:
        answer = await ask(front.url, method, path)
    assert answer.status == 501 and says.encode() in answer.body and not worker.seen


async def test_all_headers_pass_but_hop_by_hop(start_workers: StartWorkers) -> None:
    (worker,) = await start_workers(1)
    sent = [("X-Foo", "a"), ("x-foo", "b"), ("User-Agent", "me"), ("traceparent", "00-1-2-01")]
    hops = [("Connection", "x-mine, keep-alive"), ("X-Mine", "1"), ("TE", "trailers")]
    async with Front([worker]) as front:
        answer = await front.chat(headers=[*sent, *hops, ("X-Request-Id", "abc")])
    seen = worker.seen[0].headers
    for name, value in sent:
        assert (name.lower().encode(), value.encode()) in seen
    assert not {b"te", b"x-mine", b"expect"} & {name for name, _ in seen}
    assert [v for k, v in seen if k == b"x-request-id"] == [b"abc"]
    assert [v for k, v in answer.headers if k == b"x-request-id"] == [b"abc"]
    assert answer.header(b"x-worker-id") == worker.worker_id.encode()
    assert answer.header(b"x-smg-routed-worker-id") == front.workers[0].id.encode()


async def test_a_drawn_id_is_sent_to_the_worker(start_workers: StartWorkers) -> None:
    (worker,) = await start_workers(1)
    async with Front([worker]) as front:
        answer = await front.chat()
        await front.chat(headers=[("X-Correlation-Id", "a-b")])
    drawn = answer.header(b"x-request-id")
    assert drawn and drawn.startswith(b"chatcmpl-")  # the worker adds its own prefix
    assert worker.seen[0].header(b"x-request-id") == drawn.removeprefix(b"chatcmpl-")
    assert worker.seen[1].header(b"x-request-id") == b"a-b"


async def test_a_worker_gets_its_own_key(start_workers: StartWorkers) -> None:
    (worker,) = await start_workers(1, api_key="theirs")
    async with Front([worker]) as front:
        front.workers[0].api_key = "theirs"
        assert (await front.chat(headers=[("Authorization", "Bearer mine")])).status == 200
        assert (await front.chat()).status == 200


@pytest.mark.parametrize("fault", [{"status": 503}, {"status": 429}, {"crash": True}])
async def test_another_worker_at_once(start_workers: StartWorkers, fault: dict[str, Any]) -> None:
    """The wait before a second try is a minute here: none is made."""
    bad, good = [*await start_workers(1, **fault), *await start_workers(1)]
    async with Front(
        [bad, good], retry_initial_backoff_ms=60_000, retry_max_backoff_ms=60_000
    ) as f:
        answers = [await f.chat() for _ in range(4)]
    assert [answer.status for answer in answers] == [200] * 4
    expected = {"status": "busy", "crash": "unreachable"}[next(iter(fault))]
    assert set(f.outcomes(bad)) == {expected} and f.is_idle


@pytest.mark.parametrize(
    ("status", "tries", "outcome"),
    [
        *[(status, 1, "client") for status in (400, 404, 422, 501)],
        *[(408, 5, "client"), (429, 5, "busy"), (503, 5, "busy")],
        *[(500, 5, "error"), (502, 5, "error"), (504, 5, "error")],
    ],
)
async def test_statuses(start_workers: StartWorkers, status: int, tries: int, outcome: str) -> None:
    (worker,) = await start_workers(1, status=status)
    async with Front([worker], disable_circuit_breaker=True) as front:
        answer = await front.chat()
    assert answer.status == status and answer.json == {"error": f"mock failure {status}"}
    assert len(worker.seen) == tries
    assert front.outcomes(worker) == [outcome] * tries and front.is_idle


async def test_no_retries_where_they_are_disabled(start_workers: StartWorkers) -> None:
    workers = await start_workers(2, status=500)
    async with Front(workers, disable_retries=True) as front:
        assert (await front.chat()).status == 500
    assert sum(len(worker.seen) for worker in workers) == 1


async def test_retry_after_is_obeyed_and_sent(
    start_workers: StartWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("radixlm.router.dispatch.asyncio", SimpleNamespace(sleep=sleep))
    (worker,) = await start_workers(1, status=429, retry_after="7")
    async with Front([worker]) as front:
        answer = await front.chat()
        assert waits.count(7.0) == 4 and len(worker.seen) == 5
        assert answer.status == 429 and answer.header(b"retry-after") == b"7"
        worker.faults.retry_after = "600"  # too long to wait for: the client shall know
        assert (await front.chat()).header(b"retry-after") == b"600"
    assert len(worker.seen) == 6


async def test_a_poison_request_fails_alone(start_workers: StartWorkers) -> None:
    workers = await start_workers(4, cut_after=0, reset=True)
    async with Front(workers) as front:
        answer = await front.chat()
    assert answer.status == 500 and answer.json["error"]["code"] == "request_lost_workers"
    assert sum(len(worker.seen) for worker in workers) == 2


async def test_a_worker_that_dies_on_a_kept_connection_counts(start_workers: StartWorkers) -> None:
    workers = await start_workers(4)
    async with Front(workers) as front:
        for _ in workers:
            assert (await front.chat()).status == 200
        for worker in workers:
            worker.faults.crash = True
        assert (await front.chat()).json["error"]["code"] == "request_lost_workers"
    assert sum(len(worker.seen) for worker in workers) == 4 + 2


async def test_calls_leave_a_worker_that_hangs(start_workers: StartWorkers) -> None:
    hung, other = await start_workers(2)
    async with Front([hung, other]) as front:
        for stream in (True, False):
            hung.faults.hang, hung.faults.stall_after = not stream, 700
            before, moved = len(hung.seen), other.num_resumed
            async with Connection(front.url) as connection:
                body = {"messages": [], "stream": stream, "max_tokens": 12}
                await connection.send("POST", "/v1/chat/completions", body)
                await until(lambda n=before: len(hung.seen) > n)
                if stream:
                    await until(lambda: any(s.first_s for s in front.workers[0].streams))
                front.gateway.registry.move(front.workers[0], State.UNHEALTHY)
                answer = await connection.read()
            assert answer.status == 200 and answer.is_complete
            assert other.num_resumed - moved == stream
            assert not stream or answer.text == "".join(f"t{i} " for i in range(12))
            front.gateway.registry.move(front.workers[0], State.READY)
        assert front.is_idle


async def test_calls_leave_a_worker_that_hangs_on_a_kept_connection(
    start_workers: StartWorkers,
) -> None:
    """For another one, which may have come only after the first was given up."""
    for is_late in (False, True):
        hung, other = await start_workers(2)
        async with Front([hung]) as front:
            assert (await front.chat()).status == 200
            hung.faults.hang = True
            if not is_late:
                front.join(Worker(other.url))
            front.gateway.policies.by_pool.clear()
            asking = asyncio.ensure_future(front.chat())
            await until(lambda worker=hung: len(worker.seen) == 2)
            front.gateway.registry.move(front.workers[0], State.UNHEALTHY)
            if is_late:
                front.join(Worker(other.url))
            assert (await asyncio.wait_for(asking, 5)).status == 200
            assert (len(hung.seen), len(other.seen)) == (2, 1)


async def test_a_gateway_without_descriptors_blames_no_worker(
    start_workers: StartWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    (worker,) = await start_workers(1)
    async with Front([worker]) as front:

        async def connect(*_: Any, **__: Any) -> Any:
            raise OSError(errno.EMFILE, "Too many open files")

        async with Connection(front.url) as connection:
            with monkeypatch.context() as patch:
                patch.setattr(asyncio.get_running_loop(), "create_connection", connect)
                await connection.send("POST", "/generate", {})
                answer = await connection.read()
            assert answer.status == 503 and answer.header(b"retry-after") == b"1"
            assert b"ulimit -n" in answer.body
            await connection.send("POST", "/generate", {})
            assert (await connection.read()).status == 200
    assert front.outcomes(worker) == ["ok"]


async def test_an_engine_error_is_not_repeated(start_workers: StartWorkers) -> None:
    body = b'{"error":{"code":"engine_error"}}'
    raw = b"HTTP/1.1 500 E\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    workers = await start_workers(2, raw=(raw % (len(body), body)).decode())
    async with Front(workers) as front:
        assert (await front.chat()).body == body
    assert sum(len(worker.seen) for worker in workers) == 1


async def test_html_is_no_answer(start_workers: StartWorkers) -> None:
    bad, good = [*await start_workers(1, html=True), *await start_workers(1)]
    async with Front([bad, good]) as front:
        assert [(await front.chat()).status for _ in range(2)] == [200, 200]
    assert set(front.outcomes(bad)) == {"error"}


async def test_no_worker_is_a_503_that_says_when_to_come_back() -> None:
    async with Front([]) as front:
        answer = await front.chat()
    assert answer.status == 503 and answer.header(b"retry-after") == b"1"
    error = answer.json["error"]
    assert error["code"] == "no_available_workers" and set(error) >= {"message", "type", "param"}


async def test_errors_have_the_form_of_their_route() -> None:
    claude = [("anthropic-version", "2023-06-01")]
    kinds = {404: "not_found_error", 503: "overloaded_error"}
    async with Front([]) as front:
        for path, status in (("/api/chat", 503), ("/api/create", 404)):
            answer = await ask(front.url, "POST", path, {"messages": []})
            assert answer.status == status and isinstance(answer.json["error"], str)
        for path, headers, status in (
            ("/v1/messages", [], 503),
            ("/v1/messages/other", [], 404),
            ("/v1/other", claude, 404),
        ):
            answer = await ask(front.url, "POST", path, {"messages": []}, headers)
            assert answer.status == status and answer.json["type"] == "error"
            assert answer.json["error"]["type"] == kinds[status]
        tags = await ask(front.url, "GET", "/api/tags")
        assert tags.status == 503 and isinstance(tags.json["error"], str)


async def test_a_request_waits_for_a_worker_that_joins(start_workers: StartWorkers) -> None:
    (worker,) = await start_workers(1)
    async with Front([], disable_retries=True) as front:
        front.gateway.registry.add(Worker(worker.url))
        assert (await front.chat()).status == 200


async def test_several_models(start_workers: StartWorkers) -> None:
    one, two = await start_workers(2)
    async with Front([], enable_igw=True) as front:
        front.join(Worker(one.url, model_id="one"))
        front.join(Worker(two.url, model_id="two", labels={"policy": "random"}))
        assert [(await front.chat(model="two")).status for _ in range(3)] == [200] * 3
        answer = await front.chat(model="three")
        form = b'--B\r\ncontent-disposition: form-data; name="model"\r\n\r\ntwo\r\n--B--\r\n'
        assert (await ask(front.url, "POST", "/v1/audio/transcriptions", form)).status == 200
        by_pool = front.gateway.policies.by_pool
        names = {model: policy.name for (model, _), policy in by_pool.items()}
        assert names == {"one": "round_robin", "two": "random"}
    assert (len(one.seen), len(two.seen)) == (0, 4)
    assert answer.status == 404 and answer.json["error"]["code"] == "model_not_found"


async def test_a_model_has_further_names(start_workers: StartWorkers) -> None:
    (worker,) = await start_workers(1)
    async with Front([], enable_igw=True, model_alias=("gpt-4=one", "own=one")) as front:
        front.join(Worker(worker.url, model_id="one"))
        front.join(Worker(worker.url, model_id="own", dp_rank=1))
        models = ("gpt-4", "one", "own", "gpt-3")
        assert [(await front.chat(model=model)).status for model in models] == [200] * 3 + [404]
    told = [orjson.loads(seen.body)["model"] for seen in worker.seen]
    assert told == ["one", "one", "own"]  # a worker's own name comes first


async def test_a_key_stays_with_its_worker_under_another_policy(
    start_workers: StartWorkers,
) -> None:
    workers = await start_workers(3)
    async with Front(workers, routing_key_override=True, policy="round_robin") as front:
        body = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
        for key in ("a", "b"):
            before = [len(one.seen) for one in workers]
            for _ in range(4):
                header = [("x-smg-routing-key", key)]
                await ask(front.url, "POST", "/v1/chat/completions", body, header)
            got = [len(one.seen) - num for one, num in zip(workers, before, strict=True)]
            assert sorted(got) == [0, 0, 4]
        before = [len(one.seen) for one in workers]
        for _ in range(3):
            await front.chat()
        assert [len(one.seen) - n for one, n in zip(workers, before, strict=True)] == [1, 1, 1]


async def test_a_rank_is_told_in_the_body(start_workers: StartWorkers) -> None:
    (worker,) = await start_workers(1)
    async with Front([]) as front:
        front.join(Worker(worker.url, dp_rank=3))
        await front.chat(data_parallel_rank=0)
    assert orjson.loads(worker.seen[0].body)["data_parallel_rank"] == 3


async def test_multipart_goes_through(start_workers: StartWorkers) -> None:
    (worker,) = await start_workers(1)
    body = (
        b'--B\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n\x00}\xff\r\n'
        b'--B\r\ncontent-disposition: form-data; name="model"\r\n\r\nwhisper\r\n--B--\r\n'
    )
    async with Front([]) as front:
        front.join(Worker(worker.url, dp_rank=0))
        answer = await ask(front.url, "POST", "/v1/audio/transcriptions", body)
    assert answer.status == 200 and worker.seen[0].body == body
    assert seen_model(body) == "whisper"


async def test_a_stream_is_the_workers_stream(start_workers: StartWorkers) -> None:
    (worker,) = await start_workers(1)
    async with Front([worker]) as front:
        answer = await front.chat(stream=True, max_tokens=20)
        direct = await ask(worker.url, "POST", "/v1/chat/completions", worker.seen[0].body)
    assert answer.is_complete and answer.body == direct.body.replace(b"cmpl-2", b"cmpl-1")
    assert worker.seen[0].header(b"x-radixlm-journal") == b"1"
    assert front.outcomes(worker) == ["ok"] and front.is_idle


def _without_id(answer: Response) -> bytes:
    """The first worker says its id in its events, a resumed one does not."""
    events = [orjson.loads(orjson.dumps(event)) for event in answer.events]
    for event in events:
        if isinstance(event, dict):
            event.pop("worker_id", None)
    return orjson.dumps(events)


@pytest.mark.parametrize("disable_retries", [False, True])
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/generate"])
async def test_a_stream_outlives_its_workers(
    start_workers: StartWorkers, route: str, disable_retries: bool
) -> None:
    """Cut after each number of bytes, again and again."""
    workers = await start_workers(3)
    body = {"prompt": "p", "text": "t", "messages": [], "stream": True, "max_tokens": 6}
    whole = None
    for cut_after in range(150, 1400, 31):
        async with Front(workers, disable_retries=disable_retries) as front:
            for worker in workers:
                worker.faults.cut_after, worker.faults.cut_first = cut_after, 1
                worker.num_requests = 0
            answer = await ask(front.url, "POST", route, body)
            if not answer.status or answer.status >= 500:  # before its first event
                assert disable_retries or cut_after < 500
                continue
            assert answer.events[-1] == "[DONE]" and answer.is_complete
            if b'"error"' not in answer.body:
                whole = whole or _without_id(answer)
                assert _without_id(answer) == whole
            else:
                assert disable_retries or cut_after < 500
            assert front.is_idle
    assert whole


async def test_a_stream_that_cannot_go_on_ends_with_an_error(start_workers: StartWorkers) -> None:
    workers = await start_workers(2, cut_after=600)
    async with Front(workers) as front:
        for worker in front.workers:
            worker.facts = {}
        for route, last in (
            ("/v1/chat/completions", b"data: [DONE]\n\n"),
            ("/v1/messages", b"}}\n\n"),
            ("/v1/responses", b"}\n\n"),
        ):
            answer = await ask(front.url, "POST", route, {"stream": True, "max_tokens": 50})
            assert answer.status == 200 and answer.is_complete
            assert b"the worker of this stream was lost" in answer.body
            assert answer.body.endswith(last)
    assert front.is_idle and set(front.reports[0][1:]) == {"cut"}


async def test_a_stream_moves_on_demand(start_workers: StartWorkers) -> None:
    slow, other = await start_workers(2, gap_s=0.005)
    async with Front([slow, other], disable_retries=True) as front:
        first = front.workers[0]
        async with Connection(front.url) as connection:
            body = {"messages": [], "stream": True, "max_tokens": 30}
            await connection.send("POST", "/v1/chat/completions", body)
            await until(lambda: slow.num_inflight == 1 and bool(first.streams))
            (stream,) = first.streams
            await until(lambda: stream.journal.num_blocks > 3)
            stream.move()
            answer = await connection.read()
        assert answer.text == "".join(f"t{i} " for i in range(30))
        assert (slow.num_left, other.num_resumed) == (1, 1)
        assert front.outcomes(slow) == [] and front.outcomes(other) == ["ok"]
        assert first.state is State.READY and front.is_idle


async def test_a_stream_that_moves_to_dead_workers_ends(start_workers: StartWorkers) -> None:
    """Tries after a move are counted, and their workers blamed."""
    (slow,) = await start_workers(1, gap_s=0.005)
    dead = await start_workers(2)
    async with Front([slow, *dead], policy="passthrough") as front:
        first = front.workers[0]
        async with Connection(front.url) as connection:
            body = {"messages": [], "stream": True, "max_tokens": 10_000}
            await connection.send("POST", "/v1/chat/completions", body)
            await until(lambda: any(stream.first_s for stream in first.streams))
            for worker in dead:
                await worker.kill()
            front.gateway.registry.move(first, State.UNHEALTHY)
            answer = await asyncio.wait_for(connection.read(), 10)
        assert answer.is_complete and b"data: [DONE]" in answer.body
        assert 1 < len(front.reports) <= front.gateway.options.num_tries
        assert {url for url, _ in front.reports} == {worker.url for worker in dead}
        assert front.is_idle


async def test_a_client_that_leaves_ends_the_request(start_workers: StartWorkers) -> None:
    (worker,) = await start_workers(1, gap_s=0.005)
    async with Front([worker]) as front:
        for body in ({"stream": True, "max_tokens": 10_000}, {"max_tokens": 1}):
            worker.faults.hang = "stream" not in body
            left = worker.num_left
            async with Connection(front.url) as connection:
                await connection.send("POST", "/v1/chat/completions", body)
                await until(lambda: worker.num_inflight == 1)
            await until(lambda before=left: worker.num_left == before + 1)
            await until(lambda: front.is_idle)
    assert front.outcomes(worker) == []


async def test_lines_of_another_form_are_blocks_too(start_workers: StartWorkers) -> None:
    events = b"data: {}\r\n\r\ndata: [DONE]\r\n\r\n"
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    (worker,) = await start_workers(1, raw=(head + events).decode(), until_close=True)
    async with Front([worker]) as front, Connection(front.url) as connection:
        await connection.send("POST", "/generate", {"stream": True})
        got = b""
        async for part in connection.chunks(Response()):
            got += part
            if got == events:  # while the worker's connection is still open
                break
    assert got == events


async def test_speech_goes_through(
    start_workers: StartWorkers, caplog: pytest.LogCaptureFixture
) -> None:
    head = "HTTP/1.1 200 OK\r\ncontent-type: audio/pcm\r\ntransfer-encoding: chunked\r\n\r\n"
    (worker,) = await start_workers(1, raw=head + "4\r\nabcd\r\n0\r\n\r\n")
    async with Front([worker]) as front:
        left: list[bool] = []
        front.gateway.observers.append(lambda call, client: left.append(client.is_gone))
        answer = await ask(front.url, "POST", "/v1/audio/speech", {"input": "hi"})
        assert answer.body == b"abcd" and answer.is_complete
        worker.faults.raw, worker.faults.cut_after = head + "4\r\nabcd\r\n", len(head) + 6
        cut = await ask(front.url, "POST", "/v1/audio/speech", {"input": "hi"})
    assert not cut.is_complete and front.outcomes(worker) == ["ok", "cut"]
    assert left == [False, False]
    assert not [one for one in caplog.records if one.exc_info]  # a worker's fault is no traceback


async def test_any_worker_answers_ollamas_lists(start_workers: StartWorkers) -> None:
    async with Front([]) as front:
        assert (await ask(front.url, "GET", "/api/tags")).status == 503
    dead, other = await start_workers(2, raw="HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
    await dead.kill()
    async with Front([dead, other]) as front:
        assert (await ask(front.url, "GET", "/api/tags")).body == b"{}"


async def test_a_slow_client_holds_the_worker_up(start_workers: StartWorkers) -> None:
    (worker,) = await start_workers(1, pad=20_000, echo=False)
    async with Front([worker]) as front, Connection(front.url) as connection:
        transport: Any = connection.writer.transport
        transport.pause_reading()
        body = {"messages": [], "stream": True, "max_tokens": 1000}
        await connection.send("POST", "/v1/chat/completions", body)
        await until(lambda: bool(front.workers[0].streams))
        (stream,) = front.workers[0].streams
        await until(lambda: bool(stream._exchange and stream._exchange._connection._is_paused))
        transport.resume_reading()
        got = bytearray()
        while not got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            got += await asyncio.wait_for(connection.reader.read(1 << 20), 10)
    assert got.count(b"data: {") == 1000


async def test_gauges_of_the_policies(start_workers: StartWorkers) -> None:
    (worker,) = await start_workers(1)
    async with Front([worker], policy="cache_aware") as front:
        await front.chat()
        text = front.gateway.metrics.exposition().decode()
    assert 'radix_router_prefix_tree_bytes{model="",worker_type="regular"} 4' in text


@given(st.integers(2, 10_000))
def test_backoff_stays_in_its_bounds(attempt: int) -> None:
    assert 0.04 <= backoff(Options(), attempt) <= 36.0
    assert 0.04 <= backoff(Options(), 2) <= 0.06


@given(st.dictionaries(st.text(max_size=5), st.integers(0, 9) | st.text(), max_size=5))
def test_a_body_with_added_fields_is_the_body_and_these(fields: dict[str, Any]) -> None:
    call = Call("POST", "/generate", "", [], orjson.dumps(fields))
    both = orjson.loads(call.overridden({"data_parallel_rank": 1, "z": [1]}))
    assert both == fields | {"data_parallel_rank": 1, "z": [1]}


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/generate", b'{"stream" : true}', True),
        ("/generate", b'{"text":"\\"stream\\":true"}', False),
        ("/generate", b'{"stream":false}', False),
        ("/api/chat", b"{}", True),
        ("/api/chat", b'{"stream":false}', False),
    ],
)
def test_a_stream_is_seen_in_the_bytes(path: str, body: bytes, expected: bool) -> None:
    assert is_stream(Call("POST", path, "", [], body)) is expected


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"prompt": [1, 2, 3]}, 3),
        ({"prompt": [[1, 2], [3]]}, 3),
        ({"input_ids": [1, 2], "text": "a" * 100}, 2),
        ({"input": ["abcd", "efgh"]}, 3),
        ({"prompt": "abcdefgh"}, 3),
    ],
)
def test_token_ids_count_as_tokens(fields: dict[str, Any], count: int) -> None:
    call = Call("POST", "/v1/completions", "", [], orjson.dumps(fields))
    assert call.num_prompt_tokens == count


def test_headers_that_the_gateway_adds_stand_once() -> None:
    worker = [(b"x-request-id", b"theirs"), (b"server", b"s"), (b"content-length", b"4")]
    assert to_client(worker, [(b"x-request-id", b"ours")]) == [(b"server", b"s")]
    call = Call("POST", "/generate", "", [(b"x-tenant", b"forged"), (b"a", b"b")], b"")
    call.request_id = "id"
    expected = [(b"a", b"b"), (b"x-request-id", b"id"), (b"x-tenant", b"real")]
    assert to_worker(call, [(b"x-tenant", b"real")]) == expected
