"""NodeAgent: joins node 0 (``engine/nodes.py``), starts the ranks of this node and watches them.

Its ranks live as long as it does and node 0 sends beats. When node 0's process is replaced
or falls silent, the agent ends its ranks and joins again.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import zmq

from radixlm.base.errors import ConfigError
from radixlm.config.server_config import ServerConfig, flat
from radixlm.engine.kept_pool import KeptPool
from radixlm.engine.model_info import resolved
from radixlm.engine.node_facts import node_facts
from radixlm.engine.nodes import BEAT_S, LOST_S, MAX_MESSAGE_BYTES, WAIT_S
from radixlm.engine.process import EngineProcess
from radixlm.engine.rank_processes import COMMAND
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
    ToNode,
    ToNode0,
    Welcome,
)
from radixlm.wire.cluster_socket import (
    FLAG,
    ClusterSocket,
    local_address,
    other_secret,
    read_secret,
)
from radixlm.wire.codec import Codec
from radixlm.wire.curve import private_keys
from radixlm.wire.pieces import Outbox, pieces

log = logging.getLogger(__name__)

RETRY_S = 2 * LOST_S  # how long a node may wait for the place of one that is gone
END_WAIT_S = 1.0  # for the process of a rank that has closed its socket
MAX_HANDSHAKES = 3  # that fail in a row until the secret is believed to differ

# options that a node reads from its own command line; node 0's hold for all others
OWN = ("model_path", "tokenizer_path", "cluster_secret_file", "numa_node", "base_gpu_id")


class RankProcess(EngineProcess):
    """The process of a rank, which may wait for its startup config, and a socket to it."""

    def __init__(self, command: Sequence[str]) -> None:
        self.socket, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._number = self._theirs.fileno()
        self.outbox = Outbox(self.socket)
        try:
            super().__init__(command, descriptors=(self._number,))
        finally:
            self._theirs.close()

    def start(self, startup: dict[str, Any], segment: int, generation: str) -> None:
        """Send the startup config, the replica's generation, and the descriptor of the memory that
        it shares with others."""
        with suppress(OSError):  # it may have ended
            socket.send_fds(self.socket, [generation.encode()], [segment])
        self.send_config({**startup, "socket": self._number, "parent": os.getpid()})

    def drop(self, wait_s: float = 0.0) -> int:
        self.socket.close()
        return super().drop(wait_s)


class NodeAgent:
    """One agent. ``run`` blocks; ``stop`` may be called from a signal handler or a thread."""

    def __init__(
        self,
        address: str,
        secret: str,
        facts: NodeFacts,
        node_rank: int,
        own_options: Mapping[str, Any],
        timeout_s: float = WAIT_S,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """``own_options`` replace node 0's in the startup configs; ``command`` runs a rank."""
        self.address, self.facts = address, facts
        # -1 asks for a free place at each join: another node may have taken the former one
        self._asked_rank = self.node_rank = node_rank
        self._options, self._timeout_s, self._command = own_options, timeout_s, command
        self._codec = Codec(FromNode0)
        self._secret = secret
        self._socket: ClusterSocket
        self._unread: list[Any] = []
        self._generation = ""  # "" while it has not joined
        self.ranks: dict[int, RankProcess] = {}
        self._num_ranks = 0  # of the last replica
        self._ready_made: list[RankProcess] = []  # import torch while nothing is to be done
        self._kept = KeptPool((), 0)  # with --warm-restart
        self._woken, self._wake = socket.socketpair()
        self._is_stopping = False

    def stop(self) -> None:
        self._is_stopping = True
        with suppress(OSError):  # it has returned
            self._wake.send(b"x")

    def run(self) -> int:
        """0 after node 0 or ``stop`` ended it. ConfigError if node 0 refuses this node or does not
        answer."""
        self._socket = ClusterSocket(
            self.address, self._secret, bind=False, identity=secrets.token_bytes(8)
        )
        try:
            while not self._is_stopping:
                self._join()
                if self._is_stopping or self._serve():
                    break
        finally:
            self._end_ranks()
            for process in self._ready_made:
                process.drop()
            self._kept.close()
            self._socket.close()
            self._woken.close()
            self._wake.close()
        return 0

    def _join(self) -> None:
        """Ask to join until node 0 agrees."""
        began_s = time.monotonic()
        refusal = ""
        while not self._is_stopping:
            self._send(Join(self._asked_rank, self.facts))
            messages = self._receive(BEAT_S)
            for number, message in enumerate(messages, 1):
                if isinstance(message, Welcome):
                    self._unread = messages[number:]
                    self._generation, self.node_rank = message.generation, message.node_rank
                    self._heard_s = time.monotonic()
                    log.info("joined %s as node %d", self.address, self.node_rank)
                    return
                if isinstance(message, Refused):
                    refusal = message.reason
                    if not message.may_retry or time.monotonic() - began_s > RETRY_S:
                        raise ConfigError(f"node 0 at {self.address} refused this node: {refusal}")
                    select.select([self._woken], [], [], BEAT_S)  # the place is not free at once
            self._socket.count_handshakes()
            if self._socket.num_refused >= MAX_HANDSHAKES:
                raise ConfigError(
                    f"{FLAG} {self.address} closed the connection: {other_secret(self._secret)}, "
                    "or the port is another program's"
                )
            if time.monotonic() - began_s > self._timeout_s:
                raise ConfigError(self._why_unanswered())

    def _why_unanswered(self) -> str:
        within = f"within {self._timeout_s:g} s"
        if self._socket.is_connected:
            return (
                f"{FLAG} {self.address}: what listens there has not answered {within}: another "
                "program has the port, or node 0 hangs"
            )
        return (
            f"{FLAG} {self.address}: no answer {within}; start node 0 there, or wait longer with "
            "--dist-timeout"
        )

    def _serve(self) -> bool:
        """Obey node 0 until it is lost (False), or this agent is to end (True)."""
        next_beat_s = 0.0
        while not self._is_stopping:
            began_s = time.monotonic()
            messages = self._receive(BEAT_S / 2)
            now_s = time.monotonic()
            is_late = now_s - began_s > BEAT_S  # this process stood still, node 0 perhaps with it
            self._heard_s = now_s if messages or is_late else self._heard_s
            for message in messages:
                if message.generation != self._generation:  # of a node 0 that is gone
                    continue
                if isinstance(message, RankMessage) and message.rank in self.ranks:
                    self.ranks[message.rank].outbox.send([message.data])
                elif isinstance(message, ToNode) and self.ranks:
                    self.ranks[min(self.ranks)].outbox.send(pieces(message.data))
                elif isinstance(message, StartRanks):
                    self._start_ranks(message.startups)
                elif isinstance(message, Leave):
                    log.info("node 0 ended this replica")
                    if message.is_final:  # the ranks were told to stop, and delete their files
                        self._end_ranks(END_WAIT_S)
                        return True
                    self._leave()
                    return False
            if now_s - self._heard_s > LOST_S:
                log.warning("node 0 at %s sent nothing for %g s", self.address, LOST_S)
                for rank in self.ranks:  # it may only have stood still: then it must hear of this
                    self._send(RankEnded(self._generation, rank, 1))
                self._leave()
                return False
            if self._is_node0_new() or now_s >= next_beat_s:
                self._send(Beat(self._generation))
                next_beat_s = now_s + BEAT_S
        return True

    def _is_node0_new(self) -> bool:
        """Whether node 0 was reached again: it may be another process, which tells by its answer to
        a beat. Where it was lost it has most likely ended, and other ranks will be wanted."""
        is_lost, is_reached = self._socket.count_handshakes()
        if is_lost:
            self._make_ready()
        return is_reached

    def _receive(self, wait_s: float) -> list[Any]:
        """What node 0 sent within the time, or until it is reached; passes on what ranks say."""
        if self._unread:
            unread, self._unread = self._unread, []
            return unread
        poller = zmq.Poller()
        for source in (self._socket.socket, self._socket.monitor, self._woken):
            poller.register(source, zmq.POLLIN)
        for process in self.ranks.values():
            poller.register(process.socket.fileno(), process.outbox.events)
        ready = dict(poller.poll(round(wait_s * 1000)))
        for rank, process in list(self.ranks.items()):
            events = ready.get(process.socket.fileno(), 0)
            if events & zmq.POLLOUT:
                process.outbox.send()
            if events & ~zmq.POLLOUT:
                self._relay(rank)
        return [self._codec.decode(data) for _, data in self._socket.receive()]

    def _start_ranks(self, startups: Sequence[dict[str, Any]]) -> None:
        self._end_ranks()
        self._num_ranks = len(startups)
        segment = os.memfd_create("radixlm", os.MFD_CLOEXEC)  # what the ranks of this node share
        memory = self._memory_for(startups)
        try:
            for startup in startups:
                process = self._ready_made.pop() if self._ready_made else RankProcess(self._command)
                self.ranks[int(startup["rank"])] = process
                startup = {**startup, "options": {**startup["options"], **self._options}}
                startup |= {"memory": memory, "curve_keys": private_keys(self._secret)}
                process.start(startup, segment, self._generation)
                log.info("started rank %d, process %d", startup["rank"], process.pid)
        except OSError as error:  # no room for a process: node 0 starts another replica
            log.error("rank %d cannot be started: %s", startup["rank"], error)
            self._send(RankEnded(self._generation, int(startup["rank"]), 1))
        finally:
            os.close(segment)

    def _memory_for(self, startups: Sequence[dict[str, Any]]) -> list[str]:
        """Paths of the memory that is kept for the ranks, as node 0 keeps it for its own."""
        theirs = next((startup.get("memory") for startup in startups), None)
        if not theirs:
            return []
        ranks = tuple(int(startup["rank"]) for startup in startups)
        if self._kept.ranks != ranks:
            self._kept.close()
            self._kept = KeptPool(ranks, len(theirs))
        return self._kept.paths or [""] * len(theirs)

    def _relay(self, rank: int) -> None:
        """Pass on one message of a rank, or report its end: it closes its socket with that."""
        data = b""
        with suppress(OSError):
            data = self.ranks[rank].socket.recv(MAX_MESSAGE_BYTES)
        if data:
            self._send(RankMessage(self._generation, rank, data))
            return
        code = self.ranks.pop(rank).drop(END_WAIT_S)
        log.log(logging.ERROR if code else logging.INFO, "rank %d ended, status %d", rank, code)
        self._send(RankEnded(self._generation, rank, code))
        if code:  # the others will end, too
            self._make_ready()

    def _leave(self) -> None:
        """End the ranks; others will follow."""
        self._end_ranks()
        self._generation = ""
        self._make_ready()

    def _make_ready(self) -> None:
        """Make processes for the ranks to come, which import torch meanwhile."""
        with suppress(OSError):  # no room: they are made when they are needed
            while len(self._ready_made) < self._num_ranks:
                self._ready_made.append(RankProcess(self._command))

    def _end_ranks(self, wait_s: float = 0.0) -> None:
        for process in self.ranks.values():
            process.drop(wait_s)
        self.ranks = {}

    def _send(self, message: ToNode0) -> None:
        self._socket.send(self._codec.encode(message))


def make_agent(config: ServerConfig, given: frozenset[str], node_rank: int) -> NodeAgent:
    """The agent of this node; with ``node_rank`` -1 node 0 chooses its number."""
    parallel = config.parallel
    address = parallel.dist_init_addr or ""
    secret = read_secret(parallel.cluster_secret_file)
    config, info = resolved(config, given)
    options = {name: flat(config).get(name) for name in OWN}
    threads, count = config.execute.cpu_threads, parallel.world_size // parallel.nnodes
    options["cpu_threads"] = threads if "cpu_threads" in given else max(1, threads // count)
    return NodeAgent(
        address,
        secret,
        node_facts(config, info.folder, local_address(address)),
        node_rank,
        {name: value for name, value in options.items() if value is not None}
        | {"located": dict(config.located)},
        parallel.dist_timeout or WAIT_S,
    )
