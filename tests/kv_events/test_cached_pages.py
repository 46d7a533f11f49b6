"""KV events: a subscriber in another process has what the tree has, whatever it loses."""

import json
import random
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from radixlm.base.errors import ConfigError
from radixlm.kv_events.cached_pages import PublishedPages
from radixlm.kv_events.observers import describe
from radixlm.kv_events.options import KvEventsOptions, read_options, server_facts
from radixlm.kv_events.publisher import BOOT_STEP, KvEventPublisher, PageGroup, Stored, joined
from radixlm.memory.pages import PageAllocator
from radixlm.memory.prefix.namespace import CacheNamespace
from radixlm.memory.prefix.radix import RadixCache
from radixlm.tiers.keys import dynamo_hash, event_hash, reference_chain

PAGE = 4
ADAPTER = "8" + "0" * 31
NAMESPACES = (
    CacheNamespace(weights_version="default", kv_layout="bfloat16"),
    CacheNamespace(cache_salt="salt"),
    CacheNamespace(extra_key="key"),
    CacheNamespace(tenant="tenant"),
    CacheNamespace(adapter=ADAPTER),
    CacheNamespace(earlier_media=(b"\1" * 32,)),
)


class World:
    """A tree whose changes are published to a mirror."""

    def __init__(self, folder: Path, **options):
        self.options = KvEventsOptions(
            "zmq", f"ipc://{folder}/pub", f"ipc://{folder}/replay", topic="kv", **options
        )
        self.boot, self.num_checks = 0, 0
        self.start()

    def start(self):
        self.publisher = KvEventPublisher(self.options, PAGE, boot=self.boot)
        self.pages = PageAllocator(60, PAGE)
        self.cache = RadixCache(self.pages, PAGE)
        names = {ADAPTER: "poet"}
        tell_all = partial(describe, self.cache)
        self.cache.events = PublishedPages(self.publisher, PAGE, names, tell_all)

    def restart(self):
        self.publisher.close()
        self.boot += 1
        self.start()

    def insert(self, ids, namespace):
        num_pages = len(ids) // PAGE
        missing = num_pages - self.pages.num_free
        if missing > 0:
            self.cache.evict(missing)
        pages = self.pages.alloc(num_pages)
        result = self.cache.insert(np.array(ids, np.int32), pages, namespace)
        self.pages.free(result.duplicate_pages)
        return result.handle

    def tail(self, handle, draw, namespace):
        page = self.pages.alloc(1)
        if page is not None:
            ids = np.array([draw.randrange(3)], np.int32)
            if not self.cache.insert_tail(handle, ids, page[0], namespace):
                self.pages.free(page)

    def act(self, draw):
        namespace = draw.choice(NAMESPACES)
        kind = draw.random()
        if kind < 0.8:
            ids = [draw.randrange(3) for _ in range(draw.randrange(PAGE, 10 * PAGE))]
            handle = self.insert(ids, namespace)
            if draw.random() < 0.3:
                self.tail(handle, draw, namespace)
        elif kind < 0.98:
            self.cache.evict(draw.randrange(1, 30))
        else:
            self.cache.reset()

    def sentinel(self):
        self.num_checks += 1
        ids = [1000 + self.num_checks] * PAGE
        self.insert(ids, NAMESPACES[0])
        return ids

    def pages_by_path(self):
        """(namespace, tokens of the page, tokens from the start) of each whole page."""
        found = set()
        for node in self.cache.tree.nodes():
            path = node.path()
            namespace = path[0].edge[0]
            tokens = np.frombuffer(b"".join(n.tokens for n in path), np.int32).tolist()
            ends = range(PAGE, len(tokens) + 1, PAGE)
            found |= {(namespace, tuple(tokens[:end])) for end in ends}
        return found


@pytest.fixture
def mirror_of():
    processes = []

    def start(world, loss):
        options = world.options
        arguments = options.endpoint, options.replay_endpoint, options.format, str(loss)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.kv_mirror", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def cached(mirror, world):
    """The mirror's pages, as paths from the start."""
    mirror.stdin.write(json.dumps(world.sentinel()) + "\n")
    mirror.stdin.flush()
    line = mirror.stdout.readline()
    assert line, "the mirror found a contradiction"
    pages = {page[0]: page[1:] for page in json.loads(line)}

    def path(name):
        above, tokens = pages[name][:2]
        return (*(path(above) if above is not None else ()), *tokens)

    return {name: (path(name), *page[2:]) for name, page in pages.items()}


def published_hash(world, namespace, tokens):
    names = namespace.extra_key, namespace.cache_salt
    key = reference_chain(np.array(tokens, np.int32), PAGE, *names)[-1]
    return dynamo_hash(key, *names) if world.options.format == "dynamo" else event_hash(key)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("format", ["default", "legacy", "dynamo", "vllm"])
def test_a_mirror_with_losses_equals_the_tree(tmp_path, mirror_of, format):
    world, draw = World(tmp_path, format=format), random.Random(format)
    mirror = mirror_of(world, loss=0.3)
    for checkpoint in range(12):
        for _ in range(draw.randrange(1, 40)):
            world.act(draw)
        found = cached(mirror, world)
        expected = world.pages_by_path()
        assert len(found) == len(expected)
        own = [n for n in NAMESPACES if n.adapter or n.tenant or n.earlier_media]
        wanted = {published_hash(world, *p): p[1] for p in expected if p[0] not in own}
        assert wanted.items() <= {name: page[0] for name, page in found.items()}.items()
        others = sorted(tokens for namespace, tokens in expected if namespace in own)
        assert others == sorted(page[0] for name, page in found.items() if name not in wanted)
        if format in ("default", "vllm"):
            adapted = sum(namespace.adapter is not None for namespace, _ in expected)
            assert sum(page[1] == "poet" for page in found.values()) == adapted
        if checkpoint % 4 == 3:
            world.restart()
    world.publisher.close()


@pytest.mark.timeout(60)
def test_changes_that_do_not_fit_the_queue_are_made_up_for(tmp_path, mirror_of):
    world, draw = World(tmp_path, max_queue_size=3), random.Random(1)
    mirror = mirror_of(world, loss=0)
    assert len(cached(mirror, world)) == 1
    may_go_on, stands = threading.Event(), threading.Event()

    def wait():
        stands.set()
        assert may_go_on.wait(30)
        return ()

    world.publisher.put(wait)
    assert stands.wait(30)
    for _ in range(50):
        world.act(draw)
    assert not world.publisher.has_room
    caught_up = threading.Event()
    may_go_on.set()
    world.publisher.put(lambda: caught_up.set() or ())
    assert caught_up.wait(30)
    found = cached(mirror, world)
    assert sorted(page[0] for page in found.values()) == sorted(
        tokens for _, tokens in world.pages_by_path()
    )
    world.publisher.close()


def test_a_restarted_engine_is_far_ahead_and_clears_first(tmp_path):
    world = World(tmp_path)
    world.restart()
    world.sentinel()
    world.restart()
    with zmq.Context.instance().socket(zmq.REQ) as socket:
        socket.linger = 0
        socket.connect(world.options.replay_endpoint)
        socket.send((5).to_bytes(8, "big"))
        assert socket.poll(10_000)
        number, payload = socket.recv_multipart()
        assert int.from_bytes(number, "big") == 2 * BOOT_STEP
        assert msgspec.msgpack.decode(payload)[1] == [{"type": "AllBlocksCleared"}]
    world.publisher.close()


def test_stores_are_joined_where_one_goes_on_where_the_last_ended():
    one, two = Stored((1,), None, b"a", PageGroup()), Stored((2,), 1, b"b", PageGroup())
    other = Stored((3,), 2, b"c", PageGroup(cache_salt="x"))
    assert joined([one, two, other]) == [Stored((1, 2), None, b"ab", PageGroup()), other]
    assert joined([one, replace_parent(two, 9)]) == [one, replace_parent(two, 9)]


def replace_parent(event, parent):
    return msgspec.structs.replace(event, parent=parent)


def test_each_rank_has_ports_of_its_own():
    text = '{"publisher": "zmq", "replay_endpoint": "tcp://*:6557", "topic": "kv@a@b"}'
    options = read_options(text, 3).of_rank(2)
    assert (options.endpoint, options.replay_endpoint) == ("tcp://*:5559", "tcp://*:6559")
    facts = server_facts(text, 2, 16)
    assert facts["endpoints"] == ["tcp://*:5557", "tcp://*:5558"]
    assert facts["block_size"] == 16 and facts["topic"] == "kv@a@b"
    assert KvEventsOptions(endpoint="ipc:///x").of_rank(1).endpoint == "ipc:///x_dp1"


@pytest.mark.parametrize("text", ["", '{"publisher": "null"}', "{}"])
def test_without_a_publisher_there_are_no_events(text):
    assert read_options(text) is None and server_facts(text, 1, 16) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"publisher": "kafka"}', "kafka"),
        ('{"endpont": "tcp://*:1"}', "did you mean 'endpoint'"),
        ('{"publisher": "zmq", "endpoint": "tcp://*"}', "no tcp://host:port"),
        ('{"publisher": "zmq", "endpoint": "tcp://*:65535"}', "no tcp://host:port"),
        ('{"publisher": "zmq", "replay_endpoint": "tcp://*:5558"}', "ports in common"),
        ('{"publisher": "zmq", "hwm": 0}', "hwm is 0"),
    ],
)
def test_bad_options_are_refused_with_values_that_work(text, message):
    with pytest.raises(ConfigError, match=message) as error:
        read_options(text, 2)
    works = str(error.value).partition("works: '")[2].rstrip("'")
    assert read_options(works, 2) is not None


def test_an_endpoint_in_use_is_refused(tmp_path):
    options = KvEventsOptions("zmq", "tcp://127.0.0.1:*")
    with zmq.Context.instance().socket(zmq.PUB) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        options = msgspec.structs.replace(options, endpoint=f"tcp://127.0.0.1:{port}", bind=True)
        with pytest.raises(ConfigError, match="in use"):
            KvEventPublisher(options, PAGE)
