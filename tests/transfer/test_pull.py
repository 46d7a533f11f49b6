"""Pulls between two ends in one process: whole, chunk by chunk, refused, cut, hostile."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from radixlm.base.errors import TransferError
from radixlm.transfer import server as serving
from radixlm.transfer.bootstrap import Directory
from radixlm.transfer.checksums import CRC32
from radixlm.transfer.client import Address, Damaged, Differs, TransferClient
from radixlm.transfer.frames import (
    MAX_GREETING_BYTES,
    client_frames,
    machine,
    proof,
    server_frames,
)
from radixlm.transfer.outbox import Bytes, Outbox
from radixlm.transfer.server import NO_ROOM, ServedPages, TransferServer
from radixlm.wire.transfer import Alive, Challenge, Hello, Ready, SharedArena, Slot, Want, Welcome

SECRET = b"s" * 32
SIZE = 4096
ROOM = 7
pytestmark = pytest.mark.timeout(60)


def _differences(theirs: bytes) -> list[str]:
    return [] if theirs == b"manifest" else ["kv_dtype: bf16 and int8"]


def _cut(payload: Bytes, manifest: bytes, space: int) -> Bytes:
    assert (manifest, space) == (b"manifest", 1)
    return payload[:100]


PAGES = ServedPages(b"manifest", _differences, _cut)


class Pair:
    """An outbox with its server, and what connects to it."""

    def __init__(self, num_slots: int = 64) -> None:
        self.outbox = Outbox([SIZE], num_slots * SIZE)
        self.server = TransferServer(self.outbox, PAGES, SECRET, "127.0.0.1")
        self.clients: list[TransferClient] = []

    def client(self, *backends: str, manifest: bytes = b"manifest", **more: Any) -> TransferClient:
        address = Address(self.server.host, self.server.port)
        client = TransferClient(address, SECRET, manifest, backends or ("shm", "tcp"), **more)
        self.clients.append(client)
        return client

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with contextlib.closing(Pair()) as made:
        yield made


def _page(number: int) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, SIZE, np.uint8)


def _keys(count: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(count)]


def _want(count: int, room: int = ROOM, **more: Any) -> Want:
    return Want(room, 0, _keys(count), [SIZE] * count, more.pop("wait_s", 20.0), **more)


def _out(count: int) -> Bytes:
    return np.zeros((count, SIZE), np.uint8)


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_pages_come_as_they_become_ready(pair: Pair, backend: str) -> None:
    pair.outbox.open_room(ROOM)
    out, seen = _out(9), []
    client = pair.client(backend)
    assert client.backend == backend

    def compute() -> None:
        for first in (0, 3, 6):
            while len(seen) < first // 3:  # the pages before have been read
                time.sleep(0.001)
            for number in range(first, first + 3):
                pair.outbox.put(_keys(9)[number], _page(number))

    def note(count: int) -> None:
        if count % 3 == 0:
            seen.append(count)

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    assert client.pull(_want(9), list(out), arrived=note) == (9, "")
    thread.join(10)
    assert seen == [3, 6, 9]
    for number in range(9):
        np.testing.assert_array_equal(out[number], _page(number))
    assert client.num_bytes == {backend: 9 * SIZE}
    # the connection takes another Want, of a room that nobody knows
    assert client.is_open
    assert client.pull(_want(9, NO_ROOM), list(_out(9))) == (9, "")


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_both_ends_use_a_checksum_that_the_client_has(
    pair: Pair, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        pair.outbox.put(_keys(3)[number], _page(number))
    monkeypatch.setattr("radixlm.transfer.client.CHECKSUMS", {CRC32: zlib.crc32})
    client, out = pair.client(backend, verifies_shared=True), _out(3)
    assert client.pull(_want(3), list(out)) == (3, "")
    assert all(np.array_equal(out[number], _page(number)) for number in range(3))
    pair.outbox.take(_keys(3)[2:], 0.0, SIZE)[0].payload[5] ^= 1
    if backend == "shm":  # the bytes have changed, the checksum of shared pages is what it was
        monkeypatch.undo()
        with pytest.raises(Damaged):
            pair.client(backend, verifies_shared=True).pull(_want(3), list(out))


def test_a_part_of_each_page_is_cut_by_the_server(pair: Pair) -> None:
    for number, key in enumerate(_keys(2)):
        pair.outbox.put(key, _page(number))
    out = np.zeros((2, 100), np.uint8)
    want = Want(NO_ROOM, 0, _keys(2), [100, 100], 5.0, space=1, is_cut=True)
    assert pair.client().pull(want, list(out)) == (2, "")
    np.testing.assert_array_equal(out[1], _page(1)[:100])


def test_pages_that_are_only_asked_for_bring_no_bytes(pair: Pair) -> None:
    pair.outbox.put(_keys(1)[0], _page(0))
    out, client = _out(1), pair.client("tcp")
    assert client.pull(_want(1, NO_ROOM, is_data=False), list(out)) == (1, "")
    assert not out.any()
    assert client.num_bytes == {}


def test_a_prefix_stays_when_the_request_is_over(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "ALIVE_S", 0.01)
    monkeypatch.setattr(serving, "GRACE_S", 0.05)
    pair.outbox.open_room(ROOM)
    pair.outbox.put(_keys(3)[0], _page(0))
    pair.outbox.close_room(ROOM)
    assert pair.client().pull(_want(3), list(_out(3))) == (1, "the room's request is over")


def test_a_room_that_no_request_comes_for_fails(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "ALIVE_S", 0.01)
    monkeypatch.setattr(serving, "UNKNOWN_S", 0.05)
    count, reason = pair.client().pull(_want(1), list(_out(1)))
    assert (count, reason) == (0, "no request has come for the room")


def test_a_client_that_leaves_frees_what_it_read(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "ALIVE_S", 0.01)
    pair.outbox.open_room(ROOM)
    client = pair.client()
    with pytest.raises(TransferError, match="nobody waits"):
        client.pull(_want(1), list(_out(1)), is_over=lambda: True)
    client.close()
    deadline_s = time.monotonic() + 10
    while pair.server.num_waiting and time.monotonic() < deadline_s:
        time.sleep(0.005)
    assert pair.server.num_waiting == 0


def test_a_dead_server_is_noticed_at_once(pair: Pair) -> None:
    pair.outbox.open_room(ROOM)
    client = pair.client()
    timer = threading.Timer(0.1, pair.server.close)
    timer.daemon = True
    timer.start()
    began_s = time.monotonic()
    with pytest.raises(TransferError):
        client.pull(_want(1), list(_out(1)))
    assert time.monotonic() - began_s < 1.9  # PROGRESS_S would have been the limit
    assert not client.is_open


def test_without_the_secret_nothing_is_served(pair: Pair) -> None:
    address = Address(pair.server.host, pair.server.port)
    with pytest.raises(TransferError, match="does not know the secret"):
        TransferClient(address, b"x" * 32, b"manifest")
    assert pair.server.num_refused == 1


def test_other_pages_are_refused_with_the_fields(pair: Pair) -> None:
    with pytest.raises(Differs, match="kv_dtype: bf16 and int8"):
        pair.client(manifest=b"other")


def test_the_outbox_drops_the_oldest_pages_that_nobody_reads() -> None:
    outbox = Outbox([SIZE], 2 * SIZE)
    keys = _keys(4)
    assert outbox.put(keys[0], _page(0))
    assert outbox.put(keys[1], _page(1))
    read = outbox.take(keys[:1], 0.0, SIZE)
    assert outbox.put(keys[2], _page(2))  # in place of page 1: page 0 is being read
    assert [outbox.has(key) for key in keys] == [True, False, True, False]
    more = outbox.take(keys[2:3], 0.0, SIZE)
    assert not outbox.put(keys[3], _page(3))
    outbox.give_back([*read, *more])
    assert outbox.put(keys[3], _page(3))
    assert not outbox.put(b"k", np.zeros(SIZE + 1, np.uint8))  # no slots of that size
    assert outbox.num_dropped == 2
    outbox.clear()
    assert not any(outbox.has(key) for key in keys)
    outbox.close()


class Liar:
    """A peer that knows the secret and answers a Want with what a test says."""

    def __init__(
        self, answer: Ready, payload: bytes = b"", arenas: Any = (), backend: str = ""
    ) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address(*self._listener.getsockname()[:2])
        self._said = answer, payload, arenas, backend or ("shm" if arenas else "tcp")
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with self._listener, self._listener.accept()[0] as sock:
            self._say(server_frames(sock, 5.0), *self._said)

    def _say(self, frames: Any, answer: Ready, payload: bytes, arenas: Any, backend: str) -> None:
        nonce = b"n" * 32
        frames.send(Challenge(1, nonce))
        hello = frames.receive()
        assert isinstance(hello, Hello)
        said = proof(SECRET, "server", nonce, hello.nonce, b"manifest")
        frames.send(Welcome(said, b"manifest", backend, tuple(arenas)))
        with contextlib.suppress(TransferError):
            frames.receive()
            frames.send(answer, [payload])
            frames.receive()


@pytest.mark.parametrize(
    "answer",
    [
        Ready(1, [0]),
        Ready(0, [0, 0, 0]),
        Ready(0, []),
        Ready(0, [0], [Slot(0, 0, 0)]),
        Ready(0, [0], [Slot(-1, 0, 0)]),
    ],
)
def test_answers_that_break_the_protocol_end_the_connection(answer: Ready) -> None:
    client = TransferClient(Liar(answer, bytes(3 * SIZE)).address, SECRET, b"manifest", ("tcp",))
    out = _out(3)
    with contextlib.closing(client), pytest.raises(TransferError):
        client.pull(_want(2), list(out[:2]))
    assert not out[2].any()  # nothing behind what was asked for


def test_arenas_of_a_server_without_shared_memory_are_not_opened() -> None:
    arenas = [SharedArena(1, 0, -1, 1, b"")]
    liar = Liar(Ready(0, [zlib.crc32(bytes(SIZE))]), bytes(SIZE), arenas, "tcp")
    client = TransferClient(liar.address, SECRET, b"manifest", ("tcp",))
    with contextlib.closing(client):
        assert client.pull(_want(1), list(_out(1))) == (1, "")


def test_a_flipped_bit_is_found() -> None:
    client = TransferClient(Liar(Ready(0, [1]), bytes(SIZE)).address, SECRET, b"m", ("tcp",))
    with contextlib.closing(client), pytest.raises(Damaged):
        client.pull(_want(1), list(_out(1)))


def test_a_slot_of_another_page_is_found() -> None:
    outbox = Outbox([SIZE], SIZE)
    outbox.put(b"k", _page(0))
    arenas = [arena.shared() for arena in outbox.arenas]
    liar = Liar(Ready(0, [0], [Slot(0, 0, 5)]), arenas=arenas)
    client = TransferClient(liar.address, SECRET, b"manifest", ("shm",))
    with contextlib.closing(client), pytest.raises(TransferError, match="another page"):
        client.pull(_want(1), list(_out(1)))


def test_a_foreign_arena_falls_back_to_tcp(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: Any) -> SharedArena:
        return SharedArena(1, 0, SIZE, 1, b"x" * 32)

    monkeypatch.setattr("radixlm.transfer.outbox.Arena.shared", wrong)
    assert pair.client().backend == "tcp"
    with pytest.raises(TransferError, match="shared memory"):
        pair.client("shm")


def test_machine_names_this_host() -> None:
    assert machine() == machine() != ""


def test_a_proof_that_is_passed_on_opens_nothing(pair: Pair) -> None:
    """A client of a decode server names the host, so its own may pass on what it is told."""
    listener = socket.create_server(("127.0.0.1", 0))

    def pass_on() -> None:
        with listener, contextlib.suppress(TransferError, OSError):
            victim = server_frames(listener.accept()[0], 5.0)
            real = client_frames(
                socket.create_connection((pair.server.host, pair.server.port), 5.0), 5.0
            )
            victim.send(real.receive())
            real.send(victim.receive())
            victim.send(real.receive())
            victim.close()
            real.close()

    thread = threading.Thread(target=pass_on, daemon=True)
    thread.start()
    with pytest.raises(TransferError, match="does not know the secret"):
        TransferClient(Address(*listener.getsockname()[:2]), SECRET, b"manifest", ("tcp",))
    thread.join(10)
    assert pair.server.num_refused == 1


def test_strangers_take_little_memory_and_time(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "HANDSHAKE_S", 0.2)
    for start in (struct.pack("<I", MAX_GREETING_BYTES + 1), struct.pack("<I", 9) + b"x"):
        with socket.create_connection((pair.server.host, pair.server.port), 5.0) as sock:
            sock.settimeout(5.0)
            assert len(sock.recv(4)) == 4
            sock.sendall(start)
            while sock.recv(4096):
                pass  # ends when the server has closed it


def test_a_server_without_threads_goes_on(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def none_left(thread: threading.Thread) -> None:
        if thread.name == "transfer client":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", none_left)
    with pytest.raises(TransferError):
        pair.client()
    monkeypatch.undo()
    pair.client().close()


def test_a_bootstrap_service_of_a_stranger_is_a_peer_that_failed() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        sock, _ = listener.accept()
        sock.recv(4096)
        sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 50_000)
        sock.close()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    with contextlib.closing(listener), pytest.raises(TransferError):
        Directory().ranks("127.0.0.1", listener.getsockname()[1], 1)
    thread.join(10)


def test_a_closed_server_listens_no_more(pair: Pair) -> None:
    pair.server.close()
    with pytest.raises(TransferError):
        pair.client()


def test_a_server_that_only_says_that_it_lives_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixlm.transfer.client.PROGRESS_S", 0.0)
    client = TransferClient(Liar(Alive()).address, SECRET, b"manifest", ("tcp",))  # type: ignore[arg-type]
    with contextlib.closing(client), pytest.raises(TransferError, match="nothing came in 0 s"):
        client.pull(_want(1, wait_s=0.0), list(_out(1)))
