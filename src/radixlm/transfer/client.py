"""TransferClient: a decode server's connection to one rank of a prefill server. It asks for pages
and reads them into its own memory."""

from __future__ import annotations

import hmac
import logging
import mmap
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from radixlm.base.errors import TransferError
from radixlm.base.record import Record
from radixlm.transfer.checksums import CHECKSUMS
from radixlm.transfer.frames import (
    MAX_GREETING_BYTES,
    client_frames,
    machine,
    proof,
    said_to,
)
from radixlm.transfer.outbox import MARK_BYTES, Bytes, arena_bytes, arena_views
from radixlm.transfer.remote import BUFFER_BYTES, RemoteMemory
from radixlm.wire.transfer import (
    VERSION,
    Alive,
    Challenge,
    Failed,
    Hello,
    Ready,
    Refused,
    SharedArena,
    Slot,
    Taken,
    Want,
    Welcome,
)

log = logging.getLogger(__name__)

CONNECT_S: Final = 2.0
GREETING_S: Final = 5.0
PROGRESS_S: Final = 2.0  # how long a peer may say nothing
SLOWEST_BYTES_S: Final = 50e6  # and this much longer by the bytes that it may be sending
MAX_ARENA_BYTES: Final = 1 << 40

T = TypeVar("T")


class Differs(TransferError):
    """The peer's pages are of another kind; ``differences``: the fields with both values."""

    def __init__(self, differences: Sequence[str]) -> None:
        super().__init__(f"its pages differ: {'; '.join(differences)}")
        self.differences = tuple(differences)


class Damaged(TransferError):
    """A page's checksum is wrong."""


class Address(Record):
    """Where a rank of a prefill server listens."""

    host: str
    port: int


class _Mapped:
    """A memfd of the peer, mapped read-only. OSError or ValueError if it is not what it says."""

    def __init__(self, arena: SharedArena) -> None:
        size = arena_bytes(arena.slot_bytes, arena.num_slots)
        if arena.slot_bytes <= 0 or arena.num_slots <= 0 or size > MAX_ARENA_BYTES:
            raise ValueError("no arena has such sizes")
        descriptor = os.open(f"/proc/{arena.pid:d}/fd/{arena.descriptor:d}", os.O_RDONLY)
        try:
            if os.fstat(descriptor).st_size != size:
                raise ValueError("the arena has another size")
            self._map = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        if self._map[:MARK_BYTES] != arena.mark:
            raise ValueError("it is not the peer's arena")
        self.generations: NDArray[np.uint64]
        self.slots: Bytes
        self.generations, self.slots = arena_views(self._map, arena.slot_bytes, arena.num_slots)


class _Remote:
    """Pages of the peer that a library reads, into a buffer of this connection."""

    def __init__(self, memory: RemoteMemory, welcome: Welcome) -> None:
        self._memory, self._welcome = memory, welcome
        most = max((arena.slot_bytes for arena in welcome.remote), default=0)
        if not 0 < most <= MAX_ARENA_BYTES:
            raise ValueError("no arena has such sizes")
        self._buffer = np.empty(max(most, BUFFER_BYTES), np.uint8)
        memory.expose(self._buffer)

    def read(self, want: Want, out: Sequence[Bytes], ready: Ready, done: int) -> None:
        """Fill the rows of ``out`` from ``done`` on, which have one size; their checksums are to be
        compared, since a slot may be given to another page meanwhile."""
        size = want.sizes[done]
        addresses = [self._address(slot, want.sizes[i]) for i, slot in enumerate(ready.slots, done)]
        count = len(self._buffer) // size
        for first in range(0, len(addresses), count):
            part = addresses[first : first + count]
            rows = self._buffer[: len(part) * size].reshape(len(part), size)
            self._memory.read(self._welcome.endpoint, part, rows)
            for row, target in zip(rows, out[done + first :], strict=False):
                np.copyto(target, row)

    def _address(self, slot: Slot, size: int) -> int:
        if not 0 <= slot.arena < len(self._welcome.remote):
            raise TransferError("a slot of no arena")
        arena = self._welcome.remote[slot.arena]
        if not 0 <= slot.number < arena.num_slots or size != arena.slot_bytes:
            raise TransferError("a slot of another size or of none")
        return arena.address + slot.number * size

    def close(self) -> None:
        self._memory.hide(self._buffer)


class TransferClient:
    """One connection; for one thread at a time, but ``close`` may come from any."""

    def __init__(
        self,
        address: Address,
        secret: bytes,
        manifest: bytes,
        backends: tuple[str, ...] = ("shm", "tcp"),
        *,
        verifies_shared: bool = False,
        memory: RemoteMemory | None = None,
    ) -> None:
        """Connect; TransferError if there is no peer that knows the secret, Differs if its pages
        are of another kind. ``verifies_shared``: checksums of pages in shared memory, too;
        ``memory``: of a backend whose library reads pages."""
        try:
            sock = socket.create_connection((address.host, address.port), CONNECT_S)
        except (OSError, ValueError) as error:  # ValueError: no host has such a name
            raise TransferError(f"{address.host}:{address.port}: {error}") from error
        self._frames = client_frames(sock, PROGRESS_S)
        self._verifies_shared = verifies_shared
        self._remote: _Remote | None = None
        self.num_bytes: dict[str, int] = {}
        self.copy_s = 0.0  # what reading pages took, without waiting for them
        try:
            self._frames.end_s = time.monotonic() + GREETING_S
            welcome = self._greet(address, secret, manifest, backends)
            self._frames.end_s = 0.0
            self.manifest, self.backend = welcome.manifest, welcome.backend
            self._checksum = CHECKSUMS[welcome.checksum]
            shared = welcome.arenas if welcome.backend == "shm" else ()
            self._arenas = [_Mapped(arena) for arena in shared]
            if memory is not None and welcome.backend == memory.name:
                self._remote = _Remote(memory, welcome)
        except TransferError:
            self.close()
            raise
        except (OSError, ValueError) as error:
            self.close()
            if "tcp" not in backends:
                raise TransferError(f"shared memory: {error}") from error
            log.debug("no shared memory with %s:%d: %s", address.host, address.port, error)
            self.__init__(address, secret, manifest, ("tcp",))  # type: ignore[misc]

    def _greet(
        self, address: Address, secret: bytes, manifest: bytes, backends: tuple[str, ...]
    ) -> Welcome:
        challenge = self._expect(Challenge)
        if challenge.version != VERSION:
            raise Differs([f"version: {VERSION} and {challenge.version}"])
        nonce = os.urandom(32)
        said = said_to(address.host, address.port, manifest)
        mine = proof(secret, "client", challenge.nonce, nonce, said)
        self._frames.send(
            Hello(VERSION, nonce, mine, manifest, backends, machine(), tuple(CHECKSUMS))
        )
        welcome = self._expect(Welcome)
        theirs = proof(secret, "server", challenge.nonce, nonce, welcome.manifest)
        if not hmac.compare_digest(welcome.proof, theirs):
            raise TransferError("the peer does not know the secret (--cluster-secret-file)")
        if welcome.backend not in backends:
            raise TransferError(f"the peer chose {welcome.backend!r}")
        if welcome.checksum not in CHECKSUMS:
            raise TransferError(f"the peer chose the checksum {welcome.checksum!r}")
        return welcome

    def _expect(self, kind: type[T]) -> T:
        record = self._frames.receive(MAX_GREETING_BYTES)
        if isinstance(record, Refused):
            raise (
                Differs(record.differences) if record.differences else TransferError(record.reason)
            )
        if not isinstance(record, kind):
            raise TransferError(f"{type(record).__name__} where {kind.__name__} was expected")
        return record

    def pull(
        self,
        want: Want,
        out: Sequence[Bytes],
        is_over: Callable[[], bool] = lambda: False,
        arrived: Callable[[int], None] = lambda count: None,
    ) -> tuple[int, str]:
        """Fill ``out`` with the pages of ``want``: (how many leading ones came, why no more).
        ``is_over``: whether nobody wants them any more, asked twice a second. A TransferError ends
        the connection; ``arrived`` is told of the pages before it."""
        self._set_timeout(want, 0)
        self._frames.send(want)
        done, end_s = 0, time.monotonic() + want.wait_s + PROGRESS_S
        while done < len(want.keys):
            record = self._frames.receive()
            if isinstance(record, Ready):
                began_s = time.perf_counter()
                done = self._take(want, out, record, done)
                self.copy_s += time.perf_counter() - began_s
                arrived(done)
                self._frames.send(Taken(done))
                self._set_timeout(want, done)
            elif isinstance(record, Failed):
                return done, record.reason
            elif not isinstance(record, Alive):
                raise TransferError(f"{type(record).__name__} in answer to a Want")
            elif time.monotonic() > end_s:
                raise TransferError(f"nothing came in {want.wait_s:g} s")
            if done < len(want.keys) and is_over():
                raise TransferError("nobody waits for it any more")
        return done, ""

    def _set_timeout(self, want: Want, done: int) -> None:
        left = sum(want.sizes[done:]) if want.is_data else 0
        self._frames.set_timeout(PROGRESS_S + left / SLOWEST_BYTES_S)

    def _take(self, want: Want, out: Sequence[Bytes], ready: Ready, done: int) -> int:
        """Read the pages of a Ready; how many leading ones there are now."""
        end = done + len(ready.checksums)
        if ready.first != done or not done < end <= len(want.keys):
            raise TransferError(f"pages {ready.first} to {end} where {done} follows")
        if not want.is_data:
            return end
        if ready.slots and self._remote is not None:
            self._remote.read(want, out, ready, done)
        elif ready.slots:
            self._copy(want, out, ready, done)
        for i, checksum in enumerate(ready.checksums, done):
            if not ready.slots:
                self._frames.receive_into(out[i])
            if not ready.slots or self._verifies_shared or self._remote is not None:
                # at once, while the page is in the CPU's cache and the next one is on its way
                if self._checksum(out[i].data) != checksum:
                    raise Damaged(f"page {i} is damaged")
        name = self.backend if ready.slots else "tcp"
        self.num_bytes[name] = self.num_bytes.get(name, 0) + sum(want.sizes[done:end])
        return end

    def _copy(self, want: Want, out: Sequence[Bytes], ready: Ready, done: int) -> None:
        if len(ready.slots) != len(ready.checksums):
            raise TransferError("a Ready with fewer slots than pages")
        for i, slot in enumerate(ready.slots, done):
            if not (0 <= slot.arena < len(self._arenas)):
                raise TransferError("a slot of no arena")
            arena = self._arenas[slot.arena]
            if not 0 <= slot.number < len(arena.slots) or want.sizes[i] != arena.slots.shape[1]:
                raise TransferError("a slot of another size or of none")
            np.copyto(out[i], arena.slots[slot.number])
            if int(arena.generations[slot.number]) != slot.generation:
                raise TransferError("the peer has given the slot to another page")

    @property
    def is_open(self) -> bool:
        """Whether the connection can take another Want, as far as is known."""
        return self._frames.is_open()

    def close(self) -> None:
        with suppress(OSError):
            self._frames.close()
        remote, self._remote = self._remote, None
        if remote is not None:
            remote.close()


def timed_out(deadline_s: float) -> bool:
    """Whether a monotonic deadline (0: none) has passed."""
    return bool(deadline_s) and time.monotonic() > deadline_s
