"""KV events over real sockets: a publisher of the engine, a gateway's readers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from radixlm.kv_events.cached_pages import PublishedPages
from radixlm.kv_events.observers import describe
from radixlm.kv_events.options import KvEventsOptions, server_facts
from radixlm.kv_events.publisher import KvEventPublisher
from radixlm.memory.pages import PageAllocator
from radixlm.memory.prefix.namespace import CacheNamespace
from radixlm.memory.prefix.radix import RadixCache
from radixlm.router import kv_events_in, tokens_api
from radixlm.router.kv_events_in import Feed, feeds_of
from radixlm.router.kv_readers import KvReaders
from radixlm.router.options import Options
from radixlm.router.prompt import id_prompt
from radixlm.router.worker import State, Worker
from tests.router.client import ask
from tests.router.conftest import StartWorkers
from tests.router.front import Front

PAGE = 4
IDS = np.arange(41, dtype=np.int32)


class Server:
    """A prefix cache whose changes are published."""

    def __init__(self, folder: Path, boot: int = 0, **options: Any) -> None:
        ends = f"ipc://{folder}/pub", f"ipc://{folder}/replay"
        self.options = KvEventsOptions("zmq", *ends, **options)
        self.publisher = KvEventPublisher(self.options, PAGE, boot=boot)
        self.pages = PageAllocator(120, PAGE)
        self.cache = RadixCache(self.pages, PAGE)
        tell_all = partial(describe, self.cache)
        self.published = PublishedPages(self.publisher, PAGE, {}, tell_all)
        self.cache.events = self.published
        self.worker = Worker("http://127.0.0.1:1")
        self.worker.state = State.READY
        self.worker.facts = {
            "kv_events": {
                "endpoints": [ends[0]],
                "replay_endpoints": [ends[1]],
                "topic": "",
            }
        }

    def insert(self, ids: np.ndarray, namespace: CacheNamespace | None = None) -> None:
        pages = self.pages.alloc(len(ids) // PAGE)
        assert pages is not None
        self.pages.free(self.cache.insert(ids, pages, namespace).duplicate_pages)


class Readers:
    """The readers of a gateway without anything else."""

    def __init__(self) -> None:
        self.fetched: list[str] = []
        self.forgotten: list[str] = []  # workers whose latest prompts do not count any more
        self.workers: list[Worker] = []
        self.on_fetch: Callable[[], None] = lambda: None
        gateway = SimpleNamespace(
            options=Options(),
            every=lambda seconds, work: None,
            on_stop=[],
            upstream=SimpleNamespace(fetch=self._fetch),
            registry=SimpleNamespace(find=lambda name: self.workers),
            tokens=SimpleNamespace(forget=self.forgotten.append),
            spawn=lambda work: asyncio.get_running_loop().create_task(work),
        )
        self.all = KvReaders(gateway)  # type: ignore[arg-type]

    async def _fetch(self, url: str, method: str, target: str, **rest: Any) -> None:
        self.fetched.append(target)
        self.on_fetch()

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not done():
                self.all.tick()
                await asyncio.sleep(0.005)

    def depth(self, worker: Worker, ids: np.ndarray = IDS, **space: str) -> int:
        namespace = None, space.get("cache_salt"), space.get("extra_key")
        match = self.all.matched(ids, namespace).get(worker.name)
        return match.device if match else 0


@pytest.fixture
def readers() -> Iterator[Callable[[], Readers]]:
    made: list[Readers] = []

    def make() -> Readers:
        made.append(Readers())
        return made[-1]

    yield make
    for each in made:
        each.all.close()


async def test_the_index_follows_a_server_from_before_and_after_it_is_read(
    tmp_path: Path, readers: Callable[[], Readers]
) -> None:
    server, mine = Server(tmp_path), readers()
    server.insert(IDS[:20])
    server.insert(IDS[:12], CacheNamespace(extra_key="x", cache_salt="s"))
    mine.all.on_change("joined", server.worker)
    await mine.until(lambda: mine.depth(server.worker) == 20)
    assert mine.all.is_complete(server.worker.name)
    assert mine.depth(server.worker, cache_salt="s", extra_key="x") == 12
    assert mine.depth(server.worker, cache_salt="s") == 0
    server.insert(IDS[:36])
    await mine.until(lambda: mine.depth(server.worker) == 36)
    mine.forgotten.clear()
    server.cache.reset()
    await mine.until(lambda: mine.depth(server.worker) == 0)
    assert mine.forgotten == [server.worker.name]
    mine.all.on_change("left", server.worker)
    assert not mine.all.is_complete(server.worker.name) and not len(mine.all.index)
    server.publisher.close()


async def test_a_restarted_server_is_learnt_anew(
    tmp_path: Path, readers: Callable[[], Readers]
) -> None:
    server, mine = Server(tmp_path), readers()
    server.insert(IDS[:20])
    mine.all.on_change("joined", server.worker)
    await mine.until(lambda: mine.depth(server.worker) == 20)
    server.publisher.close()
    again = Server(tmp_path)  # numbers begin at 0
    again.insert(IDS[:8])
    server.worker.state = State.UNHEALTHY
    mine.all.on_change("changed", server.worker)
    server.worker.state = State.READY
    mine.all.on_change("changed", server.worker)
    await mine.until(lambda: mine.depth(server.worker) == 8)
    again.publisher.close()
    engine = Server(tmp_path, boot=1)  # of a restarted engine they go on far behind

    def is_known() -> bool:
        engine.cache.reset()  # something new: a subscriber may have joined after the last message
        engine.insert(IDS[:16])
        return mine.depth(server.worker) == 16

    await mine.until(is_known)
    engine.publisher.close()


async def test_what_is_kept_no_more_comes_by_a_snapshot(
    tmp_path: Path, readers: Callable[[], Readers]
) -> None:
    server, mine = Server(tmp_path, buffer_steps=1), readers()
    server.worker.facts["kv_events"]["has_snapshot"] = True
    mine.workers.append(server.worker)
    mine.on_fetch = server.published.refresh
    first = mine.all
    server.insert(IDS[:20])
    server.insert(IDS[:20][::-1].copy())
    first.on_change("joined", server.worker)
    await mine.until(
        lambda: first.is_complete(server.worker.name) and mine.depth(server.worker) == 20
    )
    assert mine.fetched in ([], ["/kv_snapshot"])  # none if both stores went in one message
    server.publisher.close()


def test_where_workers_publish() -> None:
    worker = Worker("http://gpu7:30000")
    assert feeds_of(worker) == []
    config = '{"publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv"}'
    worker.facts = {"kv_events_config": config, "dp_size": 2}
    first, second = Feed("tcp://gpu7:5557", None, "kv"), Feed("tcp://gpu7:5558", None, "kv")
    assert feeds_of(worker) == [first, second]
    worker.dp_rank = 1
    assert feeds_of(worker) == [second]
    text = '{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557"}'
    worker.facts = {"kv_events": server_facts(text, 2, 16)}
    assert feeds_of(worker) == [Feed("tcp://gpu7:5558", "tcp://gpu7:6558", "")]
    worker.labels["kv_events_endpoint"] = "tcp://other:1"
    assert feeds_of(worker) == [Feed("tcp://other:1", None, "")]
    worker = Worker("http://[::1]:30000")
    worker.facts = {"kv_events_config": {"publisher": "zmq"}}
    assert feeds_of(worker) == [Feed("tcp://[::1]:5557", None, "")]
    for config in ("{", "{}", "[]", '{"publisher": "null"}', 3):
        worker.facts = {"kv_events_config": config}
        assert feeds_of(worker) == []


async def test_requests_follow_the_caches_of_the_workers(
    tmp_path: Path, start_workers: StartWorkers
) -> None:
    mocks = await start_workers(3)
    folders = [tmp_path / str(number) for number in range(2)]
    for folder in folders:
        folder.mkdir()
    servers = [Server(folder) for folder in folders]  # the third worker publishes nothing
    front = Front([], policy="least_work", block_size=PAGE)
    kv_events_in.attach(front.gateway)
    tokens_api.attach(front.gateway)
    prompts = [np.arange(at, at + 201, dtype=np.int32) for at in (1000, 2000)]
    for server, prompt in zip(servers, prompts, strict=True):
        server.insert(prompt[:200])
    async with front:
        for server, mock in zip(servers, mocks, strict=False):
            front.join(Worker(mock.url), **server.worker.facts)
        front.join(Worker(mocks[2].url))
        index = front.gateway.index
        assert index is not None
        async with asyncio.timeout(30):
            while len(index.index) < 2 * 200 // PAGE:
                await asyncio.sleep(0.005)

        async def asked(prompt: np.ndarray) -> int:
            before = [len(mock.seen) for mock in mocks]
            body = {"input_ids": prompt.tolist(), "sampling_params": {"max_new_tokens": 1}}
            assert (await ask(front.url, "POST", "/generate", body)).status == 200
            after = [len(mock.seen) for mock in mocks]
            return [new - old for new, old in zip(after, before, strict=True)].index(1)

        assert [await asked(prompt) for prompt in prompts * 3] == [0, 1] * 3
        worker = front.gateway.registry.find(mocks[0].url)[0]
        servers[0].cache.reset()
        async with asyncio.timeout(30):
            while index.matched(prompts[0]):
                await asyncio.sleep(0.005)
        prompt = id_prompt(prompts[0].tolist(), (None, None, None))
        assert prompt is not None
        assert worker.name not in front.gateway.tokens.holdings.of(prompt)  # within a second
    for server in servers:
        server.publisher.close()


async def test_a_publisher_with_a_wrong_replay_endpoint_leaves_no_socket(
    readers: Callable[[], Readers], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = readers()
    loop, watched = asyncio.get_running_loop(), set[int]()
    add, remove = loop.add_reader, loop.remove_reader
    monkeypatch.setattr(loop, "add_reader", lambda fd, *a: (watched.add(fd), add(fd, *a)))
    monkeypatch.setattr(loop, "remove_reader", lambda fd: (watched.discard(fd), remove(fd)))
    worker = Worker("http://127.0.0.1:1", labels={
        "kv_events_endpoint": "tcp://127.0.0.1:5", "kv_events_replay_endpoint": "nonsense"
    })  # fmt: skip
    worker.state = State.READY
    made.all.on_change("joined", worker)
    assert not watched and not made.all.is_complete(worker.name) and not made.all._streams


async def test_a_publisher_that_is_told_of_later_is_read(
    readers: Callable[[], Readers], tmp_path: Path
) -> None:
    made, worker = readers(), Worker("http://127.0.0.1:1")
    worker.state = State.READY
    made.all.on_change("joined", worker)
    assert not made.all._readers[worker.name]
    for name in ("one", "two", "two"):
        worker.labels["kv_events_endpoint"] = f"ipc://{tmp_path}/{name}"
        before = made.all._readers[worker.name]
        made.all.on_change("changed", worker)
    (reader,) = made.all._readers[worker.name]
    assert reader.feed.endpoint.endswith("two") and before == [reader]


async def test_messages_nested_too_deep_stop_no_reader(
    tmp_path: Path, readers: Callable[[], Readers]
) -> None:
    """ZeroMQ tells once of what is there: a reader that raises amid it would never read on."""
    endpoint = f"ipc://{tmp_path}/raw"
    publisher: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
    publisher.linger = 0
    publisher.bind(endpoint)
    worker, mine = Worker("http://127.0.0.1:1"), readers()
    worker.state = State.READY
    worker.facts = {"kv_events": {"endpoints": [endpoint], "topic": ""}}
    mine.all.on_change("joined", worker)
    assert await asyncio.to_thread(publisher.recv) == b"\1"  # it has subscribed
    stored = ["BlockStored", [1], None, IDS[:PAGE].tolist(), PAGE, None]
    good = msgspec.msgpack.encode([1.0, [stored], 0])
    for number, payload in enumerate((b"\x91" * 100_000, good)):
        publisher.send_multipart((b"", number.to_bytes(8, "big"), payload))
    await mine.until(lambda: mine.depth(worker) == PAGE)
    assert mine.all.figures()["faulty",] == 1
    publisher.close()
