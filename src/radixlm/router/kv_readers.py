"""KV events of the workers, read from ZeroMQ in the gateway's loop into its index."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import msgspec
import zmq

from radixlm.base.errors import TransferError
from radixlm.router.kv_events_in import Feed, feeds_of
from radixlm.router.kv_index import Known, KvIndex, Match
from radixlm.router.kv_stream import KvStream, Message, read_message
from radixlm.router.prefix_hashes import PLAIN, Namespace, TokenIds
from radixlm.router.worker import State, Worker

if TYPE_CHECKING:
    from radixlm.router.app import Gateway
    from radixlm.router.registry import Event

log = logging.getLogger(__name__)

END: Final = (-1).to_bytes(8, "big", signed=True)
SLICE_S: Final = 0.002  # in which messages are taken before other work gets its turn
REPLAY_WAIT_S: Final = 3.0
QUIET_S: Final = 10.0  # without a message, after which the gateway asks whether it missed one
FIRST_QUIET_S: Final = 1.0  # the first time, as a subscription takes effect after the connection


class Reader:
    """Reads one publisher into its stream."""

    def __init__(self, context: zmq.Context[Any], feed: Feed, stream: KvStream) -> None:
        """zmq.ZMQError for an endpoint that is none."""
        self.stream, self.feed = stream, feed
        self._loop = asyncio.get_running_loop()
        self._replayed: list[Message] = []
        self._num_asked = self._num_open = 0  # replays; those that have not ended
        self._asked_s = 0.0  # when the replay under way was asked for; 0: none is
        self._heard_s, self._quiet_s = time.monotonic(), FIRST_QUIET_S
        self._sub: Any = context.socket(zmq.SUB)
        self._dealer: Any = context.socket(zmq.DEALER) if feed.replay_endpoint else None
        self._sub.set_hwm(0)  # else ZeroMQ drops what goes beyond 1000 messages
        self._sub.subscribe(feed.topic)
        for socket, endpoint in self._sockets():
            socket.linger = 0
            if feed.endpoint.startswith("tcp://["):
                socket.ipv6 = True
            try:
                socket.connect(endpoint)
            except zmq.ZMQError:
                self.close()
                raise
            self._loop.add_reader(socket.getsockopt(zmq.FD), self._drain, socket)
            self._loop.call_soon(self._drain, socket)
        self.restart()

    def restart(self) -> None:
        """Learn all anew."""
        self.stream.restart()
        self._quiet_s = FIRST_QUIET_S
        self._ask()

    def close(self) -> None:
        """Free the sockets."""
        for socket, _ in self._sockets():
            self._loop.remove_reader(socket.getsockopt(zmq.FD))
            socket.close(linger=0)
        self._sub = self._dealer = None

    def tick(self, now_s: float) -> None:
        """A replay that does not come ends; after silence it is asked what was missed."""
        if self._asked_s and now_s - self._asked_s > REPLAY_WAIT_S:
            self._end_replay()
        elif not self._asked_s and now_s - self._heard_s > self._quiet_s:
            self._heard_s, self._quiet_s = now_s, QUIET_S
            self._ask()

    def _sockets(self) -> list[tuple[Any, str]]:
        pairs = (self._sub, self.feed.endpoint), (self._dealer, self.feed.replay_endpoint or "")
        return [(socket, endpoint) for socket, endpoint in pairs if socket is not None]

    def _ask(self) -> None:
        self._num_asked += 1
        self._num_open += 1
        if self._dealer is None:
            self._end_replay()
            return
        self._asked_s, self._replayed = time.monotonic(), []
        number = self.stream.next_number.to_bytes(8, "big")
        try:
            self._dealer.send_multipart((b"", number), zmq.NOBLOCK)
        except zmq.Again:
            return  # tick ends it
        self._loop.call_soon(self._drain, self._dealer)  # a send may swallow its readiness

    def _end_replay(self) -> None:
        messages, self._replayed, self._asked_s = deque(self._replayed), [], 0.0
        self._num_open = 0
        self._heard_s = time.monotonic()
        self._go_on(messages, self._num_asked)

    def _go_on(self, messages: deque[Message], number: int) -> None:
        """Take replayed messages, some at a time: there may be thousands."""
        end_s = time.monotonic() + SLICE_S
        while messages:
            if self._sub is None or number != self._num_asked:
                return  # closed, or asked anew
            if time.monotonic() > end_s:
                self._loop.call_soon(self._go_on, messages, number)
                return
            message = messages.popleft()
            if self.stream.is_waiting:
                self.stream.go_on(message)
            else:  # of a question after silence
                self._take(message)
        if self.stream.is_waiting:
            self.stream.replayed()

    def _drain(self, socket: Any) -> None:
        """Read what is there. ZeroMQ's descriptor tells of changes only: read until it is empty."""
        end_s = time.monotonic() + SLICE_S
        while time.monotonic() < end_s:
            if socket is not self._sub and socket is not self._dealer:
                return  # closed
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 3 and len(frames[1]) == 8:
                self._read(socket is self._dealer, frames[1], frames[2])
        self._loop.call_soon(self._drain, socket)

    def _read(self, is_replay: bool, number: bytes, payload: bytes) -> None:
        if is_replay and number == END:
            self._num_open -= 1
            if self._num_open > 0:
                self._replayed = []  # of an earlier question
            else:
                self._end_replay()
            return
        try:
            message = read_message(int.from_bytes(number, "big"), payload)
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
            log.warning("KV events of %s: a message cannot be read: %s", self.stream.name, error)
            self.stream.faulty()
            return
        if is_replay:
            self._replayed.append(message)
        else:
            self._heard_s = time.monotonic()
            self._take(message)

    def _take(self, message: Message) -> None:
        if self.stream.take(message):
            self._ask()


class KvReaders:
    """The readers of all workers, and the index that they fill."""

    def __init__(self, gateway: Gateway) -> None:
        self.index = KvIndex(gateway.options.index_max_mb << 20)
        self._gateway = gateway
        self._context: zmq.Context[Any] = zmq.Context()
        self._readers: dict[str, list[Reader]] = {}  # by the worker's name
        self._feeds: dict[str, list[Feed]] = {}  # by the worker's name, also those of no use
        self._streams: dict[str, KvStream] = {}  # by the name in the index
        self._has_ranks = False  # a worker has several publishers
        self._away: set[str] = set()
        self.index.on_cleared = self._on_cleared
        gateway.every(1.0, self.tick)
        gateway.on_stop.append(self.close)

    def on_change(self, event: Event, worker: Worker) -> None:
        """Follow the registry."""
        name = worker.name
        if event == "left":
            self._close(name)
        elif worker.state is not State.READY:
            if worker.state is State.UNHEALTHY:
                self._away.add(name)
        elif event == "joined" or self._feeds.get(name) != feeds_of(worker):
            self._open(worker)
        elif name in self._away:
            self._away.discard(name)
            for reader in self._readers[name]:
                reader.restart()

    def tick(self) -> None:
        """Once a second."""
        now_s = time.monotonic()
        for name, readers in self._readers.items():
            for reader in readers:
                reader.tick(now_s)
                stream = reader.stream
                if stream.has_lost and not stream.is_waiting:
                    stream.has_lost = False
                    self._gateway.spawn(self._ask_snapshot(name))

    def matched(
        self, ids: TokenIds, namespace: Namespace = PLAIN, known: Known | None = None
    ) -> dict[str, Match]:
        """What the workers hold of a prompt, by their names: of several publishers of one worker,
        the best."""
        found = self.index.matched(ids, namespace, known)
        if not self._has_ranks and not any(s.is_waiting for s in self._streams.values()):
            return found
        result: dict[str, Match] = {}
        for name, match in found.items():
            if self._streams[name].is_waiting:
                continue
            if "#" in name:
                name = name.partition("#")[0]
                match = max(match, result.get(name, match))
            result[name] = match
        return result

    def is_complete(self, name: str) -> bool:
        """Whether the index tells all that the worker ``name`` holds."""
        readers = self._readers.get(name)
        return bool(readers) and all(r.stream.is_complete_now for r in readers or ())

    def figures(self) -> dict[tuple[str, ...], float]:
        streams = [r.stream for readers in self._readers.values() for r in readers]
        figures = {
            "blocks": len(self.index),
            "bytes": self.index.num_bytes,
            "refused": self.index.num_refused,
            "orphans": self.index.num_orphans,
            "trusted": sum(stream.is_complete_now for stream in streams),
            "gaps": sum(stream.num_gaps for stream in streams),
            "restarts": sum(stream.num_resets for stream in streams),
            "faulty": sum(stream.num_faulty for stream in streams),
        }
        return {(name,): float(value) for name, value in figures.items()}

    def close(self) -> None:
        """Free all sockets."""
        for name in list(self._readers):
            self._close(name)
        self._context.destroy(linger=0)

    def _on_cleared(self, name: str) -> None:
        """What was sent to the worker lately is not there any more."""
        if self._gateway.tokens is not None:
            self._gateway.tokens.forget(name.partition("#")[0])

    def _open(self, worker: Worker) -> None:
        self._close(worker.name)
        feeds = self._feeds[worker.name] = feeds_of(worker)
        readers = self._readers[worker.name] = []
        self._has_ranks |= len(feeds) > 1
        for rank, feed in enumerate(feeds):
            name = worker.name if len(feeds) == 1 else f"{worker.name}#{rank}"
            stream = self._streams[name] = KvStream(self.index, name)
            try:
                readers.append(Reader(self._context, feed, stream))
            except zmq.ZMQError as error:
                log.warning("KV events of %s at %s: %s", name, feed.endpoint, error)
                del self._streams[name]
        if feeds:
            log.info("worker %s: KV events from %s", worker.name, feeds[0].endpoint)

    def _close(self, name: str) -> None:
        self._away.discard(name)
        self._feeds.pop(name, None)
        for reader in self._readers.pop(name, ()):
            reader.close()
            self.index.left(reader.stream.name)
            del self._streams[reader.stream.name]

    async def _ask_snapshot(self, name: str) -> None:
        """Let a RadixLM server publish its whole cache."""
        for worker in self._gateway.registry.find(name):
            if not (worker.facts.get("kv_events") or {}).get("has_snapshot"):
                continue
            try:
                await self._gateway.upstream.fetch(
                    worker.url, "POST", "/kv_snapshot", timeout_s=10.0, api_key=worker.api_key
                )
            except TransferError as error:
                log.warning("worker %s publishes no snapshot: %s", name, error)
