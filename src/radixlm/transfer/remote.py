"""Memory of another server, read by a library: backends "mooncake_tcp" (Mooncake's transfer engine)
and "nixl" (NIXL over UCX). Which pages, when, and their checksums go by our own protocol; the bytes
go by the library, from the server's outbox to a buffer of the client.

Neither library asks who reads or writes memory that was given to it, so their ports are for a
network of one's own. A page's checksum tells accidents, not forgery.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

from radixlm.base.errors import TransferError
from radixlm.base.lazy import require
from radixlm.transfer.outbox import Bytes

FLAG: Final = "--disaggregation-transfer-backend"
READ_S: Final = 10.0  # how long one read may take
BUFFER_BYTES: Final = 8 << 20


class RemoteMemory(Protocol):
    """Memory of this process that others read, and theirs; thread-safe. ``name``: of the backend.
    TransferError where a library fails."""

    name: str

    @property
    def endpoint(self) -> bytes:
        """What others need to read what was exposed before."""

    def expose(self, data: Bytes) -> None:
        """Let the library read and write ``data``."""

    def hide(self, data: Bytes) -> None:
        """The inverse of ``expose``."""

    def read(self, endpoint: bytes, addresses: Sequence[int], out: Bytes) -> None:
        """Fill rows of ``out``, uint8 [n, bytes], which is exposed here, from these addresses
        there."""


class MooncakeMemory:
    """Mooncake's transfer engine over TCP; the peers shake hands without a metadata service."""

    name = "mooncake_tcp"

    def __init__(self, host: str) -> None:
        """``host``: where others reach this process."""
        module: Any = require("mooncake.engine", "mooncake", f"{FLAG} {self.name}")
        self._engine = module.TransferEngine()
        _check(self._engine.initialize(host, "P2PHANDSHAKE", "tcp", ""), "initialize")
        self.endpoint = f"{host}:{self._engine.get_rpc_port()}".encode()

    def expose(self, data: Bytes) -> None:
        _check(self._engine.register_memory(data.ctypes.data, data.nbytes), "register_memory")

    def hide(self, data: Bytes) -> None:
        self._engine.unregister_memory(data.ctypes.data)

    def read(self, endpoint: bytes, addresses: Sequence[int], out: Bytes) -> None:
        rows = [row.ctypes.data for row in out]
        sizes, target = [out.shape[1]] * len(rows), endpoint.decode()
        code = self._engine.batch_transfer_sync_read(target, rows, list(addresses), sizes)
        _check(code, f"a read from {target}")


class NixlMemory:
    """A NIXL agent with the plugin UCX, which picks shared memory, TCP or RDMA."""

    name = "nixl"

    def __init__(self, host: str) -> None:
        """``host``: not used, UCX finds the addresses."""
        module: Any = require("nixl._api", "nixl", f"{FLAG} {self.name}")
        config = module.nixl_agent_config(backends=["UCX"])
        self._agent = module.nixl_agent(f"radixlm-{os.urandom(8).hex()}", config)
        self._exposed: dict[int, Any] = {}
        self._names: dict[bytes, Any] = {}  # of other agents, by endpoint

    @property
    def endpoint(self) -> bytes:
        data: bytes = self._agent.get_agent_metadata()
        return data

    def expose(self, data: Bytes) -> None:
        area = [(data.ctypes.data, data.nbytes, 0, "")]
        self._exposed[data.ctypes.data] = self._agent.register_memory(area, "DRAM")

    def hide(self, data: Bytes) -> None:
        self._agent.deregister_memory(self._exposed.pop(data.ctypes.data))

    def read(self, endpoint: bytes, addresses: Sequence[int], out: Bytes) -> None:
        agent, size = self._agent, out.shape[1]
        try:
            if endpoint not in self._names:
                self._names[endpoint] = agent.add_remote_agent(endpoint)
            mine = agent.get_xfer_descs([(row.ctypes.data, size, 0) for row in out], "DRAM")
            theirs = agent.get_xfer_descs([(at, size, 0) for at in addresses], "DRAM")
            handle = agent.initialize_xfer("READ", mine, theirs, self._names[endpoint])
            try:
                state, end_s = agent.transfer(handle), time.monotonic() + READ_S
                while state == "PROC" and time.monotonic() < end_s:
                    time.sleep(0)
                    state = agent.check_xfer_state(handle)
            finally:
                agent.release_xfer_handle(handle)
        except Exception as error:  # the library's own kinds, which have no common base
            self._names.pop(endpoint, None)
            raise TransferError(f"NIXL: {error}") from error
        if state != "DONE":
            raise TransferError(f"NIXL: a read ended as {state}")


REMOTE: Final = {kind.name: kind for kind in (MooncakeMemory, NixlMemory)}


def open_remote(backend: str, host: str) -> RemoteMemory | None:
    """The memory of a backend that has one; ConfigError where its package is not installed."""
    return REMOTE[backend](host) if backend in REMOTE else None


def _check(code: int, what: str) -> None:
    if code:
        raise TransferError(f"Mooncake: {what} gave {code}")
