"""/live: topics, keys, viewers, slow readers, the end of the server."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
from tests.fakes.http_server import ScriptedServer, listening, scripted_server

from radixlm.base.log import set_up_logging
from radixlm.engine.crash_dump import Recorder
from radixlm.entrypoints.http import live
from radixlm.entrypoints.http.live import MAX_VIEWERS, LiveFeed
from radixlm.intake.request_state import RequestState
from radixlm.observe.ring import FIELDS
from radixlm.wire.media import FIRST_MEDIA_ID
from radixlm.wire.requests import TokenizedRequest
from radixlm.wire.sampling_params import SamplingParams

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

    async def ask(self, text: str, rid: str, num_tokens: int = 8, **more: Any) -> None:
        sampling = {"max_new_tokens": num_tokens}
        body = {"text": text, "rid": rid, "sampling_params": sampling} | more
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


async def test_the_tree_is_that_of_the_engine(served: Live) -> None:
    await served.ask("hello " * 40, "long")
    await served.ask("hello " * 40, "again")
    async with served.look("tree") as reader:
        tree = await reader.next("tree")
    cache = served.server.engine.kv_manager.prefix_cache
    assert tree["total_tokens"] == cache.total_pages * cache.page_size
    nodes = {node[0]: node for node in tree["nodes"]}
    assert len(nodes) == len(list(cache.tree.nodes())) and tree["rest"]["nodes"] == 0
    assert all(node[1] in nodes or node[1] == 0 for node in nodes.values())
    assert all(node[7] is None for node in nodes.values()), "texts need --ui-show-text"
    found = await served.client.get("/live/tree", params={"text": "hello " * 40})
    path, tokens = found.json()["path"], found.json()["tokens"]
    assert path and tokens == sum(nodes[serial][2] for serial in path)
    assert max(node[3] for node in nodes.values()) == nodes[path[0]][3] > 0


async def test_texts_are_shown_where_asked_for(toy_folder: Path) -> None:
    async with live_server(toy_folder, ui_show_text=True) as served:
        await served.ask("hello you " * 20, "mine")
        async with served.look("tree,requests") as reader:
            assert (await reader.next("hello"))["show_text"] is True
            events = [await reader.next("requests"), await reader.next("tree")]
        assert events[0]["rows"][0]["rid"] == "mine"
        assert any("hello you" in (node[7] or "") for node in events[1]["nodes"])
        row = (await served.client.get("/live/request/mine")).json()
        assert row["prompt_text"].startswith("hello you") and row["output_text"] == "one two thre"
        assert len(row["steps"]["0"]) >= row["out"] - 1
        media = np.array([FIRST_MEDIA_ID + 5, *served.server.tokenizer.encode("hi", False)])
        assert (served.feed._text(media) or "").endswith("hi"), "a picture has no text"


async def test_a_row_is_found_by_either_name_and_without_text(served: Live) -> None:
    await served.ask("hello", "secret-name")
    row = (await served.client.get("/live/request/secret-name")).json()
    assert row["rid"] is None and "prompt_text" not in row
    assert (await served.client.get(f"/live/request/{row['id']}")).json() == row
    assert (await served.client.get("/live/request/nobody")).status_code == 404


async def test_log_lines_come_without_prompts(toy_folder: Path) -> None:
    async with live_server(toy_folder, log_requests=True, log_requests_level=3) as served:
        set_up_logging("test")
        async with served.look("log") as reader:
            await reader.next("hello")
            await served.ask("hello my secret", "x")
            logging.getLogger("radixlm.test").warning("a %s line", "new")
            lines: list[Any] = []
            async with asyncio.timeout(LIMIT_S):
                while not any("a new line" in line[3] for line in lines):
                    lines += (await reader.next("log"))["lines"]
        (line,) = [line for line in lines if "a new line" in line[3]]
        assert line[1:3] == ["WARNING", "server"]
        assert any("/generate" in line[3] for line in lines)
        assert not any("secret" in line[3] for line in lines)


async def test_a_death_is_told_and_the_row_goes_on(served: Live) -> None:
    intake = served.server.engine.intake
    served.server.engine.executor.is_slow = True
    async with served.look("deaths,requests") as reader:
        asked = asyncio.create_task(served.ask("forever hello", "held", 40, stream=True))
        async with asyncio.timeout(LIMIT_S):
            while not any(state.output_ids for state in intake.requests.values()):
                await asyncio.sleep(0)
        intake.lose_engine(None, 0, "signal SIGKILL")
        death = await reader.next("deaths")
        assert death["why"] == "signal SIGKILL" and death["held"] == 1
        intake.become_ready({"max_total_num_tokens": 4096, "context_len": 2048})
        await asyncio.wait_for(asked, LIMIT_S)
        later = death
        while not later["went_on"]:
            later = await reader.next("deaths")
        row = (await served.client.get("/live/request/held")).json()
        assert later["t"] == death["t"] and [one[0] for one in later["went_on"]] == [row["id"]]
    phases = [span[0] for span in row["spans"]]
    dead = phases.index("engine_dead")
    assert phases[dead - 1] == phases[-1] == "decode"
    assert row["spans"][dead][1] == death["t"] and row["finish"] == "length"


async def test_a_dump_is_told_when_it_is_written(served: Live) -> None:
    """Also while nothing else happens."""
    feed = served.feed
    feed.rows.held([], "signal SIGKILL")
    viewer = feed.join(("deaths",), 10.0)
    assert len(feed.news(viewer)) == 1 and feed.news(viewer) == []
    written = SimpleNamespace(last=(feed.rows.deaths[-1].time_s, "requests-1.jsonl"))
    served.server.state.extras[Recorder] = written
    (told,) = feed.news(viewer)
    assert b'"dump":"requests-1.jsonl"' in told and feed.news(viewer) == []
    feed.viewers.discard(viewer)
    del served.server.state.extras[Recorder]


async def test_a_stream_resumes_where_it_stopped(served: Live) -> None:
    await served.ask("hello", "first")
    async with served.look("requests") as reader:
        await reader.next("requests")
        (last,) = reader.ids
    await served.ask("hello", "second")
    async with served.look("requests", **{"Last-Event-ID": last}) as reader:
        (row,) = (await reader.next("requests"))["rows"]
    found = await served.client.get("/live/request/second")
    assert found.json()["id"] == row["id"]
    async with served.look("requests", **{"Last-Event-ID": "another server's"}) as reader:
        assert len((await reader.next("requests"))["rows"]) == 2
    boot = last.partition(":")[0]
    headers = {"Last-Event-ID": f"{boot}:x"}
    assert (await served.client.get("/live/events", headers=headers)).status_code == 400


KEYS = {"api_key": "user", "admin_api_key": "boss"}


@pytest.mark.parametrize("path", ["/live/events", "/live/tree?text=a", "/live/request/x"])
async def test_keys_are_those_of_administrators(toy_folder: Path, path: str) -> None:
    async with live_server(toy_folder, **KEYS) as served:
        for key, status in (("", 401), ("user", 401), ("boss", 200)):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            async with served.client.stream("GET", path, headers=headers) as response:
                expected = 404 if status == 200 and path.endswith("x") else status
                assert response.status_code == expected


async def test_the_admin_key_shows_ids_of_requests(toy_folder: Path) -> None:
    async with live_server(toy_folder, **KEYS) as served:
        boss = {"Authorization": "Bearer boss"}
        body = {"text": "hello", "rid": "mine", "sampling_params": {"max_new_tokens": 2}}
        await served.client.post("/generate", json=body, headers=boss)
        async with served.look("requests", **boss) as reader:
            (row,) = (await reader.next("requests"))["rows"]
        assert row["rid"] == "mine"


async def test_a_slow_reader_loses_frames_and_holds_no_memory(served: Live) -> None:
    """What changes a thousand times while a frame is not taken is told once, as it is then."""
    feed = served.feed
    viewer = feed.join(("requests",), 10.0)
    frames = feed.stream(viewer)
    try:
        assert b"event: hello" in await anext(frames)
        for count in range(1000):
            rid = f"r{count % 3}"
            state = RequestState(TokenizedRequest(rid, b"", SamplingParams()), 0, None, None)
            feed.rows.submitted(state)
        frame = await asyncio.wait_for(anext(frames), LIMIT_S)
        assert frame.count(b"event:") == 1 and frame.count(b'"spans"') == 3
    finally:
        await frames.aclose()
        feed.viewers.discard(viewer)


async def test_closing_ends_every_stream(served: Live) -> None:
    async with served.look("head") as reader:
        await reader.next("head")
        live.close(served.server.state)
        async with asyncio.timeout(LIMIT_S):
            assert [line async for line in reader.lines if line.startswith("event: hello")] == []
    assert (await served.client.get("/live/events")).status_code == 503


async def test_disable_ui_turns_all_of_it_off(toy_folder: Path) -> None:
    async with scripted_server(toy_folder, {}, disable_ui=True) as server:
        for path in ("/live/events", "/live/tree?text=a", "/live/request/x"):
            assert (await server.client.get(path)).status_code == 404
        assert LiveFeed not in server.state.extras
