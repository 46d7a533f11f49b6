"""The peer tier: pages that another engine computes. On a prefill server it keeps what was computed
until decode servers have fetched it; on a decode server it fetches, by the request's hint.

Nothing here ends a request: a peer that is dead, late, or of another kind gives fewer pages, and
the engine computes the rest.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Final

import msgspec
import numpy as np

from radixlm.base.errors import TransferError
from radixlm.base.record import Record
from radixlm.tiers.base import PageRecord, Payload, TierName
from radixlm.tiers.exchange import Exchange, Unequal, cover
from radixlm.tiers.manifest import Manifest
from radixlm.transfer.bootstrap import Directory, Registration, register_in_thread
from radixlm.transfer.client import Address, Damaged, Differs, TransferClient, timed_out
from radixlm.transfer.outbox import Outbox
from radixlm.transfer.remote import RemoteMemory
from radixlm.transfer.server import ServedPages, TransferServer
from radixlm.wire.transfer import FAKE_HOST, Hint, Want

log = logging.getLogger(__name__)

MAX_PEERS: Final = 4096
RANK_S: Final = 10.0  # how long another rank may be behind the one that knows of the room
MAX_DAMAGED: Final = 3  # then a peer is asked no more for a while
DISTRUST_RETRIES: Final = 12  # how many times longer than one that only failed
_pack = msgspec.msgpack.encode


class PeerOptions(Record):
    """``secret``: of the transfer protocol. ``wait_s``: for a prefill server that is alive.
    ``retry_s``: before one that failed is asked again. ``backends``: best first; ``memory``: of the
    one whose library moves the bytes."""

    secret: bytes
    backends: tuple[str, ...] = ("shm", "tcp")
    wait_s: float = 300.0
    retry_s: float = 5.0
    verifies_shared: bool = False
    memory: RemoteMemory | None = None


class Outgoing:
    """The peer tier of a rank of a prefill server."""

    name: TierName = "peer"
    medium = "EXTERNAL"
    takes_puts, has_index = True, False

    def __init__(
        self,
        manifest: Manifest,
        options: PeerOptions,
        host: str,
        bootstrap: tuple[str, int],
        registration: Callable[[Address], Registration],
        max_bytes: int,
        *,
        knows_rooms: bool = True,
    ) -> None:
        """``host``: where to listen; ``bootstrap``: where to register; ``max_bytes``: of pages that
        wait; ``knows_rooms``: whether ``open_room`` is called in this rank."""
        self.outbox = Outbox(manifest.page_bytes, max_bytes)
        pages = ServedPages(
            _pack(manifest),
            lambda packed: _differences(manifest, packed),
            lambda payload, packed, space: _exchange(manifest, packed, space).cut(payload),
            knows_rooms,
        )
        self.server = TransferServer(
            self.outbox, pages, options.secret, host, options.backends, options.memory
        )
        address = Address(self.server.host, self.server.port)
        self._is_over = register_in_thread(*bootstrap, registration(address))
        self.open_room, self.close_room = self.outbox.open_room, self.outbox.close_room

    def spans(self) -> list[tuple[int, int]]:
        """(address, bytes) of the memory for pages that wait."""
        return [(arena.slots.ctypes.data, arena.slots.nbytes) for arena in self.outbox.arenas]

    def contains(self, keys: Sequence[bytes], hint: Hint | None = None) -> int:
        """What the outbox still has; nothing for a request, whose pages go out, not in."""
        if hint is not None:
            return 0
        return next((i for i, key in enumerate(keys) if not self.outbox.has(key)), len(keys))

    def get(self, keys: Sequence[bytes], out: Sequence[Payload], hint: Hint | None = None) -> int:
        """0: the pool had the pages, too."""
        return 0

    def put(self, records: Sequence[PageRecord]) -> None:
        """Keep pages of requests that came with a hint."""
        for record in records:
            if record.hint is not None and record.hint.bootstrap_host != FAKE_HOST:
                self.outbox.put(record.key, record.payload)

    def clear(self) -> None:
        self.outbox.clear()

    def stats(self) -> dict[str, float]:
        outbox, server = self.outbox, self.server
        sent = {f"sent_bytes_{name}": float(n) for name, n in server.num_sent_bytes.items()}
        return {
            "num_inflight": server.num_waiting,
            "num_rooms": outbox.num_open,
            "put_pages": outbox.num_put,
            "dropped_pages": outbox.num_dropped,
            "refused_clients": server.num_refused,
            "failed_transfers": server.num_failed,
            **sent,
        }

    def close(self) -> None:
        self._is_over.set()
        self.server.close()
        self.outbox.close()


class _Rank(Record, eq=False):
    """A source of a pull: where, and what of its pages is wanted."""

    address: Address
    index: int
    exchange: Exchange
    is_first: bool


class Incoming:
    """The peer tier of a rank of a decode server."""

    name: TierName = "peer"
    medium = "EXTERNAL"
    takes_puts = has_index = False

    def __init__(
        self, manifest: Manifest, options: PeerOptions, directory: Directory | None = None
    ) -> None:
        self._manifest, self._options, self._packed = manifest, options, _pack(manifest)
        self._directory = directory or Directory()
        self._lock = threading.Lock()
        self._idle: dict[Address, list[TransferClient]] = {}
        self._manifests: dict[Address, Manifest] = {}
        self._bad_until_s: dict[tuple[str, int], float] = {}
        self._num_damaged: Counter[tuple[str, int]] = Counter()
        self._warned: set[tuple[str, int]] = set()
        self._counts: Counter[str] = Counter()
        self._seconds = self._copy_s = 0.0
        self._num_pulling = 0

    def contains(self, keys: Sequence[bytes], hint: Hint | None = None) -> int:
        """All, if there is a peer to ask that has not just failed."""
        if hint is None or timed_out(hint.deadline_s):
            return 0
        return len(keys) if any(self._is_good(peer) for peer in _peers(hint)) else 0

    def get(self, keys: Sequence[bytes], out: Sequence[Payload], hint: Hint | None = None) -> int:
        """Wait for pages as long as a peer is alive and makes progress; the next one is asked for
        what the first did not give."""
        done, began_s = 0, time.perf_counter()
        self._num_pulling += 1
        try:
            for peer in _peers(hint) if hint is not None else ():
                if done < len(keys) and self._is_good(peer):
                    assert hint is not None
                    done += self._pull(peer, keys[done:], out[done:], hint)
        finally:
            self._num_pulling -= 1
        self._seconds += time.perf_counter() - began_s
        kind = "whole" if done == len(keys) else "part" if done else "local"
        self._counts[f"pulls_{kind}"] += 1
        return done

    def put(self, records: Sequence[PageRecord]) -> None:
        """Nothing: a decode server keeps its pages in its own tiers."""

    def clear(self) -> None:
        """Nothing is kept here."""

    def stats(self) -> dict[str, float]:
        return {
            **self._counts,
            "num_pulling": self._num_pulling,
            "pull_seconds": self._seconds,
            "copy_seconds": self._copy_s,
            "bootstrap_seconds": self._directory.seconds,
            "num_bootstraps": self._directory.num_asked,
        }

    def close(self) -> None:
        self._drop(list(self._idle))

    def _drop(self, addresses: Sequence[Address]) -> None:
        """Close idle connections, which hold a dead peer's shared memory, too."""
        with self._lock:
            clients = [client for address in addresses for client in self._idle.pop(address, ())]
        for address in addresses:
            self._manifests.pop(address, None)
        for client in clients:
            client.close()

    def _drop_dead(self) -> None:
        """Close what is idle where peers are gone and nobody asks any more."""
        with self._lock:
            clients = [one for known in self._idle.values() for one in known if not one.is_open]
            for address, known in list(self._idle.items()):
                self._idle[address] = [one for one in known if one not in clients]
                if not self._idle[address]:
                    del self._idle[address]
        for client in clients:
            client.close()

    # ---- one peer --------------------------------------------------------------------------------

    def _is_good(self, peer: tuple[str, int]) -> bool:
        return time.monotonic() >= self._bad_until_s.get(peer, 0.0)

    def _fail(self, peer: tuple[str, int], counter: str, error: Exception, times: int = 1) -> None:
        """Leave a peer alone for a while."""
        self._counts[counter] += 1
        if peer not in self._warned:
            self._warned.add(peer)
            log.warning("no pages from %s:%d, their tokens are computed here: %s", *peer, error)
        if len(self._bad_until_s) >= MAX_PEERS:  # clients name them
            self._bad_until_s.clear()
            self._num_damaged.clear()
            self._warned.clear()
        self._bad_until_s[peer] = time.monotonic() + times * self._options.retry_s

    def _pull(
        self, peer: tuple[str, int], keys: Sequence[bytes], out: Sequence[Payload], hint: Hint
    ) -> int:
        """Leading pages that a peer gave; it is left alone for a while if it failed."""
        try:
            addresses = self._directory.ranks(*peer, hint.bootstrap_room, hint.dp_rank)
        except TransferError as error:
            self._fail(peer, "bootstrap_failed", error)
            return 0
        space = int(bool(out) and out[0].nbytes != self._manifest.page_bytes[0])
        arrived, ranks = [0], list[_Rank]()
        try:
            ranks = self._choose(addresses, space)
            count = len(keys)
            if ranks[0].index:  # rank 0 alone knows whether the request still runs
                count = self._ask(addresses[0], keys, hint)
            for rank in ranks:
                count = self._fetch(rank, keys[:count], out[:count], hint, space, arrived)
        except Differs as error:
            self._fail(peer, "refused", error, DISTRUST_RETRIES)
            return 0
        except Unequal as error:
            self._fail(peer, "refused", error, DISTRUST_RETRIES)
            return 0
        except (TransferError, OSError) as error:
            self._directory.forget(*peer)
            self._drop(addresses)
            self._num_damaged[peer] += isinstance(error, Damaged)
            self._counts["damaged"] += isinstance(error, Damaged)
            is_distrusted = self._num_damaged[peer] >= MAX_DAMAGED
            self._fail(peer, "transfer_failed", error, DISTRUST_RETRIES if is_distrusted else 1)
            return arrived[0] if len(ranks) == 1 else 0
        self._warned.discard(peer)
        return count

    def _choose(self, addresses: Sequence[Address], space: int) -> list[_Rank]:
        """The ranks to ask for this rank's part of the pages."""
        mine = self._manifest
        for address in addresses:
            if address not in self._manifests:
                with self._connected(address):
                    pass
        sources = [self._manifests[address] for address in addresses]
        return [
            _Rank(addresses[i], i, Exchange(sources[i], mine, space), not n)
            for n, i in enumerate(cover(mine, sources))
        ]

    def _ask(self, address: Address, keys: Sequence[bytes], hint: Hint) -> int:
        """How many leading pages are ready, when they are or no more will be."""
        want = self._want(keys, [0] * len(keys), hint, is_data=False)
        with self._connected(address) as client:
            return client.pull(want, (), lambda: timed_out(hint.deadline_s))[0]

    def _fetch(
        self,
        rank: _Rank,
        keys: Sequence[bytes],
        out: Sequence[Payload],
        hint: Hint,
        space: int,
        arrived: list[int],
    ) -> int:
        """This rank's part of leading pages from one source; ``arrived[0]``: how many, at any
        time."""
        exchange, data = rank.exchange, list(out)
        if not exchange.is_same:
            data = [np.empty(exchange.num_bytes, np.uint8) for _ in keys]
            for row in out if rank.is_first else ():
                row[-1:] = 0  # ranks add their flags
        sizes = [row.nbytes for row in data]
        want = self._want(keys, sizes, hint, space=space, is_cut=not exchange.is_same)
        if rank.index:
            want = msgspec.structs.replace(want, wait_s=min(want.wait_s, RANK_S))
        arrived[0] = 0

        def note(count: int) -> None:
            for i in range(arrived[0], count if not exchange.is_same else 0):
                exchange.paste(data[i], out[i])
            arrived[0] = count

        with self._connected(rank.address) as client:
            before, copy_s = dict(client.num_bytes), client.copy_s
            count, reason = client.pull(want, data, lambda: timed_out(hint.deadline_s), note)
            for name, total in client.num_bytes.items():
                self._counts[f"bytes_{name}"] += total - before.get(name, 0)
            self._copy_s += client.copy_s - copy_s
        if reason:
            log.debug("room %d: %d of %d pages: %s", hint.bootstrap_room, count, len(keys), reason)
        return count

    def _want(
        self, keys: Sequence[bytes], sizes: list[int], hint: Hint, **more: int | bool
    ) -> Want:
        wait_s = self._options.wait_s
        return Want(hint.bootstrap_room, hint.attempt, list(keys), sizes, wait_s, **more)  # type: ignore[arg-type]

    def _take(self, address: Address) -> TransferClient:
        """An idle connection, or a new one."""
        while True:
            with self._lock:
                idle = self._idle.get(address)
                client = idle.pop() if idle else None
            if client is None:
                break
            if client.is_open:
                return client
            client.close()
        self._drop_dead()
        options = self._options
        client = TransferClient(
            address,
            options.secret,
            self._packed,
            options.backends,
            verifies_shared=options.verifies_shared,
            memory=options.memory,
        )
        try:
            self._manifests[address] = msgspec.msgpack.decode(client.manifest, type=Manifest)
        except msgspec.DecodeError as error:
            client.close()
            raise TransferError(f"a malformed manifest: {error}") from error
        return client

    @contextmanager
    def _connected(self, address: Address) -> Iterator[TransferClient]:
        """A connection, which is kept for the next pull unless this one fails."""
        client = self._take(address)
        try:
            yield client
        except BaseException:
            client.close()
            raise
        with self._lock:
            self._idle.setdefault(address, []).append(client)


def _peers(hint: Hint) -> list[tuple[str, int]]:
    peers = [(hint.bootstrap_host, hint.bootstrap_port), *hint.alternatives]
    return [peer for peer in peers if peer[0] != FAKE_HOST]


def _differences(mine: Manifest, packed: bytes) -> list[str]:
    return mine.differences(msgspec.msgpack.decode(packed, type=Manifest))


@lru_cache(maxsize=64)
def _exchange(mine: Manifest, packed: bytes, space: int) -> Exchange:
    return Exchange(mine, msgspec.msgpack.decode(packed, type=Manifest), space)
