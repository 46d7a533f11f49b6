"""Pages whose bytes a library moves: a stand-in that copies within this process, and the real ones
where they are installed."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from radixlm.base.errors import ConfigError, TransferError
from radixlm.transfer.client import Address, Damaged, TransferClient
from radixlm.transfer.outbox import Bytes, Outbox
from radixlm.transfer.remote import REMOTE, RemoteMemory, open_remote
from radixlm.transfer.server import NO_ROOM, TransferServer
from tests.transfer.test_pull import PAGES, SECRET, SIZE, _keys, _page, _want

pytestmark = pytest.mark.timeout(120)


class LocalMemory:
    """Reads this process's own memory; ``before_read`` comes first."""

    name = "mooncake_tcp"
    endpoint = b"here"

    def __init__(self) -> None:
        self.exposed: dict[int, int] = {}
        self.before_read: Callable[[], None] = lambda: None

    def expose(self, data: Bytes) -> None:
        self.exposed[data.ctypes.data] = data.nbytes

    def hide(self, data: Bytes) -> None:
        del self.exposed[data.ctypes.data]

    def read(self, endpoint: bytes, addresses: Sequence[int], out: Bytes) -> None:
        assert endpoint == self.endpoint
        self.before_read()
        for address, row in zip(addresses, out, strict=True):
            assert any(at <= address < at + size for at, size in self.exposed.items())
            ctypes.memmove(row.ctypes.data, address, row.nbytes)


Made = tuple[Outbox, TransferClient]


@contextlib.contextmanager
def _pair(server_memory: RemoteMemory, client_memory: RemoteMemory) -> Iterator[Made]:
    name = server_memory.name
    outbox = Outbox([SIZE], 64 * SIZE)
    server = TransferServer(outbox, PAGES, SECRET, "127.0.0.1", (name,), server_memory)
    address = Address(server.host, server.port)
    client = TransferClient(address, SECRET, b"manifest", (name,), memory=client_memory)
    try:
        yield outbox, client
    finally:
        client.close()
        server.close()


@pytest.mark.parametrize("kind", ["stand-in", "mooncake_tcp", "nixl"])
def test_pages_are_read_where_they_lie(kind: str) -> None:
    if kind != "stand-in":
        try:
            one, other = (open_remote(kind, "127.0.0.1") for _ in range(2))
        except ConfigError as error:
            pytest.skip(str(error))
        assert one is not None and other is not None
    else:
        one = other = LocalMemory()
    with _pair(one, other) as (outbox, client):
        for number in range(40):
            outbox.put(_keys(40)[number], _page(number))
        out = np.zeros((40, SIZE), np.uint8)
        assert client.pull(_want(40, NO_ROOM), list(out)) == (40, "")
        for number in range(40):
            np.testing.assert_array_equal(out[number], _page(number))
        assert client.num_bytes == {client.backend: 40 * SIZE}


def test_a_page_that_changes_while_it_is_read_is_refused() -> None:
    memory = LocalMemory()
    with _pair(memory, memory) as (outbox, client):
        outbox.put(_keys(1)[0], _page(0))

        def change() -> None:
            outbox.arenas[0].slots[:] ^= 1

        memory.before_read = change
        with pytest.raises(Damaged):
            client.pull(_want(1, NO_ROOM), list(np.zeros((1, SIZE), np.uint8)))


def test_a_library_that_fails_ends_the_pull_and_leaves_no_memory() -> None:
    memory = LocalMemory()
    with _pair(memory, memory) as (outbox, client):
        outbox.put(_keys(1)[0], _page(0))

        def fail() -> None:
            raise TransferError("the peer is gone")

        memory.before_read = fail
        with pytest.raises(TransferError, match="gone"):
            client.pull(_want(1, NO_ROOM), list(np.zeros((1, SIZE), np.uint8)))
    assert list(memory.exposed) == [arena.slots.ctypes.data for arena in outbox.arenas]


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in (("mooncake_tcp", "mooncake.engine"), ("nixl", "nixl._api")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ConfigError, match=rf"transfer-backend {name} needs .*radixlm\["):
            open_remote(name, "127.0.0.1")
    assert set(REMOTE) == {"mooncake_tcp", "nixl"} and open_remote("tcp", "127.0.0.1") is None
