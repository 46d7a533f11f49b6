"""TransferServer: answers decode servers with the pages of the outbox, as they become ready."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from radixlm.base.errors import TransferError
from radixlm.base.record import Record
from radixlm.transfer.checksums import BEST, CHECKSUMS, CRC32
from radixlm.transfer.frames import (
    MAX_GREETING_BYTES,
    Frames,
    machine,
    proof,
    said_to,
    server_frames,
)
from radixlm.transfer.outbox import Bytes, Outbox, Page
from radixlm.transfer.remote import RemoteMemory
from radixlm.wire.transfer import (
    VERSION,
    Alive,
    Challenge,
    Failed,
    FromClient,
    Hello,
    Ready,
    Refused,
    Taken,
    Want,
    Welcome,
)

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 512
HANDSHAKE_S: Final = 5.0
LEASE_S: Final = 30.0  # how long pages stay for a client that says nothing
IDLE_S: Final = 600.0  # how long a connection without a Want stays
ALIVE_S: Final = 0.5
UNKNOWN_S: Final = 2.0  # how long the request of a room may be behind its Want
GRACE_S: Final = 1.0  # the last pages of a request that is over may be on their way
BATCH_BYTES: Final = 32 << 20
NO_ROOM: Final = -1  # its Want is answered by what is there and waits for nothing


class ServedPages(Record, eq=False):
    """What a server needs to know of its pages. ``manifest``: packed; ``differences``: between it
    and a client's; ``cut``: (a page's bytes, a client's manifest, space) -> the client's part,
    ValueError if it cannot have one. ``knows_rooms``: whether rooms are told to
    this rank, else its clients ask rank 0 for the state of a request."""

    manifest: bytes
    differences: Callable[[bytes], list[str]]
    cut: Callable[[Bytes, bytes, int], Bytes]
    knows_rooms: bool = True


class Agreed(Record):
    """How a client reads, its packed manifest, and the checksum of its pages."""

    backend: str
    manifest: bytes
    checksum: str


class TransferServer:
    """Listens at ``host`` and serves each client in a thread."""

    def __init__(
        self,
        outbox: Outbox,
        pages: ServedPages,
        secret: bytes,
        host: str,
        backends: tuple[str, ...] = ("shm", "tcp"),
        memory: RemoteMemory | None = None,
    ) -> None:
        """``memory``: of a backend whose library reads the outbox."""
        self._outbox, self._pages, self._secret, self._backends = outbox, pages, secret, backends
        self._memory = memory
        if memory is not None:
            for arena in outbox.arenas:
                memory.expose(arena.slots)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self.host, self.port = self._listener.getsockname()[:2]
        self._clients: set[Frames[FromClient]] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self.num_sent_bytes: dict[str, int] = dict.fromkeys(backends, 0)
        self.num_refused = self.num_failed = self.num_waiting = 0
        threading.Thread(target=self._accept, name="transfer server", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(0.05)  # no descriptors left
                continue
            try:
                client = server_frames(sock, HANDSHAKE_S)
            except OSError:  # it has left already
                sock.close()
                continue
            with self._lock:
                has_room = len(self._clients) < MAX_CONNECTIONS and not self._is_closed
                if has_room:
                    self._clients.add(client)
            if not has_room:
                client.close()
                continue
            try:
                threading.Thread(
                    target=self._serve, args=(client,), name="transfer client", daemon=True
                ).start()
            except RuntimeError as error:  # no thread is left
                log.warning("a transfer client is not served: %s", error)
                with self._lock:
                    self._clients.discard(client)
                client.close()

    def _serve(self, client: Frames[FromClient]) -> None:
        try:
            client.end_s = time.monotonic() + HANDSHAKE_S
            agreed = self._greet(client)
            client.end_s = 0.0
            while agreed.backend:
                client.set_timeout(IDLE_S)
                want = client.receive()
                if not isinstance(want, Want) or len(want.keys) != len(want.sizes):
                    raise TransferError("not a Want")
                self.num_waiting += 1
                try:
                    self._answer(client, want, agreed)
                finally:
                    self.num_waiting -= 1
        except (TransferError, OSError, ValueError, LookupError) as error:
            if not self._is_closed:
                log.debug("a transfer client: %s", error)
        finally:
            with self._lock:
                self._clients.discard(client)
            client.close()

    def _greet(self, client: Frames[FromClient]) -> Agreed:
        """How to answer a client that knows the secret; no backend if it was refused."""
        nonce = os.urandom(32)
        client.send(Challenge(VERSION, nonce))
        hello = client.receive(MAX_GREETING_BYTES)
        if not isinstance(hello, Hello) or len(hello.nonce) != 32:
            raise TransferError("not a Hello")
        said = said_to(self.host, self.port, hello.manifest)
        expected = proof(self._secret, "client", nonce, hello.nonce, said)
        if not hmac.compare_digest(hello.proof, expected):
            self.num_refused += 1
            log.warning("refused a transfer client that does not know the secret")
            client.send(Refused("it does not know the secret (--cluster-secret-file)"))
            return Agreed("", b"", "")
        differences = [f"version: {VERSION} and {hello.version}"]
        if hello.version == VERSION:
            differences = self._pages.differences(hello.manifest)
        shared = [b for b in hello.backends if b in self._backends]
        if hello.machine != machine() or not machine():
            shared = [b for b in shared if b != "shm"]
        if differences or not shared:
            self.num_refused += 1
            reason = "its pages differ" if differences else f"no backend of {hello.backends} works"
            client.send(Refused(reason, tuple(differences)))
            return Agreed("", b"", "")
        said = proof(self._secret, "server", nonce, hello.nonce, self._pages.manifest)
        checksum = next((name for name in hello.checksums if name in CHECKSUMS), CRC32)
        welcome = Welcome(said, self._pages.manifest, shared[0], checksum=checksum)
        if shared[0] == "shm":
            arenas = tuple(arena.shared() for arena in self._outbox.arenas)
            welcome = replace(welcome, arenas=arenas)
        elif self._memory is not None and shared[0] == self._memory.name:
            remote = tuple(arena.remote() for arena in self._outbox.arenas)
            welcome = replace(welcome, remote=remote, endpoint=self._memory.endpoint)
        client.send(welcome)
        return Agreed(shared[0], hello.manifest, checksum)

    def _answer(self, client: Frames[FromClient], want: Want, agreed: Agreed) -> None:
        """Send the pages of a Want in order, until all are there or no more will come."""
        began_s, done = time.monotonic(), 0
        client.set_timeout(LEASE_S)
        while done < len(want.keys):
            wait_s = 0.0 if want.room == NO_ROOM else ALIVE_S
            pages = self._outbox.take(want.keys[done:], wait_s, BATCH_BYTES)
            if pages:
                try:
                    self._send(client, want, done, pages, agreed)
                finally:
                    self._outbox.give_back(pages)
                done += len(pages)
                continue
            reason = self._why_over(want, time.monotonic() - began_s)
            if reason:
                self.num_failed += want.room != NO_ROOM
                client.send(Failed(reason))
                return
            client.send(Alive())

    def _send(
        self,
        client: Frames[FromClient],
        want: Want,
        first: int,
        pages: list[Page],
        agreed: Agreed,
    ) -> None:
        """Send pages and wait until they have been read."""
        end, slots = first + len(pages), []
        payloads, checksums = [page.payload for page in pages], [p.checksum for p in pages]
        if want.is_cut:
            payloads = [self._pages.cut(data, agreed.manifest, want.space) for data in payloads]
        if want.is_cut or agreed.checksum != BEST:
            checksums = [CHECKSUMS[agreed.checksum](data.data) for data in payloads]
        if not want.is_data:
            client.send(Ready(first, [0] * len(pages)))
        elif agreed.backend != "tcp" and not want.is_cut:
            slots = [page.slot for page in pages]
            client.send(Ready(first, checksums, slots))
        else:
            if any(p.nbytes != size for p, size in zip(payloads, want.sizes[first:], strict=False)):
                raise TransferError("a page has another size than its client wants")
            client.send(Ready(first, checksums), payloads)
        taken = client.receive()
        if not isinstance(taken, Taken) or taken.end != end:
            raise TransferError("not the Taken of the last pages")
        if want.is_data:
            name = agreed.backend if slots else "tcp"
            count = sum(want.sizes[first:end])
            self.num_sent_bytes[name] = self.num_sent_bytes.get(name, 0) + count

    def _why_over(self, want: Want, waited_s: float) -> str:
        """Why no more pages will come; "" if they may."""
        if want.room == NO_ROOM:
            return "no more pages are here"
        if waited_s > want.wait_s:
            return f"it has waited {want.wait_s:g} s"
        if not self._pages.knows_rooms or self._outbox.is_open(want.room):
            return ""
        over_s = self._outbox.over_since_s(want.room)
        if over_s is not None:
            is_late = time.monotonic() - max(over_s, 0.0) > GRACE_S
            return "the room's request is over" if is_late else ""
        return "no request has come for the room" if waited_s > UNKNOWN_S else ""

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            self._is_closed = True
            clients = list(self._clients)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends accept, which close does not
        self._listener.close()
        for client in clients:
            client.close()
