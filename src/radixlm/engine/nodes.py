"""Hub: rank 0's end of the connections to other nodes.

It listens at --dist-init-addr, waits until the agents of all nodes have joined
(``engine/node_agent.py``), has them start their ranks, sends plans to these ranks and keeps the
store in which ranks find each other. The first loss of a node or of a rank is reported, once.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import zmq

from radixlm.base.errors import ConfigError
from radixlm.engine.node_facts import difference
from radixlm.wire.cluster import (
    Beat,
    FromNode0,
    Join,
    Leave,
    NodeFacts,
    Plan,
    RankEnded,
    RankFailed,
    RankHello,
    Refused,
    StartRanks,
    StoreGet,
    StoreSet,
    ToNode0,
    Welcome,
)
from radixlm.wire.cluster_socket import FLAG, ClusterSocket
from radixlm.wire.codec import Codec, MalformedMessage

log = logging.getLogger(__name__)

BEAT_S = 1.0
LOST_S = 4.0  # three beats missed, and the time of one that is late
TURN_MS = 50  # longest delay of a message of others that arrives while a plan is sent
REPORT_S = 10.0
WAIT_S = 300.0  # --dist-timeout when unset


class Member:
    """A node that has joined."""

    def __init__(self, identity: bytes, facts: NodeFacts) -> None:
        self.identity, self.facts = identity, facts
        self.heard_s = time.monotonic()


class Hub:
    """Owns the socket, and a thread that answers what comes in."""

    def __init__(
        self, address: str, secret: str, facts: NodeFacts, nnodes: int, timeout_s: float = WAIT_S
    ) -> None:
        """ConfigError if ``address`` cannot be had."""
        self.facts, self.nnodes, self.timeout_s = facts, nnodes, timeout_s
        self.generation = secrets.token_hex(8)
        self.members: dict[int, Member] = {}
        self._codec, self._peers = Codec(ToNode0), dict[int, bytes]()
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[bytes]] = {}
        self._on_lost: Callable[[str], None] | None = None
        self._lost: str | None = None
        self._num_plans = self._num_refused = 0
        self._last_refusal = ""
        self._changed = threading.Condition()  # its lock also guards the socket
        self._is_closed = False
        self._socket = ClusterSocket(address, secret, bind=True)
        self.address = self._socket.address
        self._descriptor = int(self._socket.socket.getsockopt(zmq.FD))
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)
        self._thread.start()

    # for the thread of rank 0

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
        self, startups: Mapping[int, Sequence[dict[str, Any]]], on_lost: Callable[[str], None]
    ) -> None:
        """Start the ranks of each node. ``on_lost`` gets the reason of the first loss, in the
        hub's thread."""
        with self._changed:
            self._on_lost = on_lost
            for node, orders in startups.items():
                self._send(StartRanks(self.generation, list(orders)), self.members[node].identity)
            if self._lost:
                on_lost(self._lost)

    def wait_for_ranks(self, ranks: Sequence[int], timeout_s: float) -> bool:
        """Whether all ``ranks`` take plans, within the time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._lost is not None or set(ranks) <= self._peers.keys(), timeout_s
            ) and (self._lost is None)

    def write(self, payload: bytes) -> None:
        """Send the next plan to the ranks of other nodes."""
        with self._changed:
            data = self._codec.encode(Plan(self._num_plans, payload))
            self._num_plans += 1
            for identity in self._peers.values():
                self._socket.send(data, identity)

    def set(self, key: str, value: bytes) -> None:
        """Set a key of the store."""
        with self._changed:
            self._set(key, value)

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """The value of a key; None if nobody sets it in time."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, timeout_s)
            return self._values.get(key)

    def close(self, is_final: bool = False) -> None:
        """End the ranks of the other nodes; with ``is_final`` their agents too."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            for member in self.members.values():
                self._send(Leave(self.generation, is_final), member.identity)
        self._thread.join()
        time.sleep(0.05 if self.members else 0.0)  # zmq sends in the background, LINGER is 0
        self._socket.close()

    # in the hub's thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._descriptor, zmq.POLLIN)
        next_beat_s = 0.0
        while not self._is_closed:
            # the descriptor is edge-triggered, so this may miss a message: for one turn
            poller.poll(TURN_MS)
            with self._changed:
                for identity, data in self._socket.receive():
                    self._receive(identity, data)
                now_s = time.monotonic()
                if now_s >= next_beat_s:
                    is_late = now_s - next_beat_s > BEAT_S and next_beat_s > 0
                    next_beat_s = now_s + BEAT_S
                    self._beat(now_s, is_late)

    def _beat(self, now_s: float, is_late: bool) -> None:
        self._socket.count_handshakes()
        if self._socket.num_refused and self._num_refused < 10:
            self._num_refused += 1
            log.warning("%s: a peer without the cluster's secret was refused", self.address)
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
                if key in self._values:
                    self._send(StoreSet(key, self._values[key]), identity)
                else:
                    self._waiting.setdefault(key, []).append(identity)
            case _ if message.generation != self.generation:
                self._send(Leave(message.generation), identity)  # of an earlier rank 0
            case RankHello(_, rank):
                self._peers[rank] = identity
                self._changed.notify_all()
            case RankFailed(_, rank, reason):
                self._lose(f"rank {rank}: {reason}")
            case RankEnded(_, rank, code):
                self._lose(f"rank {rank} ended with status {code}")

    def _join(self, identity: bytes, join: Join) -> None:
        rank = join.node_rank
        free = self._missing()
        if rank < 0 and free:
            known = [n for n, member in self.members.items() if member.identity == identity]
            rank = known[0] if known else free[0]
        holder = self.members.get(rank)
        reason, may_retry = difference(self.facts, join.facts), False
        if not reason and not 0 < rank < self.nnodes:
            reason = (
                f"--node-rank {join.node_rank}: this replica has nodes 0 to {self.nnodes - 1}"
                if join.node_rank >= 0
                else f"all {self.nnodes} nodes of this replica have joined"
            )
        if not reason and holder is not None and holder.identity != identity:
            works = f"--node-rank {free[0]} is free" if free else "no other is free"
            reason = f"--node-rank {rank} is taken by {holder.facts.host}; {works}"
            may_retry = True
        if reason:
            self._last_refusal = reason
            log.error("%s: refused a node: %s", self.address, reason)
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
            hint = " A peer was refused whose --cluster-secret-file holds another secret."
        return (
            f"{FLAG} {self.address}: node {listed} of {self.nnodes} has not joined within "
            f"{self.timeout_s:g} s.{hint} Start it with the same command and --node-rank "
            f"{missing[0]}, or wait longer with --dist-timeout"
        )

    def _lose(self, reason: str) -> None:
        if self._lost is None and not self._is_closed:
            self._lost = reason
            log.error("%s", reason)
            self._changed.notify_all()
            if self._on_lost is not None:
                self._on_lost(reason)

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for identity in self._waiting.pop(key, ()):
            self._send(StoreSet(key, value), identity)
        self._changed.notify_all()

    def _send(self, message: FromNode0, identity: bytes) -> None:
        self._socket.send(self._codec.encode(message), identity)
