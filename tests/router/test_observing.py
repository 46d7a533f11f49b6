"""Metrics over HTTP, the workers' metrics joined, and the logs."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import orjson
import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from radixlm.base.errors import ConfigError
from radixlm.base.record import replace
from radixlm.router.answer import Answer
from radixlm.router.app import Gateway
from radixlm.router.call import Call
from radixlm.router.launch import bind
from radixlm.router.logs import AccessLog, set_up
from radixlm.router.metrics_routes import joined
from radixlm.router.options import Options
from radixlm.router.worker import Worker
from tests.router import client

PARTS = ("radixlm.router.metrics_routes:attach", "radixlm.router.logs:attach")
Start = Callable[..., Awaitable[tuple[Gateway, str]]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """``await start(parts, **options)``: a gateway and its url."""
    running: list[Gateway] = []

    async def begin(parts: tuple[str, ...] = PARTS, **options: Any) -> tuple[Gateway, str]:
        made = Gateway(replace(Options(prometheus_port=-1), **options), parts=parts)
        sock = bind("127.0.0.1", 0)
        await made.start(sock)
        running.append(made)
        return made, f"http://127.0.0.1:{sock.getsockname()[1]}"

    yield begin
    for gateway in running:
        await asyncio.wait_for(gateway.stop(), 10)


def _value(text: str, name: str, **labels: str) -> float:
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and set(labels.items()) <= set(sample.labels.items())
    )


async def test_metrics_on_both_ports(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        _, url = await start(prometheus_port=0, prometheus_host="127.0.0.1")
    port = re.search(r"metrics on http://127.0.0.1:(\d+)/metrics", caplog.text)
    assert port is not None
    await client.ask(url, "GET", "/nowhere")
    for _ in range(2):
        first = (await client.ask(f"http://127.0.0.1:{port[1]}", "GET", "/metrics")).body.decode()
    second = (await client.ask(url, "GET", "/metrics")).body.decode()
    assert _value(first, "smg_http_responses_total", status_code="404") == 1
    assert _value(second, "smg_http_requests_total", path="other") == 1
    assert _value(second, "smg_http_inflight_request_age_count") == 1  # the scrape itself


async def test_a_taken_port_is_told(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        _, url = await start(prometheus_port=port, prometheus_host="127.0.0.1")
    assert "GET /metrics only" in caplog.text
    assert (await client.ask(url, "GET", "/metrics")).status == 200


def _engine(count: int) -> bytes:
    registry = CollectorRegistry()
    Counter("sglang:num_requests", "Requests.", ["model"], registry=registry).labels("m").inc(count)
    Histogram("sglang:ttft", "Time.", registry=registry, buckets=(1, 2)).observe(count)
    return generate_latest(registry)


async def test_engine_metrics(start: Start) -> None:
    urls = []
    for number in range(3):
        worker, url = await start(parts=())

        async def metrics(call: Call, number: int = number) -> Answer:
            return Answer(200 if number else 503, _engine(number), "text/plain")

        worker.routes.add("GET", "/metrics", metrics, "open")
        urls.append(url)
    gateway, url = await start()
    gateway.registry = []
    found = await client.ask(url, "GET", "/engine_metrics")
    assert (found.status, found.body) == (500, b"No available workers")
    gateway.registry = [Worker(one) for one in (*urls, "http://127.0.0.1:1")]
    text = (await client.ask(url, "GET", "/engine_metrics")).body.decode()
    assert _value(text, "sglang_num_requests_total", worker_addr=urls[1], model="m") == 1
    assert _value(text, "sglang_num_requests_total") == 3
    assert _value(text, "sglang_ttft_bucket", le="1.0", worker_addr=urls[2]) == 0
    assert text.count("# TYPE sglang_ttft histogram") == 1
    gateway.registry = [Worker(urls[0])]
    assert (await client.ask(url, "GET", "/engine_metrics")).body == b"All backend requests failed"


def test_joined_is_what_the_reader_makes_of_each() -> None:
    texts = {"http://a:1": _engine(1).decode(), 'http://b"\\:1': _engine(2).decode()}
    expected = {
        (sample.name.replace(":", "_"), *sorted(sample.labels.items()), url, sample.value)
        for url, text in texts.items()
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    found = set()
    for family in text_string_to_metric_families(joined(texts)):
        for sample in family.samples:
            url = sample.labels.pop("worker_addr")
            found.add((sample.name, *sorted(sample.labels.items()), url, sample.value))
    assert found == expected


class _Ended:
    """A client's stream after its end."""

    status, num_bytes, is_gone = 200, 1234, False

    def __init__(self, call: Call) -> None:
        self.begun_s = call.arrival_s + 0.25


def _access(is_json: bool) -> str:
    stream = StringIO()
    log = AccessLog(is_json, [logging.StreamHandler(stream)])
    call = Call("POST", "/v1/completions", "", [], b"", "10.0.0.9")
    call.worker, call.num_tries, call.request_id = Worker("http://w:1"), 2, "cmpl-1"
    log.ended(call, _Ended(call))
    assert not stream.getvalue()  # it waits
    log.flush()
    log.flush()
    return stream.getvalue()


def test_access_log() -> None:
    line = _access(is_json=False)
    end = r"worker http://w:1 tries 2 id cmpl-1\n"
    assert re.fullmatch(
        r"\[\S+\] ACCESS 10.0.0.9 POST /v1/completions 200 1234 B \S+ s \(head 0.250\) " + end, line
    )
    shown = orjson.loads(_access(is_json=True))
    assert shown["status"] == 200 and shown["worker"] == "http://w:1" and shown["tries"] == 2
    assert shown["head_seconds"] == 0.25


@pytest.fixture
def handlers() -> Iterator[list[logging.Handler]]:
    """The log's handlers, put back after the test."""
    root = logging.getLogger()
    before = list(root.handlers)
    formats = [handler.formatter for handler in before]
    yield root.handlers
    for handler in [handler for handler in root.handlers if handler not in before]:
        root.removeHandler(handler)
        handler.close()
    for handler, formatter in zip(before, formats, strict=True):
        handler.setFormatter(formatter)


def test_log_dir_and_json(tmp_path: Path, handlers: list[logging.Handler]) -> None:
    set_up(Options(log_dir=str(tmp_path / "logs"), log_json=True))
    logging.getLogger("radixlm.router").warning("a\nb")
    lines = (tmp_path / "logs" / "radixlm-router.log").read_text().splitlines()
    assert orjson.loads(lines[-1])["message"] == "a\nb"
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--log-dir"):
        set_up(Options(log_dir=str(tmp_path / "file")))
