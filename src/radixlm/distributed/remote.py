"""The connection of a rank on another node to node 0: plans, and the store in which ranks meet."""

from __future__ import annotations

import datetime
import secrets
import time
from collections import deque
from typing import Any, Protocol

import torch.distributed as dist

from radixlm.base.errors import RankLost
from radixlm.wire.cluster import FromNode0, Leave, Plan, RankFailed, RankHello, StoreGet, StoreSet
from radixlm.wire.cluster_socket import ClusterSocket
from radixlm.wire.codec import Codec


class KeyValues(Protocol):
    """A store that all ranks share."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """None if nobody sets the key in time."""


class HubLink:
    """For one thread of rank ``rank``. ``read`` gives the plans in their order."""

    def __init__(self, address: str, secret: str, generation: str, rank: int) -> None:
        self._codec, self._generation, self._rank = Codec(FromNode0), generation, rank
        self._socket = ClusterSocket(address, secret, False, secrets.token_bytes(8))
        self._plans: deque[bytes] = deque()
        self._values: dict[str, bytes] = {}
        self._index = 0
        self._socket.socket.poll(1000, 2)  # zmq.POLLOUT: connected

    def hello(self) -> None:
        """From now on take plans."""
        self._send(RankHello(self._generation, self._rank))

    def read(self, timeout_s: float | None) -> bytes | None:
        """The next plan; None if there is none in time. RankLost when node 0 has ended this
        replica, or a plan is missing."""
        if not self._plans:
            self._receive(timeout_s)
        return self._plans.popleft() if self._plans else None

    def fail(self, reason: str) -> None:
        """Tell rank 0 why this rank stops."""
        self._send(RankFailed(self._generation, self._rank, reason))

    def set(self, key: str, value: bytes) -> None:
        self._send(StoreSet(key, value))

    def get(self, key: str, timeout_s: float) -> bytes | None:
        deadline_s = time.monotonic() + timeout_s
        if key not in self._values:
            self._send(StoreGet(key))
        while key not in self._values and (left_s := deadline_s - time.monotonic()) > 0:
            self._receive(left_s)
        return self._values.get(key)

    def _receive(self, timeout_s: float | None) -> None:
        wait_ms = None if timeout_s is None else max(1, round(timeout_s * 1000))
        if not self._socket.socket.poll(wait_ms):
            return
        for _, data in self._socket.receive():
            match self._codec.decode(data):
                case Plan(index, payload):
                    if index != self._index:
                        raise RankLost(f"plan {self._index} is missing, {index} came")
                    self._index += 1
                    self._plans.append(payload)
                case StoreSet(key, value):
                    self._values[key] = value
                case Leave():
                    raise RankLost("node 0 ended this replica")

    def _send(self, message: Any) -> None:
        if not self._socket.socket.poll(10_000, 2) or not self._socket.send(
            self._codec.encode(message)
        ):
            raise RankLost("node 0 cannot be reached")

    def close(self) -> None:
        self._socket.close()


class HubStore(dist.Store):  # type: ignore[misc, name-defined]
    """A store of torch.distributed over ``values``: what gloo needs to connect the ranks."""

    def __init__(self, values: KeyValues, timeout_s: float) -> None:
        super().__init__()
        self._values, self._timeout_s = values, timeout_s

    def set(self, key: str, value: str | bytes) -> None:
        self._values.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """RankLost if nobody sets the key in time."""
        value = self._values.get(key, self._timeout_s)
        if value is None:
            raise RankLost(f"no rank has set {key} within {self._timeout_s:g} s")
        return value

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def has_extended_api(self) -> bool:
        return False
