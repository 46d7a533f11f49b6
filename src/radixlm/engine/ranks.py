"""How the ranks of a replica reach each other: rank 0 through ``Followers``, every other through
``LeaderLink``. Both hand out ``ranks``, the groups of the layers, and agree on numbers while they
load."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

import msgspec

from radixlm.base.errors import CheckpointError, ConfigError, InvalidRequest, RadixError, RankLost
from radixlm.config.server_config import ServerConfig
from radixlm.distributed.groups import ALONE, Ranks
from radixlm.distributed.remote import HubStore, KeyValues, RemoteValues, over_hosts
from radixlm.distributed.shm import SPIN_US, Layout, Segment
from radixlm.engine.node_facts import node_facts
from radixlm.engine.node_files import fetch, fetch_adapter
from radixlm.engine.nodes import WAIT_S, Hub
from radixlm.engine.rank_processes import RankProcesses, topology_of
from radixlm.engine.run_folder import remove_stale
from radixlm.executor.runner import Runner
from radixlm.lora.registry import Spool
from radixlm.parallel.relay import RENEW, STOP, Answer, Relay, within
from radixlm.scheduler.loop import Executor
from radixlm.warm_restart.digests import DigestsOfHosts, GroupDigests, answer_digests
from radixlm.weight_updates.tensor_spool import TensorSpool
from radixlm.wire.cluster_socket import local_address, read_secret
from radixlm.wire.curve import remember
from radixlm.wire.pieces import pieces, read_pieces
from radixlm.wire.weights import WeightsSource

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 1 << 20
AGREE, FAILED = -2, -1  # calls of an ``Answer`` that no command has
AGREED = b"\2"  # begins the numbers agreed on; between hosts, pieces of commands come as well
_ERRORS = {kind.__name__: kind for kind in (ConfigError, CheckpointError, InvalidRequest, RankLost)}


def _shared(config: ServerConfig, ranks: list[int]) -> tuple[Layout, float, float]:
    """How the ranks of this host share memory: the layout, how many seconds they wait for each
    other, and how many microseconds of these they spin, which they do with a core for each."""
    num_threads = (config.execute.cpu_threads or 1) * config.parallel.num_processes
    spin_us = SPIN_US if num_threads <= (os.cpu_count() or 1) else 0.0
    return Layout(topology_of(config), ranks), config.parallel.rank_timeout_s, spin_us


def _over_hosts(ranks: Ranks, config: ServerConfig, values: KeyValues, generation: str) -> Ranks:
    """``ranks`` with groups between hosts, too; returns when the other hosts' ranks have come."""
    p = config.parallel
    address = local_address(str(p.dist_init_addr))
    store = HubStore(values, config.serve.load_timeout_s, generation)
    return over_hosts(ranks, topology_of(config), store, address, p.rank_timeout_s)


def start_nodes(
    startup: dict[str, Any], config: ServerConfig, path: Path, processes: RankProcesses
) -> Hub | None:
    """Wait for the other nodes and start their ranks; None if there are none. ``path``: the
    model's."""
    p, topology = config.parallel, topology_of(config)
    if p.nnodes == 1:
        return None
    address = str(p.dist_init_addr)
    facts = node_facts(config, path, local_address(address))
    secret = read_secret(p.cluster_secret_file)
    hub = Hub(address, secret, facts, p.nnodes, p.dist_timeout or WAIT_S)
    hub.wait()
    startup = {**startup, "local_ranks": None}
    startups = {}
    for node in range(1, p.nnodes):
        ranks = topology.ranks_of(node)
        startups[node] = [{**startup, "rank": rank, "ranks": ranks} for rank in ranks]
    hub.start(startups, processes.end)
    return hub


class Peers(Protocol):
    """The other ranks, while an engine is assembled."""

    ranks: Ranks
    replica: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which schedules and samples."""
        return self.ranks.place.rank == 0

    @property
    def is_lowest(self) -> bool:
        """Whether it is the lowest rank of its host."""
        return self.is_first

    def agree(self, numbers: Sequence[int]) -> list[int]:
        """The smallest of each number over all ranks; all call it in the same order."""

    def digests_of_hosts(self, own: GroupDigests) -> GroupDigests:
        """``own``, checksums of pages in the memory of this host's ranks, over all hosts. The
        lowest rank of each host calls it; for other hosts than rank 0's it answers rank 0."""
        return own

    def executor(self, make: Callable[[], Runner]) -> Executor:
        """What the scheduler calls in place of rank 0's runner, which ``make`` makes while the
        other ranks make theirs: on GPUs they run steps for it."""

    def bring(self, source: WeightsSource, own: Path) -> tuple[WeightsSource, list[TensorSpool]]:
        """``source`` as this rank can read it, and the copies that this took. ``own``: the
        checkpoint's folder here."""
        return source, []

    def bring_adapter(self, folder: str) -> Spool | None:
        """A copy of an adapter that came in a request to rank 0's server, if this rank needs one
        to read it."""
        return None

    def stop(self) -> None:
        """An orderly end: that of rank 0 ends the others."""
        return

    def take_waited_s(self) -> float:
        """Seconds that this rank has waited for others since the last call."""
        return 0.0


class NoPeers(Peers):
    """A replica of one rank."""

    ranks = ALONE

    def agree(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)

    def executor(self, make: Callable[[], Runner]) -> Executor:
        return make()


NO_PEERS = NoPeers()


class _Call:
    """The answers to one command, as they come."""

    def __init__(self) -> None:
        self.by_rank: dict[int, Any] = {}
        self.future: Future[list[Any]] = Future()


class Followers(Peers):
    """The other ranks, for rank 0. A thread reads what they answer."""

    def __init__(
        self, processes: RankProcesses, config: ServerConfig, hub: Hub | None = None
    ) -> None:
        """``hub``: of the ranks of other nodes, which have been started."""
        self.processes, self._hub = processes, hub
        self.limit_s, self._load_limit_s = (
            config.parallel.rank_timeout_s,
            config.serve.load_timeout_s,
        )
        self._segment = Segment.create(*_shared(config, [0, *processes.ranks]))
        processes.on_loss = self._segment.poison
        self.ranks = self._segment.ranks(0)
        self._ring = self._segment.ring(0)
        self._sockets = {**processes.sockets, **(hub.sockets if hub else {})}
        self._num_others = config.parallel.world_size - 1
        self._calls: dict[int, _Call] = defaultdict(_Call)
        self._last_call = 0
        self._lock, self._relays = threading.Lock(), False
        generation = hub.generation if hub else "alone"
        self._num_nodes = config.parallel.nnodes
        for link in processes.sockets.values():
            socket.send_fds(link, [generation.encode()], [self._segment.fd])
        for rank, link in self._sockets.items():
            name = f"answers of rank {rank}"
            threading.Thread(target=self._read, args=(link,), name=name, daemon=True).start()
        if hub is not None:
            self.ranks = _over_hosts(self.ranks, config, hub, generation)

    def _read(self, link: socket.socket) -> None:
        """Read the answers of one rank until it ends."""
        decoder = msgspec.msgpack.Decoder(Answer)
        with suppress(OSError):  # it was killed
            while (data := read_pieces(link.recv)) is not None:
                self._take(decoder.decode(data))

    def _take(self, answer: Answer) -> None:
        if answer.call == FAILED:
            log.error("rank %d: %s", answer.rank, answer.error)
        error = None
        if answer.error:
            kind = _ERRORS.get(answer.kind, RadixError)
            error = kind(f"rank {answer.rank}: {answer.error}")
        with self._lock:
            call = self._calls[AGREE if answer.call == FAILED else answer.call]
            call.by_rank[answer.rank] = error or answer.data
            is_whole = len(call.by_rank) == self._num_others
            if is_whole and answer.call >= 0:
                del self._calls[answer.call]
        if answer.call == FAILED and error is not None:
            with suppress(InvalidStateError):
                call.future.set_exception(error)
        elif is_whole:
            _settle(call)

    def expect(self) -> tuple[int, Future[list[Any]]]:
        with self._lock:
            self._last_call += 1
            return self._last_call, self._calls[self._last_call].future

    def agree(self, numbers: Sequence[int]) -> list[int]:
        with self._lock:  # which makes it, unless an answer has
            call = self._calls[AGREE]
        theirs = within(call.future, self._load_limit_s, "load")
        with self._lock:
            del self._calls[AGREE]
        least = [min(column) for column in zip(numbers, *theirs, strict=True)]
        data = AGREED + msgspec.msgpack.encode(least)
        for link in self._sockets.values():
            link.send(data)
        return least

    def take_waited_s(self) -> float:
        return self._segment.take_waited_s()

    def tell(self, kind: int, data: bytes = b"") -> None:
        message = bytes((kind,)) + data
        if self._hub is not None:
            self._hub.tell(message)
        self._ring.write(message)

    def executor(self, make: Callable[[], Runner]) -> Executor:
        if self._relays:
            self.tell(RENEW)
        self._relays = True
        return Relay(make(), self)

    def digests_of_hosts(self, own: GroupDigests) -> GroupDigests:
        if self._hub is None:
            return own
        nodes = range(1, self._num_nodes)
        return DigestsOfHosts(own, self._hub, nodes, self._hub.generation, self._load_limit_s)

    def bring(self, source: WeightsSource, own: Path) -> tuple[WeightsSource, list[TensorSpool]]:
        if self._hub is not None:
            self._hub.offer(source.deltas, "weights")
        return source, []

    def bring_adapter(self, folder: str) -> Spool | None:
        if self._hub is not None:
            self._hub.offer([folder], folder)
        return None

    def stop(self) -> None:
        self.processes.is_stopping = True  # before the first of them can end
        self.tell(STOP)
        self.processes.stop()
        if self._hub is not None:
            self._hub.close(is_final=True)


def _settle(call: _Call) -> None:
    """All ranks have answered: hand out the answers, or the first error."""
    answers = [call.by_rank[rank] for rank in sorted(call.by_rank)]
    error = next((one for one in answers if isinstance(one, Exception)), None)
    with suppress(InvalidStateError):
        if error is not None:
            call.future.set_exception(error)
        else:
            call.future.set_result(answers)


class LeaderLink(Peers):
    """Rank 0, for each other rank."""

    def __init__(self, startup: dict[str, Any], config: ServerConfig) -> None:
        self.rank = int(startup["rank"])
        self._socket = socket.socket(fileno=startup["socket"])
        generation, (descriptor,), _, _ = socket.recv_fds(self._socket, MAX_MESSAGE_BYTES, 1)
        layout, *waits = _shared(config, startup["ranks"])
        os.ftruncate(descriptor, layout.num_bytes)  # an agent knows no layout
        self._segment = Segment(descriptor, layout, *waits)
        self.ranks = self._segment.ranks(self.rank)
        self._ring, self._waited_s = self._segment.ring(self.rank), 0.0
        self._unread = deque[bytes]()  # pieces of commands
        self._lock = threading.Lock()
        # of another node: rank 0 reaches it through the agent, and the others there through it
        self._is_lowest = self.rank == min(map(int, startup["ranks"]))
        self._generation = generation.decode()
        self._config, self._copies = config, WeakSet[TensorSpool | Spool]()
        if config.parallel.nnodes > 1:
            if keys := startup.get("curve_keys"):  # of a rank that an agent started
                remember(read_secret(config.parallel.cluster_secret_file), keys)
            with self._values() as values:
                self.ranks = _over_hosts(self.ranks, config, values, self._generation)

    @contextmanager
    def _values(self) -> Iterator[RemoteValues]:
        """Node 0's store."""
        p = self._config.parallel
        values = RemoteValues(str(p.dist_init_addr), read_secret(p.cluster_secret_file))
        try:
            yield values
        finally:
            values.close()

    @property
    def is_lowest(self) -> bool:
        return self._is_lowest

    def digests_of_hosts(self, own: GroupDigests) -> GroupDigests:
        node = topology_of(self._config).node_of(self.rank)

        def answer() -> None:
            with self._values() as values:
                answer_digests(own, values, node, self._generation)

        threading.Thread(target=answer, name="page digests", daemon=True).start()
        return own

    def bring(self, source: WeightsSource, own: Path) -> tuple[WeightsSource, list[TensorSpool]]:
        if topology_of(self._config).node_of(self.rank) == 0 or not source.deltas:
            return source, []
        remove_stale()  # of ranks that were killed
        with self._values() as values:
            spools = [fetch(values, folder) for folder in source.deltas]
        self._copies.update(spools)
        # where this node has its checkpoint elsewhere; digests tell whether it is the same
        folder = source.folder if Path(source.folder).is_dir() else str(own)
        deltas = tuple(str(spool.path) for spool in spools)
        return msgspec.structs.replace(source, folder=folder, deltas=deltas), spools

    def bring_adapter(self, folder: str) -> Spool | None:
        if topology_of(self._config).node_of(self.rank) == 0:
            return None
        remove_stale()  # of ranks that were killed
        with self._values() as values:
            copy = fetch_adapter(values, folder)
        self._copies.add(copy)
        return copy

    def read(self) -> bytes:
        self._waited_s += self._segment.take_waited_s()
        message = self._read_relayed() if self._is_lowest else self._ring.read()
        self._segment.take_waited_s()  # while there was nothing to do
        return message

    def _read_relayed(self) -> bytes:
        message = read_pieces(self._receive)
        if message is None:
            raise RankLost("the agent of this node is gone")
        self._ring.write(message)
        return message

    def _receive(self, limit: int) -> bytes:
        return self._unread.popleft() if self._unread else self._socket.recv(limit)

    def take_waited_s(self) -> float:
        waited_s, self._waited_s = self._waited_s + self._segment.take_waited_s(), 0.0
        return waited_s

    def answer(self, answer: Answer) -> None:
        data = msgspec.msgpack.encode(answer)
        with self._lock, suppress(OSError):  # rank 0 is gone, and this one soon
            for piece in pieces(data):
                self._socket.send(piece)

    def agree(self, numbers: Sequence[int]) -> list[int]:
        self.answer(Answer(self.rank, AGREE, list(numbers)))
        while data := self._socket.recv(MAX_MESSAGE_BYTES):
            if data[:1] == AGREED:
                return msgspec.msgpack.decode(data[1:], type=list[int])
            self._unread.append(data)  # of a command that rank 0 has sent before
        raise RankLost("rank 0 is gone")

    def stop(self) -> None:
        for copy in self._copies:
            copy.delete()

    def fail(self, error: Exception) -> None:
        """Tell rank 0 why this rank cannot go on."""
        self.answer(Answer(self.rank, FAILED, None, str(error), type(error).__name__))

    def executor(self, make: Callable[[], Runner]) -> Executor:
        raise AssertionError("only rank 0 has a scheduler")
