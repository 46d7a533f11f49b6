"""What every store promises, by one suite: against real servers where they are installed."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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


@pytest.fixture(scope="module", params=[*STORES])
def chosen(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, options) of a store whose server runs."""
    name, folder = request.param, str(tmp_path_factory.mktemp("store") / "pages")
    with ExitStack() as stack:
        if name == "nixl":
            pytest.importorskip("nixl", reason="NIXL is not installed (radixlm[nixl])")
        if name in ("shared_file", "nixl", "hf3fs"):
            yield name, {"directory": folder, "min_free_gb": 0}
        elif name == "redis":
            yield name, {"url": stack.enter_context(servers.redis_server())[0]}
        elif name == "s3":
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
                patch.setenv(variable, "test")
            url = stack.enter_context(servers.s3_server())
            extra = {"bucket": "pages", "endpoint_url": url, "region": "us-east-1"}
            yield name, extra | {"refresh_s": 1e-9}  # other clients' objects are seen at once
        elif name == "mooncake":
            address = stack.enter_context(servers.mooncake_master())[0]
            sizes = {"global_segment_size": "32mb", "local_buffer_size": "4mb"}
            yield name, {"master_server_address": address, **sizes}
        elif name == "lmcache":
            yield name, {"remote_url": stack.enter_context(servers.lmcache_server())}
        else:
            yield name, {"module_path": __name__, "class_name": "MemoryStore"}


@pytest.fixture
def make(chosen: tuple[str, dict[str, Any]], request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes further clients of one and the same store, in namespaces of this test."""
    name, extra = chosen
    kind, opened = STORES.resolve(name), []
    test = hashlib.sha256(request.node.name.encode()).hexdigest()[:8]

    def one(namespace: str = "01234567") -> Store:
        options = read_options(name, {"deadline_s": 10, **extra}, kind.Options)
        store = kind(options, f"radixlm1-{namespace}{test}")
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
    store, neighbour = make(), make("89abcdef")
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
