"""KV events: which pages the prefix cache holds, published over ZeroMQ for routers.

PUB frames: topic, sequence number (8 bytes, big-endian), msgpack of [time, [event, ...], dp rank].
Replay: a DEALER sends (empty, number to start with); the ROUTER answers with (empty, number,
payload) for each message it still has, at last number -1. (REQ works too, but reads one answer.)
Events are those of SGLang and vLLM; see docs/kv-events.md for the formats. The sequence of a
restarted engine goes on far behind the last, so that every subscriber sees a gap, asks for a
replay, and gets ``AllBlocksCleared`` first.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec
import zmq

from radixlm.base.record import Record, replace
from radixlm.kv_events.options import KvEventsOptions, refused

log = logging.getLogger(__name__)

MAX_CHANGES: Final = 1000  # of the cache, in one message
MAX_EVENTS: Final = 1000  # in one message: a whole cache takes several
BOOT_STEP: Final = 1 << 40  # between the sequence numbers of an engine and of the next
END: Final = (-1).to_bytes(8, "big", signed=True)
STOP_WAIT_S: Final = 1.0
MEDIUM: Final = "GPU"  # SGLang's name of the tier that steps read, on any device


class PageGroup(Record):
    """What pages have in common that one event tells of. ``adapter``: name of the LoRA adapter;
    ``adapter_id``: a number made of its content."""

    adapter: str | None = None
    adapter_id: int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None


class Stored(Record):
    """Pages that are cached now, and follow each other. ``parent``: hash of the page before the
    first, None at the start of a prompt; ``tokens``: int32 of all pages, as bytes."""

    hashes: tuple[int, ...]
    parent: int | None
    tokens: bytes
    group: PageGroup


class Removed(Record):
    """Pages that are cached no more."""

    hashes: tuple[int, ...]


class Cleared(Record):
    """Nothing is cached any more."""


Event = Stored | Removed | Cleared


def joined(events: Iterable[Event]) -> list[Event]:
    """Events with neighbours joined: a store that goes on where the last one ended; removals."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, Stored) and isinstance(last, Stored):
            if event.parent == last.hashes[-1] and event.group == last.group:
                hashes, tokens = last.hashes + event.hashes, last.tokens + event.tokens
                result[-1] = replace(last, hashes=hashes, tokens=tokens)
                continue
        if isinstance(event, Removed) and isinstance(last, Removed):
            result[-1] = Removed(last.hashes + event.hashes)
            continue
        result.append(event)
    return result


def as_fields(event: Event, page_size: int, format: str) -> list[Any] | dict[str, Any]:
    """The event as it is packed: a map, or an array in the formats legacy and vllm."""
    is_array, is_vllm = format in ("legacy", "vllm"), format == "vllm"
    if isinstance(event, Cleared):
        return ["AllBlocksCleared"] if is_array else {"type": "AllBlocksCleared"}
    hashes = list(event.hashes)
    if isinstance(event, Removed):
        if is_array:
            return ["BlockRemoved", hashes, *([MEDIUM] if is_vllm else [])]
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": MEDIUM}
    tokens, group = memoryview(event.tokens).cast("i").tolist(), event.group
    common = hashes, event.parent, tokens, page_size, group.adapter_id
    if is_array:
        extra = tuple(filter(None, (group.adapter, group.extra_key, group.cache_salt)))
        keys = [extra] * len(hashes) if extra else None
        return ["BlockStored", *common, *([MEDIUM, group.adapter, keys] if is_vllm else [])]
    names = "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id"
    fields: dict[str, Any] = {"type": "BlockStored"} | dict(zip(names, common, strict=True))
    optional = {"cache_salt": group.cache_salt, "lora_name": group.adapter}
    optional |= {"extra_key": group.extra_key}
    return fields | {"medium": MEDIUM} | {k: v for k, v in optional.items() if v is not None}


Change = Callable[[], Sequence[Event]]
"""A change of the cache, whose events are made in the publisher's thread."""


class KvEventPublisher:
    """Publishes the changes that ``put`` is given, in order, from a thread of its own."""

    def __init__(
        self, options: KvEventsOptions, page_size: int, rank: int = 0, boot: int = 0
    ) -> None:
        """``rank``: data-parallel rank; ``boot``: how often the engine was started before.
        ConfigError if an endpoint cannot be had."""
        self.options, self._page_size, self._rank = options.of_rank(rank), page_size, rank
        self._sequence = boot * BOOT_STEP
        self._changes: queue.SimpleQueue[Change | None] = queue.SimpleQueue()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=options.buffer_steps)
        self._open_sockets()
        self._thread = threading.Thread(target=self._run, name="KV events", daemon=True)
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """Whether fewer than ``max_queue_size`` changes wait."""
        return self._changes.qsize() < self.options.max_queue_size

    def put(self, change: Change) -> None:
        """Publish the events of ``change``; returns at once."""
        self._changes.put(change)
        self._wake()

    def close(self) -> None:
        """Publish what waits, for a second at most, and free the endpoints."""
        self._changes.put(None)
        self._wake()
        self._thread.join(STOP_WAIT_S)
        self._waker.close(linger=0)

    def _wake(self) -> None:
        with contextlib.suppress(zmq.Again):  # a full pipe wakes it as well
            self._waker.send(b"", zmq.NOBLOCK)

    def _open_sockets(self) -> None:
        context: zmq.Context[Any] = zmq.Context.instance()
        options = self.options
        self._pub, self._woken = context.socket(zmq.PUB), context.socket(zmq.PULL)
        self._waker = context.socket(zmq.PUSH)
        self._waker.set_hwm(1)
        self._woken.set_hwm(1)
        wakeup = f"inproc://kv-events-{id(self)}"
        self._woken.bind(wakeup)
        self._waker.connect(wakeup)
        self._pub.set_hwm(options.hwm)
        self._replay = context.socket(zmq.ROUTER) if options.replay_endpoint else None
        if self._replay is not None:
            self._replay.set_hwm(0)  # else ZeroMQ drops what goes beyond 1000 messages
        endpoint = options.endpoint
        binds = options.bind
        if binds is None:
            binds = "*" in endpoint or "::" in endpoint or not endpoint.startswith("tcp")
        try:
            (self._pub.bind if binds else self._pub.connect)(endpoint)
            if self._replay is not None and options.replay_endpoint:
                endpoint = options.replay_endpoint
                self._replay.bind(endpoint)
        except zmq.ZMQError as error:
            self._close_sockets()
            self._waker.close(linger=0)
            raise refused(f"endpoint {endpoint}: {error}") from error

    def _close_sockets(self) -> None:
        for socket in filter(None, (self._pub, self._replay, self._woken)):
            socket.close(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in filter(None, (self._woken, self._replay)):
            poller.register(socket, zmq.POLLIN)
        try:
            is_open = True
            while is_open:
                ready = dict(poller.poll(None if self._changes.empty() else 0))
                if self._woken in ready:
                    self._woken.recv()
                is_open = self._publish()  # before the answer, which is then up to date
                if self._replay is not None and self._replay in ready:
                    self._answer(self._replay)
        except Exception:
            log.exception("KV events are no longer published")
        finally:
            self._close_sockets()

    def _publish(self) -> bool:
        """Send what waits, mostly in one message; False at the end."""
        events: list[Event] = []
        is_open = True
        with contextlib.suppress(queue.Empty):
            for _ in range(MAX_CHANGES):
                change = self._changes.get_nowait()
                if change is None:
                    is_open = False
                    break
                events.extend(change())
        all_events = joined(events)
        for at in range(0, len(all_events), MAX_EVENTS):
            some = all_events[at : at + MAX_EVENTS]
            fields = [as_fields(e, self._page_size, self.options.format) for e in some]
            payload = msgspec.msgpack.encode([time.time(), fields, self._rank])
            number = self._sequence.to_bytes(8, "big")
            self._sequence += 1
            self._pub.send_multipart((self.options.topic.encode(), number, payload))
            self._kept.append((number, payload))
        return is_open

    def _answer(self, router: zmq.Socket[bytes]) -> None:
        """Send a client what is kept from the number on that it asks for."""
        frames = router.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        client, _, first = frames
        for number, payload in self._kept:
            if number >= first:  # big-endian: bytes are ordered as the numbers
                router.send_multipart((client, b"", number, payload))
        router.send_multipart((client, b"", END, b""))
