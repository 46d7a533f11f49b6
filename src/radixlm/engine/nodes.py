"""Hub: rank 0's end of the connections to other nodes.

It listens at --dist-init-addr, waits until the agents of all nodes have joined
(``engine/node_agent.py``), has them start their ranks and passes on what rank 0 and these ranks say
to each other. It keeps the store in which ranks find each other, and reports the first loss of a
node or of a rank.
"""

from __future__ import annotations

import logging
import secrets
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import zmq

from radixlm.base.errors import ConfigError
from radixlm.engine.node_facts import difference
from radixlm.engine.node_files import OfferedFolders
from radixlm.engine.rank_processes import REFUSED
from radixlm.wire.cluster import (
    Beat,
    FromNode0,
    Join,
    Leave,
    NodeFacts,
    RankEnded,
    RankMessage,
    Refused,
    StartRanks,
    StoreGet,
    StoreSet,
    ToNode,
    ToNode0,
    Welcome,
)
from radixlm.wire.cluster_socket import FLAG, ClusterSocket, other_secret
from radixlm.wire.codec import Codec, MalformedMessage
from radixlm.wire.pieces import Outbox

log = logging.getLogger(__name__)

BEAT_S = 1.0
LOST_S = 4.0  # three beats missed, and the time of one that is late
REPORT_S = 10.0
MAX_MESSAGE_BYTES = 1 << 20
WAIT_S = 300.0  # --dist-timeout when unset
CLOSE_WAIT_S = 10.0


class Member:
    """A node that has joined."""

    def __init__(self, identity: bytes, facts: NodeFacts) -> None:
        self.identity, self.facts = identity, facts
        self.heard_s = time.monotonic()


class Hub:
    """Owns the socket, and the thread that uses it. ``sockets`` has one for each rank of another
    node: as to a rank of this node, each message sent is one message received."""

    def __init__(
        self, address: str, secret: str, facts: NodeFacts, nnodes: int, timeout_s: float = WAIT_S
    ) -> None:
        """ConfigError if ``address`` cannot be had."""
        self.facts, self.nnodes, self.timeout_s = facts, nnodes, timeout_s
        self.generation = secrets.token_hex(8)
        self.members: dict[int, Member] = {}
        self.sockets: dict[int, socket.socket] = {}
        self._codec, self._outgoing = Codec(ToNode0), deque[tuple[FromNode0, bytes]]()
        self._relays: dict[int, tuple[int, Outbox]] = {}  # rank -> its node, other end
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[bytes]] = {}
        self._offered = OfferedFolders()
        self._on_lost: Callable[[str, int], None] | None = None
        self._lost: tuple[str, int] | None = None
        self._num_refused = 0
        self._last_refusal = ""
        self._changed = threading.Condition()
        self._is_closed = False
        self._socket = ClusterSocket(address, secret, bind=True)
        self._other_secret = other_secret(secret)
        self._woken, self._wake = socket.socketpair()
        self.address = self._socket.address
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)
        self._thread.start()

    def wait(self) -> dict[int, NodeFacts]:
        """Wait until all nodes have joined; what they have. ConfigError after ``timeout_s``."""
        deadline_s = time.monotonic() + self.timeout_s
        with self._changed:
            while missing := self._missing():
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise ConfigError(self._why_missing(missing))
                if not self._changed.wait(min(REPORT_S, left_s)):
                    log.info("%s: waiting for node %s", self.address, ", ".join(map(str, missing)))
            return {rank: member.facts for rank, member in sorted(self.members.items())}

    def start(
        self,
        startups: Mapping[int, Sequence[dict[str, Any]]],
        on_lost: Callable[[str, int], None],
    ) -> None:
        """Start the ranks of each node. ``on_lost`` gets the reason of the first loss, and the
        status of a rank that ended or 1, in the hub's thread."""
        with self._changed:
            for node in startups.keys() - self.members.keys():  # since ``wait``
                self._lose(f"node {node} is gone")
            self._on_lost = on_lost
            for node, configs in startups.items():
                for config in configs:
                    rank = int(config["rank"])
                    self.sockets[rank], end = socket.socketpair(
                        socket.AF_UNIX, socket.SOCK_SEQPACKET
                    )
                    self._relays[rank] = (node, Outbox(end))
                self._send(StartRanks(self.generation, list(configs)), self._identity(node))
            if self._lost:
                on_lost(*self._lost)

    def tell(self, data: bytes) -> None:
        """Send a message of any size to the lowest rank of each other node."""
        with self._changed:
            for rank in self._relays:  # what was said before comes before
                self._relay(rank)
            for member in self.members.values():
                self._send(ToNode(self.generation, data), member.identity)

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._set(key, value)

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """The value of a key; None if nobody sets it in time."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, timeout_s)
            return self._values.get(key)

    def take(self, key: str, timeout_s: float) -> bytes | None:
        """``get``, and forget it."""
        with self._changed:
            value = self.get(key, timeout_s)
            self._values.pop(key, None)
            return value

    def offer(self, folders: Sequence[str], of: str) -> None:
        """Let other nodes read these folders of ``of``, and no others of it."""
        with self._changed:
            self._offered.offer(folders, of)
            for key in list(self._waiting):
                if (value := self._offered.read(key)) is not None:
                    self._answer(key, value)

    def close(self, is_final: bool = False) -> None:
        """End the ranks of the other nodes; with ``is_final`` their agents too."""
        with self._changed:
            if self._is_closed:
                return
            for member in self.members.values():
                self._send(Leave(self.generation, is_final), member.identity)
            self._is_closed = True
        self._thread.join(CLOSE_WAIT_S)
        time.sleep(0.05 if self.members else 0.0)  # zmq sends in the background, LINGER is 0
        self._socket.close()
        for one in (self._woken, self._wake, *self.sockets.values()):
            one.close()
        for _, end in self._relays.values():
            end.link.close()

    # in the hub's thread

    def _run(self) -> None:
        next_beat_s = 0.0
        while not self._is_closed or self._outgoing:
            poller = zmq.Poller()
            with self._changed:  # ``start`` adds some
                ends = {end.link.fileno(): rank for rank, (_, end) in self._relays.items()}
                for _, end in self._relays.values():
                    poller.register(end.link.fileno(), end.events)
            for source in (self._socket.socket, self._woken.fileno()):
                poller.register(source, zmq.POLLIN)
            wait_s = next_beat_s - time.monotonic()
            ready = dict(poller.poll(max(0, round(1000 * wait_s))))
            with self._changed:
                if self._woken.fileno() in ready:
                    self._woken.recv(1 << 16)
                for descriptor in ready.keys() & ends.keys():
                    self._relay(ends[descriptor])
                for identity, data in self._socket.receive():
                    self._receive(identity, data)
                now_s = time.monotonic()
                if now_s >= next_beat_s:
                    is_late = now_s - next_beat_s > BEAT_S and next_beat_s > 0
                    next_beat_s = now_s + BEAT_S
                    self._beat(now_s, is_late)
                while self._outgoing:
                    message, to = self._outgoing.popleft()
                    self._socket.send(self._codec.encode(message), to)

    def _relay(self, rank: int) -> None:
        """Pass on what rank 0 has said to a rank, and what it has not read of what that said."""
        node, end = self._relays[rank]
        end.send()
        with suppress(BlockingIOError):
            while data := end.link.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT):
                self._send(RankMessage(self.generation, rank, data), self._identity(node))

    def _beat(self, now_s: float, is_late: bool) -> None:
        self._socket.count_handshakes()
        if self._socket.num_refused and self._num_refused < 10:
            self._num_refused += 1
            log.warning("%s: a peer was refused: %s", self.address, self._other_secret)
        for node, member in list(self.members.items()):
            self._send(Beat(self.generation), member.identity)
            if is_late:  # this process stood still: others' beats may lie unread
                member.heard_s = now_s
            elif now_s - member.heard_s > LOST_S:
                if self._on_lost is None:  # nothing runs there yet
                    del self.members[node]
                    log.warning("node %d on %s is gone", node, member.facts.host)
                else:
                    self._lose(f"node {node} on {member.facts.host} sent nothing for {LOST_S:g} s")

    def _receive(self, identity: bytes, data: bytes) -> None:
        try:
            message = self._codec.decode(data)
        except MalformedMessage as error:
            log.error("%s: dropped a message: %s", self.address, error)
            return
        for member in self.members.values():
            if member.identity == identity:
                member.heard_s = time.monotonic()
        match message:
            case Join():
                self._join(identity, message)
            case StoreSet(key, value):
                self._set(key, value)
            case StoreGet(key):
                self._waiting.setdefault(key, []).append(identity)
                found = self._values.get(key)
                if found is None:
                    found = self._offered.read(key)
                if found is not None:
                    self._answer(key, found)
            case _ if message.generation != self.generation:
                self._send(Leave(message.generation), identity)  # of an earlier rank 0
            case RankMessage(_, rank, data) if rank in self._relays:
                self._relays[rank][1].send([data])
            case RankEnded(_, rank, code) if code not in (0, REFUSED):  # those are told by others
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                self._lose(f"rank {rank} ended with {how}", code)

    def _join(self, identity: bytes, join: Join) -> None:
        rank, free = join.node_rank, self._missing()
        if rank < 0:
            known = [n for n, member in self.members.items() if member.identity == identity]
            rank = next(iter(known or free), -1)
        holder = self.members.get(rank)
        reason, may_retry = difference(self.facts, join.facts), False
        if not reason and rank < 0:
            reason = f"all {self.nnodes} nodes of this replica have joined"
            may_retry = True  # one may be gone, which is not known yet
        elif not reason and not 0 < rank < self.nnodes:
            reason = f"--node-rank {rank}: this replica has nodes 0 to {self.nnodes - 1}"
        if not reason and holder is not None and holder.identity != identity:
            works = f"--node-rank {free[0]} is free" if free else "no other is free"
            reason = f"--node-rank {rank} is taken by {holder.facts.host}; {works}"
            may_retry = True
        if reason:
            if reason != self._last_refusal:  # it may ask again each second
                log.error("%s: refused a node: %s", self.address, reason)
            self._last_refusal = reason
            self._send(Refused(reason, may_retry), identity)
            return
        if holder is None:
            self.members[rank] = Member(identity, join.facts)
            facts = join.facts
            log.info("node %d joined: %s, %d cores", rank, facts.host, facts.num_cpus)
        self._send(Welcome(rank, self.generation), identity)
        self._changed.notify_all()

    def _missing(self) -> list[int]:
        return [node for node in range(1, self.nnodes) if node not in self.members]

    def _why_missing(self, missing: list[int]) -> str:
        listed = ", ".join(map(str, missing))
        hint = f" The last one that tried: {self._last_refusal}." if self._last_refusal else ""
        if self._num_refused and not hint:
            hint = f" A peer was refused: {self._other_secret}."
        return (
            f"{FLAG} {self.address}: node {listed} of {self.nnodes} has not joined within "
            f"{self.timeout_s:g} s.{hint} Start it with the same command and --node-rank "
            f"{missing[0]}, or wait longer with --dist-timeout"
        )

    def _lose(self, reason: str, code: int = 1) -> None:
        if self._lost is None and not self._is_closed:
            self._lost = (reason, code)
            log.error("%s", reason)
            if self._on_lost is not None:
                self._on_lost(reason, code)

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        self._answer(key, value)
        self._changed.notify_all()

    def _answer(self, key: str, value: bytes) -> None:
        """To those who wait for the key."""
        for identity in self._waiting.pop(key, ()):
            self._send(StoreSet(key, value), identity)

    def _identity(self, node: int) -> bytes:
        member = self.members.get(node)
        return member.identity if member is not None else b""

    def _send(self, message: FromNode0, identity: bytes) -> None:
        """Have the hub's thread send ``message``."""
        self._outgoing.append((message, identity))
        if threading.current_thread() is not self._thread:
            with suppress(BlockingIOError):  # enough of them wait
                self._wake.send(b"x", socket.MSG_DONTWAIT)
