"""Where the history is kept: values by kind and key, in the order in which they were added.

Kinds: "response", "conversation", and "items:ID" for the items of a conversation.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Protocol

from radixlm.base.errors import ConfigError, Overloaded
from radixlm.base.lazy import load, require
from radixlm.router.flags import History as Options

TIMEOUT_S = 5.0
ENTRY_BYTES = 800  # of memory besides a value, at most
_PREFIX = "radixlm:history:"


class Store(Protocol):
    """Its methods are called from threads, but for ``is_local`` ones. Overloaded: it does not
    answer."""

    is_local: bool

    def put(self, kind: str, key: str, value: bytes) -> None:
        """Add a value, or replace it in its place."""

    def get(self, kind: str, key: str) -> bytes | None: ...

    def delete(self, kind: str, key: str) -> bool:
        """Whether it was there."""

    def items(self, kind: str) -> list[bytes]:
        """All values of a kind, the oldest first."""

    def drop(self, kind: str) -> None:
        """Delete all values of a kind."""

    def close(self) -> None: ...


class MemoryStore:
    """The newest entries in at most ``max_bytes``, until the process ends. What goes first is the
    response, or the whole conversation, that was written least recently."""

    is_local = True

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        self._max_bytes = max_bytes
        self._groups: OrderedDict[str, dict[tuple[str, str], bytes]] = OrderedDict()
        self.num_bytes = 0

    @staticmethod
    def _group(kind: str, key: str) -> str:
        """What is dropped together."""
        name = kind.partition(":")[2] or key
        return name if kind != "response" else f"response {key}"

    def put(self, kind: str, key: str, value: bytes) -> None:
        group = self._group(kind, key)
        entries = self._groups.setdefault(group, {})
        self.num_bytes += len(value) - _weight(entries.get((kind, key))) + ENTRY_BYTES
        entries[kind, key] = value
        self._groups.move_to_end(group)
        while self.num_bytes > self._max_bytes:
            _, entries = self._groups.popitem(last=False)
            self.num_bytes -= sum(map(_weight, entries.values()))

    def get(self, kind: str, key: str) -> bytes | None:
        return self._groups.get(self._group(kind, key), {}).get((kind, key))

    def delete(self, kind: str, key: str) -> bool:
        group = self._group(kind, key)
        entries = self._groups.get(group, {})
        value = entries.pop((kind, key), None)
        self.num_bytes -= _weight(value)
        if not entries:
            self._groups.pop(group, None)
        return value is not None

    def items(self, kind: str) -> list[bytes]:
        entries = self._groups.get(self._group(kind, ""), {})
        return [value for (one, _), value in entries.items() if one == kind]

    def drop(self, kind: str) -> None:
        for one, key in list(self._groups.get(self._group(kind, ""), {})):
            if one == kind:
                self.delete(one, key)

    def close(self) -> None:
        """Nothing is open."""


def _weight(value: bytes | None) -> int:
    return 0 if value is None else len(value) + ENTRY_BYTES


class RedisStore:
    """In Redis, for several gateways. A kind of items is a hash; a number before each value keeps
    the order."""

    is_local = False

    def __init__(self, url: str, pool_max: int, keep_days: int, client: Any = None) -> None:
        """``keep_days``: entries expire so long after they were written; below 1: never.
        ``client``: one that is made already. ConfigError if nobody answers at ``url``."""
        redis = require("redis", "redis", "--history-backend redis")
        self._failure = redis.RedisError
        self._keep_s = keep_days * 24 * 3600 if keep_days > 0 else None
        try:
            self._db = client or redis.Redis.from_url(
                url,
                max_connections=pool_max,
                socket_timeout=TIMEOUT_S,
                socket_connect_timeout=TIMEOUT_S,
            )
            self._db.ping()
        except (redis.RedisError, ValueError, OSError) as error:
            raise ConfigError(f"--redis-url: {error}; redis://127.0.0.1:6379 works") from error

    def _ask(self, verb: str, *args: Any, **options: Any) -> Any:
        try:
            return getattr(self._db, verb)(*args, **options)
        except self._failure as error:
            raise Overloaded(f"the history's store does not answer: {error}") from error

    def put(self, kind: str, key: str, value: bytes) -> None:
        if ":" not in kind:
            self._ask("set", f"{_PREFIX}{kind}:{key}", value, ex=self._keep_s)
            return
        name = _PREFIX + kind
        before = self._ask("hget", name, key)
        place = before[:8] if before else int(self._ask("incr", _PREFIX + "place")).to_bytes(8)
        self._ask("hset", name, key, place + value)
        if self._keep_s:  # a conversation lives as long as its last item
            for one in (name, f"{_PREFIX}conversation:{kind.partition(':')[2]}"):
                self._ask("expire", one, self._keep_s)

    def get(self, kind: str, key: str) -> bytes | None:
        if ":" not in kind:
            found: bytes | None = self._ask("get", f"{_PREFIX}{kind}:{key}")
            return found
        found = self._ask("hget", _PREFIX + kind, key)
        return found[8:] if found else None

    def delete(self, kind: str, key: str) -> bool:
        if ":" not in kind:
            return bool(self._ask("delete", f"{_PREFIX}{kind}:{key}"))
        return bool(self._ask("hdel", _PREFIX + kind, key))

    def items(self, kind: str) -> list[bytes]:
        return [value[8:] for value in sorted(self._ask("hvals", _PREFIX + kind))]

    def drop(self, kind: str) -> None:
        self._ask("delete", _PREFIX + kind)

    def close(self) -> None:
        self._db.close()


def open_store(options: Options) -> Store | None:
    """The store of --history-backend; None for "none". ConfigError: it cannot be reached."""
    backend = options.history_backend
    if backend == "none":
        return None
    if backend == "redis":
        url = options.redis_url or ""
        return RedisStore(url, options.redis_pool_max, options.redis_retention_days)
    if backend in ("postgres", "oracle"):
        store: Store = load(f"radixlm.router.history.sql:open_{backend}")(options)
        return store
    return MemoryStore(options.history_memory_mb << 20)
