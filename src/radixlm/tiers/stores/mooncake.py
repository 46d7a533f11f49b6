"""MooncakeStore: pages in the memory of a Mooncake cluster."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Final

import msgspec
import numpy as np

from radixlm.base import env
from radixlm.base.errors import ConfigError, TransferError
from radixlm.base.lazy import require
from radixlm.tiers.stores.base import FLAG, StoreOptions
from radixlm.tiers.stores.grid import batches

_MISSES: Final = (-600, -704, -707)  # larger than the buffer, absent, evicted while it was read
_SIZE: Final = re.compile(r"(\d+) *([kmgt]?)b?", re.IGNORECASE)
Size = int | str


class MooncakeOptions(StoreOptions, frozen=True):
    """Names and defaults are Mooncake's. What is not given comes from the JSON file
    $SGLANG_HICACHE_MOONCAKE_CONFIG_PATH, then from $MOONCAKE_MASTER. Sizes: bytes, or
    texts such as "4gb"; ``global_segment_size``: the memory that this rank gives to the cluster."""

    master_server_address: str = ""
    local_hostname: str = ""
    metadata_server: str = ""
    global_segment_size: Size = ""
    local_buffer_size: Size = "64mb"
    protocol: str = ""
    device_name: str = ""
    tenant_id: Annotated[str, msgspec.Meta(min_length=1)] = "default"


_DEFAULTS: Final = {
    "local_hostname": "127.0.0.1",
    "metadata_server": "P2PHANDSHAKE",
    "global_segment_size": "4gb",
    "protocol": "tcp",
}


def _settings(options: MooncakeOptions) -> dict[str, Any]:
    """Each setting from the first place that has it."""
    path = env.MOONCAKE_CONFIG_PATH.get()
    variables = {
        "master_server_address": env.MOONCAKE_MASTER.get(),
        "local_hostname": env.MOONCAKE_LOCAL_HOSTNAME.get(),
        "metadata_server": env.MOONCAKE_METADATA.get(),
        "global_segment_size": env.MOONCAKE_SEGMENT_SIZE.get(),
        "protocol": env.MOONCAKE_PROTOCOL.get(),
        "device_name": env.MOONCAKE_DEVICE.get(),
    }
    try:
        with open(path or "/dev/null", "rb") as file:
            stored = msgspec.json.decode(file.read() or b"{}", type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"SGLANG_HICACHE_MOONCAKE_CONFIG_PATH={path!r}: {error}") from error
    given = {name: getattr(options, name) for name in options.__struct_fields__}
    found: dict[str, Any] = dict(_DEFAULTS)
    for place in (variables, stored, given):
        found |= {name: value for name, value in place.items() if value not in ("", None)}
    if "master_server_address" not in found:
        raise ConfigError(
            f"{FLAG}: the address of mooncake_master is missing; give "
            '{"master_server_address": "host:50051"} or set MOONCAKE_MASTER'
        )
    return found


def _num_bytes(name: str, size: Size) -> int:
    match = _SIZE.fullmatch(str(size).strip())
    if match is None:
        raise ConfigError(f'{FLAG}: {name} {size!r} is no size such as "4gb"')
    return int(match[1]) << " kmgt".index(match[2].lower() or " ") * 10


class MooncakeStore:
    """Reads go to one registered buffer and are copied from there: pages of a cluster's other
    machines never write into the KV cache."""

    Options: ClassVar[type[StoreOptions]] = MooncakeOptions
    medium: ClassVar[str] = "EXTERNAL"

    def __init__(self, options: MooncakeOptions, namespace: str) -> None:
        module = require("mooncake.store", "mooncake", "--hicache-storage-backend mooncake")
        self._class, self._prefix = module.MooncakeDistributedStore, f"{namespace}/"
        found = _settings(options)
        self._buffer_bytes = _num_bytes("local_buffer_size", found["local_buffer_size"])
        segment = _num_bytes("global_segment_size", found["global_segment_size"])
        self._arguments = (
            *(found["local_hostname"], found["metadata_server"], segment, self._buffer_bytes),
            *(found["protocol"], found.get("device_name", ""), found["master_server_address"]),
        )
        self._tenant, self._lock = found["tenant_id"], threading.Lock()
        self._store: Any = None

    def open(self) -> None:
        store = self._class()
        _check("setup", store.setup(*self._arguments, tenant_id=self._tenant))
        self._buffer = np.empty(self._buffer_bytes, np.uint8)
        _check("register", store.register_buffer(self._buffer.ctypes.data, self._buffer.nbytes))
        self._store = store

    def exists(self, names: Sequence[str]) -> list[bool]:
        found = self._store.batch_is_exist([self._prefix + name for name in names])
        _check("exists", *found)
        return [value == 1 for value in found]

    def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        lengths: list[int] = []
        with self._lock:
            for start, end in batches([len(b) for b in buffers], self._buffer_bytes):
                lengths += self._get(names[start:end], buffers[start:end])
        return lengths

    def _get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        sizes = [len(buffer) for buffer in buffers]
        if sum(sizes) > self._buffer_bytes:
            raise TransferError(f"local_buffer_size must be at least {sum(sizes)} bytes")
        starts = list(_starts(sizes))
        addresses = [self._buffer.ctypes.data + start for start in starts]
        found = self._store.batch_get_into([self._prefix + n for n in names], addresses, sizes)
        lengths = [-1 if length in _MISSES else length for length in found]
        _check("get", *(length for length in lengths if length != -1))
        for start, length, buffer in zip(starts, lengths, buffers, strict=True):
            if length > 0:
                buffer[:length] = memoryview(self._buffer[start : start + length])  # type: ignore[arg-type]
        return lengths

    def put(self, names: Sequence[str], values: Sequence[bytes]) -> None:
        if names:  # objects that are there stay as they are
            _check("put", self._store.put_batch([self._prefix + n for n in names], list(values)))

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._store.remove(self._prefix + name, True)

    def clear(self) -> None:
        _check("clear", self._store.remove_by_regex(f"^{re.escape(self._prefix)}.*", True))

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


def _check(what: str, *codes: int) -> None:
    """TransferError for an error of the library, which are negative numbers."""
    if any(code < 0 for code in codes):
        raise TransferError(f"mooncake {what}: error {min(codes)}")


def _starts(sizes: Sequence[int]) -> Iterator[int]:
    at = 0
    for size in sizes:
        yield at
        at += size
