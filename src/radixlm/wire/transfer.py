"""Messages between a server that has computed KV pages and one that asks for them, and the fields
of a request that say where its pages are computed.

    server                          client
    Challenge  ->                              the server's nonce
               <- Hello                        proof of the shared secret, what pages are here
    Welcome or Refused ->                      proof; how the bytes travel
               <- Want                         the pages of one request, in order
    Ready, Alive or Failed ->                  pages as they become ready
               <- Taken                        the pages of a Ready have been read
"""

from __future__ import annotations

import msgspec

VERSION = 1
# the reference's host of warm-up requests: nothing is transferred
FAKE_HOST = "2.2.2.2"


class Hint(msgspec.Struct, frozen=True):
    """Where a request's pages are being computed: the fields that a router sends for prefill and
    decode servers. ``attempt`` counts the starts of the request; ``alternatives``: further (host,
    port) that may have the pages; ``deadline_s``: monotonic time after which nobody waits, 0 for
    none; ``dp_rank``: of the replica of the prefill server, -1 for room modulo replicas."""

    bootstrap_host: str
    bootstrap_port: int
    bootstrap_room: int
    attempt: int = 0
    alternatives: tuple[tuple[str, int], ...] = ()
    deadline_s: float = 0.0
    dp_rank: int = -1

    def replica(self, count: int) -> int:
        """The replica or attention group that computes it, of ``count`` of the prefill server."""
        return self.dp_rank if 0 <= self.dp_rank < count else self.bootstrap_room % count


class Challenge(msgspec.Struct, tag="challenge", frozen=True):
    """The first message of a server. ``nonce``: 32 random bytes."""

    version: int
    nonce: bytes


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """``manifest``: what the client's pages are made of, packed (``tiers/manifest.py``).
    ``backends``: how it can read, best first. ``machine``: of its memory and processes.
    ``checksums``: that it can compute, best first."""

    version: int
    nonce: bytes
    proof: bytes
    manifest: bytes
    backends: tuple[str, ...]
    machine: str
    checksums: tuple[str, ...] = ()


class SharedArena(msgspec.Struct, frozen=True):
    """A memfd of the server, which a process of the same user maps. ``mark`` is its content's
    first 32 bytes."""

    pid: int
    descriptor: int
    slot_bytes: int
    num_slots: int
    mark: bytes


class RemoteArena(msgspec.Struct, frozen=True):
    """Slots at ``address`` of the server, which a library reads from other hosts."""

    address: int
    slot_bytes: int
    num_slots: int


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """The client may ask. ``backend``: of those that it offered; ``arenas``: of backend shm;
    ``remote`` and ``endpoint``: of backends of a library, which knows the server by it.
    ``checksum``: of the pages."""

    proof: bytes
    manifest: bytes
    backend: str
    arenas: tuple[SharedArena, ...] = ()
    remote: tuple[RemoteArena, ...] = ()
    endpoint: bytes = b""
    checksum: str = "crc32"


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The connection ends here. ``differences``: fields in which the manifests differ."""

    reason: str
    differences: tuple[str, ...] = ()


class Want(msgspec.Struct, tag="want", frozen=True):
    """The pages of ``keys``, in order, of ``sizes`` bytes. ``wait_s``: how long the client waits in
    all. ``space``: the kind of the pages. ``is_cut``: it wants the part of each page that its own
    manifest has, which another rank of the server keeps in another shape. ``is_data`` False: only
    tell when they are ready."""

    room: int
    attempt: int
    keys: list[bytes]
    sizes: list[int]
    wait_s: float
    space: int = 0
    is_cut: bool = False
    is_data: bool = True


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """A page in a shared arena, as long as the slot's generation is this one."""

    arena: int
    number: int
    generation: int


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """Pages ``first`` to first + len(checksums) of the Want. ``slots``: where they lie; empty:
    their bytes follow this message. ``checksums``: CRC-32 of each."""

    first: int
    checksums: list[int]
    slots: list[Slot] = []


class Alive(msgspec.Struct, tag="alive", frozen=True):
    """Nothing new, but the room's request waits or is computed."""


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """No more pages will come. The connection can take another Want."""

    reason: str


class Taken(msgspec.Struct, tag="taken", frozen=True):
    """The client has read the pages before ``end`` of its Want."""

    end: int


FromServer = Challenge | Welcome | Refused | Ready | Alive | Failed
FromClient = Hello | Want | Taken
