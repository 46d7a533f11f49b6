"""The gateway's page: its files, its feed, its access rules."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import pytest

from radixlm.router.app import Gateway
from radixlm.router.launch import bind
from radixlm.router.options import Options
from radixlm.router.page import MAX_VIEWERS
from tests.router.client import ask
from tests.router.fakes import until
from tests.router.mock_worker import MockWorker

StartWorkers = Callable[..., Awaitable[list[MockWorker]]]


class Served:
    """``async with Served(workers, **options) as served``: a whole gateway on a port."""

    def __init__(self, workers: list[MockWorker], **options: Any) -> None:
        urls = tuple(worker.url for worker in workers)
        self.gateway = Gateway(Options(worker_urls=urls, prometheus_port=-1, **options))
        self.num_workers = len(workers)

    async def __aenter__(self) -> Served:
        sock = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        await self.gateway.start(sock)
        registry = self.gateway.registry
        await until(lambda: sum(one.is_available for one in registry) == self.num_workers)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.gateway.stop()

    async def frames(self, query: str, count: int, **headers: str) -> list[tuple[str, Any]]:
        """(event, data) of the first ``count`` events; the viewer leaves then."""
        host, _, port = self.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        sent = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"GET /live/events?{query} HTTP/1.1\r\nHost: {host}\r\n{sent}\r\n".encode())
        found: list[tuple[str, Any]] = []
        name = ""
        async with asyncio.timeout(10):
            while len(found) < count:
                line = (await reader.readline()).decode().strip()
                if line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: "):
                    found.append((name, orjson.loads(line[6:])))
        writer.close()
        return found


async def test_files_are_open_and_the_feed_is_not(start_workers: StartWorkers) -> None:
    async with Served(await start_workers(1), api_key="k") as served:
        page = await ask(served.url, "GET", "/ui/")
        assert page.status == 200 and b'src="main.js"' in page.body
        assert b"default-src 'none'" in (page.header(b"content-security-policy") or b"")
        script = await ask(served.url, "GET", "/ui/views/workers.js")
        assert script.header(b"content-type") == b"text/javascript; charset=utf-8"
        headers = [("if-none-match", (script.header(b"etag") or b"").decode())]
        again = await ask(served.url, "GET", "/ui/views/workers.js", headers=headers)
        assert again.status == 304 and not again.body
        root = await ask(served.url, "GET", "/", headers=[("accept", "text/html")])
        assert (root.status, root.header(b"location")) == (307, b"ui/")
        assert (await ask(served.url, "GET", "/")).body.startswith(b"RadixLM ")
        assert (await ask(served.url, "GET", "/ui/..%2fapp.py")).status == 404
        info = (await ask(served.url, "GET", "/ui/info")).json
        assert info["is_gateway"] and info["needs_key"] and info["model"] is None
        assert (await ask(served.url, "GET", "/live/events")).status == 401


async def test_the_feed_tells_workers_and_choices(start_workers: StartWorkers) -> None:
    workers = await start_workers(2)
    async with Served(workers, policy="round_robin") as served:
        body = {"model": "mock", "messages": [{"role": "user", "content": "x"}]}
        for _ in range(4):
            assert (await ask(served.url, "POST", "/v1/chat/completions", body)).status == 200
        frames = dict(await served.frames("topics=head,workers", 3))
        assert set(frames) == {"hello", "head", "workers"}
        assert frames["head"]["state"] == "ready" and frames["head"]["running"] == 0
        told = frames["workers"]
        rows = {row["url"]: row for row in told["workers"]}
        assert set(rows) == {worker.url for worker in workers}
        assert [rows[worker.url]["routed"] for worker in workers] == [2, 2]
        assert {row["breaker"] for row in rows.values()} == {"closed"}
        counts = {one["worker"]: one["count"] for one in told["choices"]}
        assert counts == {worker.url: 2 for worker in workers}
        assert told["policy"] == "round_robin" and told["moved"] == {}
        assert {one["policy"] for one in told["choices"]} == {"round_robin"}


async def test_viewers_are_counted(start_workers: StartWorkers) -> None:
    async with Served(await start_workers(1)) as served:
        page = served.gateway.page
        assert (await ask(served.url, "GET", "/live/events?topics=steps")).status == 400
        await served.frames("topics=head", 2)
        await until(lambda: page.num_viewers == 0)
        page.num_viewers = MAX_VIEWERS
        assert (await ask(served.url, "GET", "/live/events")).status == 503


async def test_a_drain_ends_the_feed(
    start_workers: StartWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixlm.router.page.PERIOD_S", 0.01)
    async with Served(await start_workers(1)) as served:
        viewer = asyncio.ensure_future(ask(served.url, "GET", "/live/events?topics=head"))
        await until(lambda: served.gateway.page.num_viewers == 1)
        assert await served.gateway.drain(5.0)
        assert b'"state":"ready"' in (await viewer).body


async def test_without_a_page(start_workers: StartWorkers) -> None:
    async with Served(await start_workers(1), disable_ui=True) as served:
        assert (await ask(served.url, "GET", "/ui/")).status == 404
        assert (await ask(served.url, "GET", "/live/events")).status == 404
