"""NixlStore: the files of FileStore, read and written by a storage plugin of NIXL."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np

from radixlm.base.errors import TransferError
from radixlm.base.lazy import require
from radixlm.tiers.stores.base import StoreOptions
from radixlm.tiers.stores.file import FileOptions, FileStore


class NixlOptions(FileOptions, frozen=True):
    """``plugin``: of NIXL, one that has files: POSIX, GDS, GDS_MT, HF3FS; ``plugin_options``: what
    it is started with."""

    plugin: str = "POSIX"
    plugin_options: dict[str, str] = msgspec.field(default_factory=dict)


class NixlStore(FileStore):
    """All files of a call go in one transfer."""

    Options: ClassVar[type[StoreOptions]] = NixlOptions

    def __init__(self, options: NixlOptions, namespace: str) -> None:
        super().__init__(options, namespace)
        self._api = require("nixl._api", "nixl", "--hicache-storage-backend nixl")
        self._plugin, self._plugin_options = options.plugin, options.plugin_options
        self._deadline_s, self._agent_lock = options.deadline_s, threading.Lock()
        self._agent: Any = None

    def open(self) -> None:
        super().open()
        name = f"radixlm-{os.getpid()}-{id(self)}"
        agent = self._api.nixl_agent(name, self._api.nixl_agent_config(backends=[]))
        agent.create_backend(self._plugin, self._plugin_options)
        self._name, self._agent = name, agent

    def _read(self, files: Sequence[tuple[int, memoryview]]) -> None:
        self._transfer("READ", [(fd, np.frombuffer(view, np.uint8)) for fd, view in files])

    def _write(self, fd: int, value: bytes) -> None:
        self._transfer("WRITE", [(fd, np.frombuffer(value, np.uint8))])

    def _transfer(self, verb: str, files: Sequence[tuple[int, Any]]) -> None:
        """Between the starts of files and memory, uint8 [n]."""
        parts = [(fd, data.ctypes.data, data.nbytes) for fd, data in files if data.nbytes]
        if not parts:
            return
        with self._agent_lock:
            agent, backends = self._agent, [self._plugin]
            memory = agent.register_memory([(at, n, 0, "") for _, at, n in parts], "DRAM", backends)
            disk = agent.register_memory([(0, n, fd, "") for fd, _, n in parts], "FILE", backends)
            handle = agent.initialize_xfer(
                verb,
                agent.get_xfer_descs([(at, n, 0) for _, at, n in parts], "DRAM"),
                agent.get_xfer_descs([(0, n, fd) for fd, _, n in parts], "FILE"),
                self._name,
                backends=backends,
            )
            try:
                self._wait(agent, handle, agent.transfer(handle))
            finally:
                agent.release_xfer_handle(handle)
                agent.deregister_memory(disk)
                agent.deregister_memory(memory)

    def _wait(self, agent: Any, handle: Any, state: str) -> None:
        end_s = time.monotonic() + 10 * self._deadline_s  # the caller has left long before
        while state == "PROC" and time.monotonic() < end_s:
            time.sleep(1e-4)
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise TransferError(f"nixl {self._plugin}: {state}")
