"""The store of node 0 for torch.distributed: ranks of several nodes find each other in it."""

from __future__ import annotations

import datetime
import secrets
import time
from typing import Protocol

import torch.distributed as dist

from radixlm.base.errors import RankLost
from radixlm.base.record import replace
from radixlm.distributed.gloo import GlooGroup
from radixlm.distributed.groups import Ranks
from radixlm.distributed.topology import Topology
from radixlm.wire.cluster import FromNode0, StoreGet, StoreSet
from radixlm.wire.cluster_socket import ClusterSocket
from radixlm.wire.codec import Codec

CONNECT_MS = 60_000  # ranks of node 0 start before it listens


class KeyValues(Protocol):
    """A store that all ranks share."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """None if nobody sets the key in time."""


class RemoteValues:
    """Node 0's store for one thread of a process of another node."""

    def __init__(self, address: str, secret: str) -> None:
        self._codec = Codec(FromNode0)
        self._socket = ClusterSocket(address, secret, False, secrets.token_bytes(8))
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._send(StoreSet(key, value))

    def get(self, key: str, timeout_s: float) -> bytes | None:
        deadline_s = time.monotonic() + timeout_s
        if key not in self._values:
            self._send(StoreGet(key))
        while key not in self._values and (left_s := deadline_s - time.monotonic()) > 0:
            self._socket.socket.poll(max(1, round(left_s * 1000)))
            for _, data in self._socket.receive():
                message = self._codec.decode(data)
                if isinstance(message, StoreSet):
                    self._values[message.key] = message.value
        return self._values.get(key)

    def take(self, key: str, timeout_s: float) -> bytes | None:
        """``get`` of a value that nobody here reads again."""
        value = self.get(key, timeout_s)
        self._values.pop(key, None)
        return value

    def _send(self, message: StoreSet | StoreGet) -> None:
        is_connected = self._socket.socket.poll(CONNECT_MS, 2)  # zmq.POLLOUT
        if not is_connected or not self._socket.send(self._codec.encode(message)):
            raise RankLost("node 0 cannot be reached")

    def close(self) -> None:
        self._socket.close()


class HubStore(dist.Store):  # type: ignore[misc, name-defined]
    """A store of torch.distributed over ``values``: what gloo needs to connect the ranks."""

    def __init__(self, values: KeyValues, timeout_s: float, generation: str = "") -> None:
        """``generation`` of the replica: what a rank of an earlier one still sets is not read."""
        super().__init__()
        self._values, self._timeout_s, self._generation = values, timeout_s, generation

    def set(self, key: str, value: str | bytes) -> None:
        self._values.set(
            self._generation + key, value.encode() if isinstance(value, str) else bytes(value)
        )

    def get(self, key: str) -> bytes:
        """RankLost if nobody sets the key in time."""
        value = self._values.get(self._generation + key, self._timeout_s)
        if value is None:
            raise RankLost(f"no rank has set {key} within {self._timeout_s:g} s")
        return value

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def has_extended_api(self) -> bool:
        return False


def over_hosts(
    ranks: Ranks, topology: Topology, store: HubStore, address: str, timeout_s: float
) -> Ranks:
    """``ranks`` with gloo groups in place of those whose ranks lie on several nodes. ``address``:
    this host's. Returns when all members have come."""
    rank = ranks.place.rank
    made: dict[tuple[int, ...], GlooGroup] = {}
    for kind, groups in topology.groups.items():
        members = next(members for members in groups if rank in members)
        if len({topology.node_of(member) for member in members}) > 1:
            if members not in made:
                name = f"{kind}{members[0]}"
                index, size = members.index(rank), len(members)
                prefixed = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
                made[members] = GlooGroup(prefixed, index, size, timeout_s, address)
            ranks = replace(ranks, **{kind: made[members]})
    return ranks
