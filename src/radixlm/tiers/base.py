"""Tiers: places below the KV pool that keep pages by key, and what the scheduler and the worker of
a rank (``worker.py``) say to each other about them.

A page of a window or of recurrent states is a record of its own, under ``tiers.keys.window_key``
of its full page's key: a tier need not know of page spaces. Payloads of the two kinds differ in
length (``Manifest.page_bytes``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeGuard, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixlm.base.record import Record
from radixlm.tiers.keys import NO_KEY
from radixlm.wire.transfer import Hint

Payload = NDArray[np.uint8]
Rows = Sequence[Payload]
Pages = NDArray[np.int32]
Int32Array = NDArray[np.int32]
TierName = Literal["host", "storage", "peer"]


class PageStore(Protocol):
    """What the worker asks of the pools (``pools/page_bytes.py``)."""

    @property
    def is_on_host(self) -> bool: ...
    def nbytes(self, space: int) -> int: ...
    def fence(self) -> Any: ...
    def read(
        self, space: int, pages: Pages, out: Rows, fence: Any = None, *, is_team: bool = False
    ) -> None: ...
    def write(
        self, space: int, pages: Pages, data: Rows, fence: Any = None, *, is_team: bool = False
    ) -> None: ...


class PageRecord(Record, eq=False):
    """One page to be kept. ``parent``: the key before, zeros at the start; of a page of a window or
    state, the key of its full page. ``tokens``: int32 [page_size]. ``payload``: uint8 [nbytes], the
    tier's to keep, unless it copies it. ``hint``: of the request that computed it."""

    key: bytes
    parent: bytes
    tokens: Int32Array
    payload: Payload
    space: int = 0
    hint: Hint | None = None


class Tier(Protocol):
    """Pages by key. Errors are misses, counted in ``stats``: no method raises for a fault of a
    disk, a store or a peer. Only ``contains`` may be called by any thread; the others are called by
    the worker's threads: of host and storage one call at a time, of peers several at once.

    ``takes_puts``: False of a tier that only gives (others call its ``put`` no more).
    ``has_index``: ``contains`` answers from memory, so that the scheduler may ask it itself."""

    name: TierName
    takes_puts: bool = True
    has_index: bool = False
    medium: str  # of KV events: "CPU_PINNED", "DISK", "EXTERNAL"

    def contains(self, keys: Sequence[bytes], hint: Hint | None = None) -> int:
        """How many leading ones of ``keys`` it has: from an index in memory, or by a deadline."""

    def get(self, keys: Sequence[bytes], out: Sequence[Payload], hint: Hint | None = None) -> int:
        """Fill ``out`` with the payloads of leading keys; how many were filled and verified. Bytes
        behind them may be garbage. A record of another length than ``out`` is a miss. Bounded by
        deadlines of its own."""

    def put(self, records: Sequence[PageRecord]) -> None:
        """Keep pages. Must not block for long, and may drop them."""

    def clear(self) -> None:
        """Forget all pages."""

    def stats(self) -> dict[str, float]:
        """Counters and gauges by name, for metrics."""

    def close(self) -> None:
        """Write what is due and give up threads, files and connections."""


class Lasting(Protocol):
    """A tier that outlives the server and knows which of its pages were used last. Any thread may
    call these."""

    def recent(self, count: int) -> list[bytes]:
        """Up to ``count`` keys of full or other pages that were kept or used last, the last one at
        the end."""

    def used(self, keys: Sequence[bytes]) -> None:
        """Pages of a prefix were used, here or in a faster place. Never waits."""


class Lending(Tier, Protocol):
    """A tier that has pages in memory as they came, which need not be copied twice. Any thread may
    call any of its methods."""

    def lend(self, keys: Sequence[bytes]) -> list[Payload]:
        """Leading pages, uint8 [nbytes] each, to be read only; fewer where one must be expanded."""

    def new_rows(self, count: int, nbytes: int, *, is_put: bool = False) -> list[Payload]:
        """Memory that was made ahead for so many payloads that it will be given; none if it has
        less. ``is_put``: all of them will be kept, so that others are evicted now."""

    def keep(self, keys: Sequence[bytes], parents: Sequence[bytes], rows: Rows) -> None:
        """``put`` pages that are in ``new_rows``."""


def is_lending(tier: Tier) -> TypeGuard[Lending]:
    return hasattr(tier, "lend")  # a tenth of the time that a protocol's check takes


def is_lasting(tier: Tier) -> TypeGuard[Lasting]:
    return hasattr(tier, "recent")


@runtime_checkable
class Rooms(Protocol):
    """The peer tier of a prefill server, which tells decode servers whether to wait. Any thread may
    call these."""

    def open_room(self, room: int) -> None: ...
    def close_room(self, room: int) -> None: ...


# ---- from the scheduler to the worker of each rank ---------------------------------------------


class Lookup(msgspec.Struct, tag="lookup", frozen=True):
    """Which leading pages of ``keys`` do the tiers have? Answered by Found."""

    job: int
    keys: list[bytes]
    hint: Hint | None = None


class Get(msgspec.Struct, tag="get", frozen=True):
    """Bring pages of ``keys`` into ``pages`` (int32, as bytes). ``windows``: indexes of keys whose
    window's or state's page must come too, into ``window_pages``. ``parent``: the key before the
    first; ``tokens``: of the pages, int32 as bytes. ``is_behind``: nobody waits for them yet.
    Answered by Arrived and Done."""

    job: int
    keys: list[bytes]
    pages: bytes
    windows: tuple[int, ...] = ()
    window_pages: bytes = b""
    hint: Hint | None = None
    parent: bytes = NO_KEY
    tokens: bytes = b""
    is_behind: bool = False


class Put(msgspec.Struct, tag="put", frozen=True):
    """Keep pages in the tiers; they stay locked until Done. ``tokens``: int32 [num * page_size] as
    bytes; ``windows`` as in Get."""

    job: int
    keys: list[bytes]
    parents: list[bytes]
    pages: bytes
    tokens: bytes
    windows: tuple[int, ...] = ()
    window_pages: bytes = b""
    hint: Hint | None = None


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """End a job as soon as can be; its Done or Found comes all the same."""

    job: int


class Used(msgspec.Struct, tag="used", frozen=True):
    """A prompt has used these pages. No answer."""

    job: int
    keys: list[bytes]


class Room(msgspec.Struct, tag="room", frozen=True):
    """A request whose pages a decode server asks for has come (``is_open``), or is over. No
    answer."""

    job: int
    room: int
    is_open: bool


class Admin(msgspec.Struct, tag="admin", frozen=True):
    """An operator's command: "clear", "stats", ...; answered by Told."""

    job: int
    verb: str
    args: dict[str, Any] = {}


Command = Lookup | Get | Put | Cancel | Used | Room | Admin
UNANSWERED = Cancel, Used, Room

# ---- from the worker -----------------------------------------------------------------------------


class Found(msgspec.Struct, tag="found", frozen=True):
    """``ends``: the numbers of pages at which a prefix may end, ascending: every one up to what is
    there, or those with the pages of a window or a state. ``tiers``: (tier, leading pages), in the
    order of the tiers."""

    job: int
    ends: list[int]
    tiers: list[tuple[str, int]] = []
    seconds: float = 0.0


class Arrived(msgspec.Struct, tag="arrived", frozen=True):
    """The first ``num_pages`` of a Get are in their pages; more will come."""

    job: int
    num_pages: int


class Done(msgspec.Struct, tag="done", frozen=True):
    """A Get or Put is over. ``num_pages``: leading ones that arrived, or all that were read.
    ``tiers``: (tier, pages, bytes, seconds) of each that gave some."""

    job: int
    num_pages: int
    tiers: list[tuple[str, int, int, float]] = []
    seconds: float = 0.0


class Told(msgspec.Struct, tag="told", frozen=True):
    """The answer to Admin; ``error``: why there is none."""

    job: int
    data: Any = None
    error: str = ""


Report = Found | Arrived | Done | Told


def failed(command: Command, error: Exception) -> Report:
    """The report of a job that failed: nothing was found, nothing came."""
    if isinstance(command, Lookup):
        return Found(command.job, [])
    if isinstance(command, Admin):
        return Told(command.job, error=f"{type(error).__name__}: {error}")
    return Done(command.job, 0)
