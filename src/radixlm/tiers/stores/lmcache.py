"""LmcacheStore: pages in a server of LMCache (``lmcache_server``), by its protocol lm://.

LMCache's Python package pins versions of others; so it stays in the server's process, and this is
a client of its own. A request is nine int32 (command, length, format, dtype, location, four of a
shape) and a key of 150 bytes; an answer is nine int32 (code, length, ...) and the object. PUT has
no answer, and there is no command that deletes.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, Final
from urllib.parse import urlsplit

from radixlm.base import env
from radixlm.base.errors import ConfigError, TransferError
from radixlm.tiers.stores.base import StoreOptions

log = logging.getLogger(__name__)
_REQUEST: Final = struct.Struct("<9i150s")
_ANSWER: Final = struct.Struct("<9i")
_PUT, _GET, _EXIST = 1, 2, 3
_GOOD: Final = 200
_BINARY, _UINT8 = 4, 6  # of LMCache's formats and dtypes
_MAX_OBJECT: Final = 256 << 20
_AHEAD: Final = 64  # questions that are on their way


class LmcacheOptions(StoreOptions, frozen=True):
    """``remote_url``: lm://host:port; else of ``config_file``, LMCache's YAML, or
    $LMCACHE_REMOTE_URL."""

    remote_url: str = ""
    config_file: str = ""


class LmcacheStore:
    """One connection, one call at a time."""

    Options: ClassVar[type[StoreOptions]] = LmcacheOptions
    medium: ClassVar[str] = "EXTERNAL"

    def __init__(self, options: LmcacheOptions, namespace: str) -> None:
        url = options.remote_url or _remote_url(options.config_file)
        parts = urlsplit(url)
        if parts.scheme != "lm" or not parts.hostname or not parts.port:
            raise ConfigError(
                f"LMCache: remote_url {url!r} is no server such as lm://127.0.0.1:65432 "
                "(lmcache_server); for Redis, S3 and Mooncake use --hicache-storage-backend"
            )
        self._address, self._deadline_s = (parts.hostname, parts.port), options.deadline_s
        self._namespace, self._generation, self._gone = namespace, 0, set[str]()
        self._socket: socket.socket | None = None
        self._lock = Lock()

    def open(self) -> None:
        with self._lock:
            self._connect()

    def _connect(self) -> socket.socket:
        if self._socket is None:
            self._socket = socket.create_connection(self._address, self._deadline_s)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._socket

    def exists(self, names: Sequence[str]) -> list[bool]:
        with self._lock:
            answers = self._ask(_EXIST, names)
        return [a == 0 and n not in self._gone for a, n in zip(answers, names, strict=True)]

    def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        with self._lock:
            lengths = self._ask(_GET, names, buffers)
        return [-1 if n in self._gone else size for size, n in zip(lengths, names, strict=True)]

    def put(self, names: Sequence[str], values: Sequence[bytes]) -> None:
        with self._lock:
            found = self._ask(_EXIST, names)
            for name, value, answer in zip(names, values, found, strict=True):
                if answer < 0 or name in self._gone:
                    self._send(self._request(_PUT, name, len(value)), value)
                    self._gone.discard(name)
            if names:  # the answer comes when all has been taken
                self._ask(_EXIST, names[-1:])

    def delete(self, names: Sequence[str]) -> None:
        """Forgotten by this client, until they are put anew."""
        with self._lock:
            self._gone.update(names)

    def clear(self) -> None:
        """Forgotten by this client: it uses other keys from now on."""
        with self._lock:
            self._generation += 1
            self._gone.clear()

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    # ---- the protocol ----------------------------------------------------------------------------

    def _request(self, command: int, name: str, length: int = 0) -> bytes:
        digest = hashlib.sha256(name.encode()).hexdigest()[:32]
        key = f"{self._namespace}-{self._generation}@1@0@{digest}@uint8".encode()
        fields = (command, length, _BINARY, _UINT8, 0, length, 0, 0, 0)
        return _REQUEST.pack(*fields, key.ljust(150))

    def _send(self, *data: bytes) -> None:
        try:
            for piece in data:
                self._connect().sendall(piece)
        except OSError:
            self.close()
            raise

    def _ask(
        self, command: int, names: Sequence[str], buffers: Sequence[memoryview] = ()
    ) -> list[int]:
        """For each name the length of its object (0 where only asked for), or -1."""
        lengths: list[int] = []
        try:
            for start in range(0, len(names), _AHEAD):
                part = names[start : start + _AHEAD]
                self._send(b"".join(self._request(command, name) for name in part))
                for number in range(start, start + len(part)):
                    buffer = buffers[number] if command == _GET else memoryview(b"")
                    lengths.append(self._answer(buffer))
        except (OSError, TransferError):
            self.close()  # what else would come answers an older question
            raise
        return lengths

    def _answer(self, buffer: memoryview) -> int:
        head = bytearray(_ANSWER.size)
        self._receive(memoryview(head))
        code, length, *_ = _ANSWER.unpack(head)
        if not 0 <= length <= _MAX_OBJECT:
            raise TransferError(f"LMCache: an object of {length} bytes")
        if length <= len(buffer):
            self._receive(buffer[:length])
            return length if code == _GOOD else -1
        scratch = memoryview(bytearray(1 << 20))
        for at in range(0, length, len(scratch)):
            self._receive(scratch[: length - at])
        return -1

    def _receive(self, view: memoryview) -> None:
        while view:
            count = self._connect().recv_into(view)
            if not count:
                raise TransferError("LMCache: the server closed the connection")
            view = view[count:]


def _remote_url(config_file: str) -> str:
    """remote_url of LMCache's configuration; a line in the log for what is not used."""
    path = config_file or env.LMCACHE_CONFIG_FILE.get()
    if not path:
        return env.LMCACHE_REMOTE_URL.get()
    yaml = importlib.import_module("yaml")
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--lmcache-config-file {path}: {error}") from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"--lmcache-config-file {path}: no mapping such as remote_url: lm://h:1")
    others = sorted(str(name) for name in found if name != "remote_url")
    if others:
        log.warning("LMCache: %s have no effect: only remote_url is used", ", ".join(others))
    url: Any = found.get("remote_url") or env.LMCACHE_REMOTE_URL.get()
    return str(url or "")
