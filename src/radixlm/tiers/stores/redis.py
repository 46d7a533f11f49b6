"""RedisStore: pages as strings of a Redis server, or of one that speaks its protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final

import msgspec

from radixlm.base.lazy import require
from radixlm.base.private_files import read_secret
from radixlm.tiers.stores.base import StoreOptions

PIECE_BYTES: Final = 512 << 10  # a longer reply would hold up the server's other clients
BATCH_BYTES: Final = 16 << 20
CONNECTIONS: Final = 4


class RedisOptions(StoreOptions, frozen=True):
    """``url``: redis://, rediss:// (TLS) or unix://. ``password_file`` keeps the password out of
    the command line. ``ttl_s``: seconds after which a page is forgotten; 0: never, then the server
    needs maxmemory and an eviction policy of its own."""

    url: str = "redis://127.0.0.1:6379/0"
    password_file: str = ""
    ttl_s: Annotated[int, msgspec.Meta(ge=0)] = 0


class RedisStore:
    """Pages are read by ranges in one pipeline, so that no more than expected is ever sent."""

    Options: ClassVar[type[StoreOptions]] = RedisOptions
    medium: ClassVar[str] = "EXTERNAL"

    def __init__(self, options: RedisOptions, namespace: str) -> None:
        redis = require("redis", "redis", "--hicache-storage-backend redis")
        self._errors, self._options = redis.exceptions, options
        self._prefix = f"{namespace}/"
        password = read_secret(options.password_file).decode() if options.password_file else None
        given = {} if password is None else {"password": password}
        pool = redis.BlockingConnectionPool.from_url(
            options.url,
            max_connections=CONNECTIONS,
            timeout=options.deadline_s,
            socket_timeout=options.deadline_s,
            socket_connect_timeout=options.deadline_s,
            retry=None,
            **given,
        )
        self._client = redis.Redis(connection_pool=pool)

    def open(self) -> None:
        self._client.ping()

    def exists(self, names: Sequence[str]) -> list[bool]:
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            pipe.exists(self._prefix + name)
        return [bool(found) for found in pipe.execute()]

    def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        pipe = self._client.pipeline(transaction=False)
        places: list[tuple[int, int]] = []
        for number, (name, buffer) in enumerate(zip(names, buffers, strict=True)):
            pipe.strlen(self._prefix + name)
            places.append((number, -1))
            for start in range(0, len(buffer), PIECE_BYTES):
                end = min(start + PIECE_BYTES, len(buffer))
                pipe.getrange(self._prefix + name, start, end - 1)
                places.append((number, start))
        lengths = [-1] * len(names)
        for (number, start), reply in zip(places, pipe.execute(raise_on_error=False), strict=True):
            if isinstance(reply, self._errors.ResponseError):
                lengths[number] = -1  # not a string: somebody else's
            elif isinstance(reply, Exception):
                raise reply
            elif start < 0:
                lengths[number] = reply if 0 < reply <= len(buffers[number]) else -1
            elif lengths[number] >= 0:
                buffers[number][start : start + len(reply)] = reply
        return lengths

    def put(self, names: Sequence[str], values: Sequence[bytes]) -> None:
        pipe, size = self._client.pipeline(transaction=False), 0
        for name, value in zip(names, values, strict=True):
            pipe.set(self._prefix + name, value, nx=True, ex=self._options.ttl_s or None)
            size += len(value)
            if size > BATCH_BYTES:
                pipe.execute()
                size = 0
        pipe.execute()

    def delete(self, names: Sequence[str]) -> None:
        if names:
            self._client.unlink(*(self._prefix + name for name in names))

    def clear(self) -> None:
        batch: list[Any] = []
        for key in self._client.scan_iter(match=f"{self._prefix}*", count=1000):
            batch.append(key)
            if len(batch) == 1000:
                self._client.unlink(*batch)
                batch.clear()
        if batch:
            self._client.unlink(*batch)

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self._client.close()
        self._client.connection_pool.disconnect()
