"""/live: topics, keys, viewers, slow readers, the end of the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from tests.fakes.http_server import ScriptedServer, listening, scripted_server

from radixlm.entrypoints.http import live
from radixlm.entrypoints.http.live import MAX_VIEWERS, LiveFeed
from radixlm.observe.ring import FIELDS

LIMIT_S = 20


class Reader:
    """Events of one stream, as they come."""

    def __init__(self, response: httpx.Response) -> None:
        self.lines = response.aiter_lines()
        self.ids: list[str] = []

    async def next(self, topic: str) -> Any:
        """The data of the next event of ``topic``."""
        name = ""
        async with asyncio.timeout(LIMIT_S):
            async for line in self.lines:
                field, _, value = line.partition(": ")
                if field == "event":
                    name = value
                elif field == "id":
                    self.ids.append(value)
                elif field == "data" and name == topic:
                    return json.loads(value)
        raise AssertionError(f"the stream ended before {topic}")


class Live:
    """A scripted server on a port."""

    def __init__(self, server: ScriptedServer, client: httpx.AsyncClient) -> None:
        self.server, self.client = server, client
        self.feed: LiveFeed = server.state.extra(LiveFeed)

    @asynccontextmanager
    async def look(self, topics: str = "head", **headers: str) -> AsyncIterator[Reader]:
        params = {"topics": topics}
        stream = self.client.stream("GET", "/live/events", params=params, headers=headers)
        async with stream as response:
            assert response.status_code == 200, await response.aread()
            assert response.headers["content-type"].startswith("text/event-stream")
            yield Reader(response)

    async def ask(self, text: str, rid: str) -> None:
        body = {"text": text, "rid": rid, "sampling_params": {"max_new_tokens": 8}}
        assert (await self.client.post("/generate", json=body)).status_code == 200


@asynccontextmanager
async def live_server(folder: Path, **options: Any) -> AsyncIterator[Live]:
    async with scripted_server(folder, {"hello": "one two three"}, **options) as server:
        async with listening(server) as port:
            limit = httpx.Timeout(LIMIT_S)
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", timeout=limit
            ) as client:
                yield Live(server, client)
                live.close(server.state)


@pytest_asyncio.fixture
async def served(toy_folder: Path) -> AsyncIterator[Live]:
    async with live_server(toy_folder) as made:
        yield made


async def test_topics_tell_of_requests_steps_and_the_server(served: Live) -> None:
    await served.ask("hello", "first")
    async with served.look("head,requests,steps") as reader:
        hello = await reader.next("hello")
        assert hello["version"] == 1 and hello["step_fields"] == list(FIELDS)
        head = await reader.next("head")
        assert head["state"] == "ready" and head["deaths"] == 0
        (row,) = (await reader.next("requests"))["rows"]
        assert row["rid"] is None and row["finish"] == "length" and row["route"] == "/generate"
        phases = [span[0] for span in row["spans"]]
        assert phases == ["queue", "prefill", "decode"]
        assert row["spans"][1][3] == row["prompt"] and row["spans"][2][3] == row["out"] > 0
        ends = [row["begun_s"], *(span[2] for span in row["spans"])]
        assert ends == sorted(ends) and ends[-1] == row["ended_s"]
        steps = await reader.next("steps")
        assert sum(steps["columns"]["prefill_tokens"]) == row["prompt"]
        assert sum(steps["columns"]["decodes"]) == row["out"] - 1
        await served.ask("hello", "second")
        (later,) = (await reader.next("requests"))["rows"]
        assert later["id"] != row["id"]


async def test_a_ninth_viewer_is_refused_and_those_who_left_are_forgotten(served: Live) -> None:
    async with asyncio.timeout(LIMIT_S):
        async with served.look() as first:
            await first.next("hello")
            others = [served.feed.join(("head",), 1.0) for _ in range(MAX_VIEWERS - 1)]
            refused = await served.client.get("/live/events")
            assert refused.status_code == 503
            assert "8 viewers" in refused.json()["error"]["message"]
            served.feed.viewers.difference_update(others)
        while served.feed.viewers:
            await asyncio.sleep(0)


@pytest.mark.parametrize("query", ["topics=nothing", "rate=0", "rate=11", "rate=nan"])
async def test_bad_values_are_named(served: Live, query: str) -> None:
    refused = await served.client.get(f"/live/events?{query}")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == query.split("=")[0]
