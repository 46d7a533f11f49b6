"""What every store promises, by one suite: against real servers where they are installed."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest

from radixlm.tiers.stores import STORES
from radixlm.tiers.stores.base import Store, read_options
from tests.tiers.stores import servers

Make = Callable[..., Store]
NAMES = ["01ab" * 8 + "_L0-2_H0-4", "23cd" * 8 + "_L0-2_H0-4", "45ef" * 8 + "_L0-2_H0-4"]
VALUES = [bytes([n]) * (700_000 + n) for n in range(3)]


class MemoryStore:
    """The simplest store, and the class of --hicache-storage-backend dynamic."""

    shared: ClassVar[dict[str, bytes]] = {}

    def __init__(self, options: dict[str, Any], namespace: str) -> None:
        self.options, self._prefix = options, f"{options.get('prefix', '')}{namespace}/"

    def open(self) -> None: ...

    def exists(self, names: list[str]) -> list[bool]:
        return [self._prefix + name in self.shared for name in names]

    def get(self, names: list[str], buffers: list[memoryview]) -> list[int]:
        lengths = []
        for name, buffer in zip(names, buffers, strict=True):
            value = self.shared.get(self._prefix + name)
            fits = value is not None and len(value) <= len(buffer)
            lengths.append(len(value) if fits else -1)
            if fits:
                buffer[: len(value)] = value
        return lengths

    def put(self, names: list[str], values: list[bytes]) -> None:
        for name, value in zip(names, values, strict=True):
            self.shared.setdefault(self._prefix + name, bytes(value))

    def delete(self, names: list[str]) -> None:
        for name in names:
            self.shared.pop(self._prefix + name, None)

    def clear(self) -> None:
        for name in [name for name in self.shared if name.startswith(self._prefix)]:
            del self.shared[name]

    def stats(self) -> dict[str, float]:
        return {"objects": len(self.shared)}

    def close(self) -> None: ...


@pytest.fixture(params=["shared_file", "redis", "s3", "dynamic"])
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes further clients of one and the same store."""
    name, extra = request.param, {}
    with ExitStack() as stack:
        if name == "shared_file":
            extra = {"directory": str(tmp_path / "pages"), "min_free_gb": 0}
        elif name == "redis":
            extra = {"url": stack.enter_context(servers.redis_server())[0]}
        elif name == "s3":
            for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
                monkeypatch.setenv(variable, "test")
            url = stack.enter_context(servers.s3_server())
            extra = {"bucket": "pages", "endpoint_url": url, "region": "us-east-1"}
            extra["refresh_s"] = 1e-9  # other clients' objects are seen at once
        else:
            own = {"prefix": str(tmp_path)}
            extra = {"module_path": __name__, "class_name": "MemoryStore", "options": own}
        yield from _maker(name, extra)


def _maker(name: str, extra: dict[str, Any]) -> Iterator[Make]:
    kind, opened = STORES.resolve(name), []

    def one(namespace: str = "radixlm1-0123") -> Store:
        store = kind(read_options(name, {"deadline_s": 10, **extra}, kind.Options), namespace)
        store.open()
        opened.append(store)
        return store

    try:
        yield one
    finally:
        for store in opened:
            store.close()


def read(store: Store, names: list[str], limit: int = 1 << 20) -> list[bytes | None]:
    buffers = [bytearray(limit) for _ in names]
    lengths = store.get(names, [memoryview(buffer) for buffer in buffers])
    return [
        None if length < 0 else bytes(buffer[:length])
        for length, buffer in zip(lengths, buffers, strict=True)
    ]


def test_objects_come_back_in_any_order_and_to_other_clients(make: Make) -> None:
    store, other = make(), make()
    assert store.exists(NAMES) == [False] * 3 and read(store, NAMES) == [None] * 3
    store.put(NAMES[:2], VALUES[:2])
    store.put(NAMES[2:], VALUES[2:])
    for client in (store, other, make()):
        assert client.exists(NAMES) == [True] * 3
        assert read(client, NAMES[::-1]) == VALUES[::-1]
        assert read(client, ["ff" * 16, NAMES[1]]) == [None, VALUES[1]]
    assert all(isinstance(value, float | int) for value in store.stats().values())


def test_an_object_that_is_there_is_never_changed(make: Make) -> None:
    store = make()
    store.put(NAMES[:1], VALUES[:1])
    for client in (store, make()):
        client.exists(NAMES[:1])
        client.put(NAMES[:2], [b"other", VALUES[1]])
        assert read(client, NAMES[:2]) == VALUES[:2]


def test_an_object_that_is_too_long_is_not_read(make: Make) -> None:
    store = make()
    store.put(NAMES, VALUES)
    assert read(store, NAMES, limit=len(VALUES[1])) == [*VALUES[:2], None]


def test_deleted_and_cleared_objects_are_gone_in_this_namespace_only(make: Make) -> None:
    store, neighbour = make(), make("radixlm1-4567")
    for name, value in zip(NAMES, VALUES, strict=True):
        store.put([name], [value])
        neighbour.put([name], [value])
    store.delete([*NAMES[:1], "ff" * 16])
    assert store.exists(NAMES) == [False, True, True]
    assert read(store, NAMES) == [None, *VALUES[1:]]
    store.put(NAMES[:1], [b"new"])
    assert read(store, NAMES[:1]) == [b"new"]
    store.clear()
    assert store.exists(NAMES) == [False] * 3 and read(store, NAMES) == [None] * 3
    assert neighbour.exists(NAMES) == [True] * 3
    store.delete([])
    store.put([], [])
    assert store.get([], []) == [] == store.exists([])
