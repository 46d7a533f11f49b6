"""The host tier: pages in RAM by key, within a budget of bytes.

A page is kept as it came until the budget is half full; then a thread compresses the oldest ones
when the engine is idle, and else with 0.5 % of the CPU: a prefill pays only for the copy.
Evicted is by second chance: the oldest page that was not read since it last came to the end of the
queue.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final, Protocol

import numpy as np

from radixlm.tiers.background import LOW_PRIORITY, Background, make_expanders
from radixlm.tiers.base import PageRecord, Payload, Rows, TierName
from radixlm.tiers.codec import RAW, Codec
from radixlm.tiers.row_memory import RowMemory
from radixlm.wire.transfer import Hint

_PACK_ABOVE: Final = 0.5  # of the budget
_SPARE: Final = 1 / 16  # of the budget: memory of pages that left, besides, for the next ones
_CLOSE_S: Final = 5.0


class Packed:
    """A page, encoded. ``flags``: of the codec; ``blob``: the payload itself where they are RAW."""

    __slots__ = ("blob", "flags", "is_hot", "key", "parent", "raw_bytes")

    def __init__(
        self, key: bytes, parent: bytes, raw_bytes: int, flags: int, blob: bytes | Payload
    ) -> None:
        self.key, self.parent, self.raw_bytes = key, parent, raw_bytes
        self.flags, self.blob, self.is_hot = flags, blob, False


class Below(Protocol):
    """The tier that takes what the host tier evicts."""

    def put_packed(self, pages: Sequence[Packed]) -> None:
        """Keep those pages that it lacks; must not block for long, and may drop them."""


class HostTier:
    """``budget_bytes``: of payloads, as they are kept. ``below``: None, evicted pages are lost.
    ``rows``: memory for payloads of its length, which is made while the engine is idle."""

    name: TierName = "host"
    medium = "CPU_PINNED"
    takes_puts = has_index = True

    def __init__(
        self,
        budget_bytes: int,
        codec: Codec,
        below: Below | None = None,
        rows: RowMemory | None = None,
    ) -> None:
        self._budget_bytes, self._codec, self.below = budget_bytes, codec, below
        self._rows, self._maker = rows, Background("radixlm-tier-rows", LOW_PRIORITY)
        if rows is not None:
            self._maker.submit(lambda: rows.make(self._maker.rest))
        self._pages: OrderedDict[bytes, Packed] = OrderedDict()
        self._raw: dict[bytes, None] = {}  # keys that are not compressed yet, oldest first
        self._num_bytes = self._num_evicted = self._num_dropped = 0
        self._lock = threading.Lock()
        self._packer = Background("radixlm-tier-pack", LOW_PRIORITY, max_waiting=2)
        self._is_packing = False
        self._expanders = make_expanders()

    def contains(self, keys: Sequence[bytes], hint: Hint | None = None) -> int:
        count = 0
        for key in keys:
            if key not in self._pages:
                break
            count += 1
        return count

    def get(self, keys: Sequence[bytes], out: Sequence[Payload], hint: Hint | None = None) -> int:
        checks: list[bool | Future[bool]] = []
        for key, target in zip(keys, out, strict=True):
            page = self._pages.get(key)
            if page is None or page.raw_bytes != len(target):
                break
            with self._lock:
                page.is_hot, flags, blob = True, page.flags, page.blob
            if flags == RAW:
                checks.append(self._codec.decode(flags, blob, target))
            else:
                checks.append(self._expanders.submit(self._codec.decode, flags, blob, target))
        whole = [check if isinstance(check, bool) else check.result() for check in checks]
        return whole.index(False) if False in whole else len(whole)

    def lend(self, keys: Sequence[bytes]) -> list[Payload]:
        lent: list[Payload] = []
        with self._lock:
            for key in keys:
                page = self._pages.get(key)
                if page is None or page.flags != RAW or isinstance(page.blob, bytes):
                    break
                page.is_hot = True
                lent.append(page.blob)
        return lent

    def new_rows(self, count: int, nbytes: int, *, is_put: bool = False) -> list[Payload]:
        rows, evicted = self._rows, list[Packed]()
        if rows is None or rows.row_bytes != nbytes:
            return []
        if is_put:
            with self._lock:
                self._make_room(min(count * nbytes, self._budget_bytes), evicted)
            self._sink(evicted)
            evicted.clear()  # then their rows are free
        return rows.take(count)

    def keep(self, keys: Sequence[bytes], parents: Sequence[bytes], rows: Rows) -> None:
        self._insert(
            [
                Packed(key, parent, len(row), RAW, row)
                for key, parent, row in zip(keys, parents, rows, strict=True)
            ]
        )

    def put(self, records: Sequence[PageRecord]) -> None:
        pages = []
        for record in records:
            payload = record.payload
            # a row of a larger array would keep all of it
            payload = payload.copy() if isinstance(payload.base, np.ndarray) else payload
            pages.append(Packed(record.key, record.parent, len(payload), RAW, payload))
        self._insert(pages)

    def _insert(self, pages: Sequence[Packed]) -> None:
        evicted: list[Packed] = []
        with self._lock:
            for page in pages:
                if (known := self._pages.get(page.key)) is not None:
                    known.is_hot = True
                elif len(page.blob) > self._budget_bytes:
                    self._num_dropped += 1
                else:
                    self._make_room(len(page.blob), evicted)
                    self._pages[page.key] = page
                    self._raw[page.key] = None
                    self._num_bytes += len(page.blob)
            self._trim_rows()
            wants_packing = self._wants_packing and not self._is_packing
            self._is_packing = self._is_packing or wants_packing
        if wants_packing and not self._packer.submit(self._pack):
            self._is_packing = False
        self._sink(evicted)

    def _sink(self, evicted: Sequence[Packed]) -> None:
        if evicted and self.below is not None:
            self.below.put_packed(evicted)

    @property
    def _wants_packing(self) -> bool:
        return bool(self._raw) and self._num_bytes > _PACK_ABOVE * self._budget_bytes

    def _make_room(self, num_bytes: int, evicted: list[Packed]) -> None:
        while self._num_bytes + num_bytes > self._budget_bytes:
            page = next(iter(self._pages.values()))
            if page.is_hot:
                page.is_hot = False
                self._pages.move_to_end(page.key)
                continue
            del self._pages[page.key]
            self._raw.pop(page.key, None)
            self._num_bytes -= len(page.blob)
            self._num_evicted += 1
            evicted.append(page)

    def _trim_rows(self) -> None:
        """Pages and unused memory for pages stay within the budget together."""
        if self._rows is not None:
            left = self._budget_bytes * (1 + _SPARE) - self._num_bytes
            self._rows.trim(int(self._rows.num_bytes - left))

    def _pack(self) -> None:
        """Compress the oldest pages while more than half of the budget is used."""
        while True:
            with self._lock:
                if not self._wants_packing:
                    self._is_packing = False
                    return
                page = self._pages[next(iter(self._raw))]
            payload = page.blob
            assert not isinstance(payload, bytes)
            try:
                flags, blob = self._codec.encode(payload)
            except BaseException:
                self._is_packing = False  # the next page starts it again
                raise
            self.adopt(page.key, flags, blob)
            self._packer.rest()

    def offer(self, key: bytes, flags: int, blob: bytes | Payload) -> None:
        """Another tier has compressed a page: kept so where the budget is more than half full."""
        if self._wants_packing:
            self.adopt(key, flags, blob)

    def adopt(self, key: bytes, flags: int, blob: bytes | Payload) -> None:
        """Keep ``blob``, which encodes the page ``key``, instead of its raw payload."""
        with self._lock:
            page = self._pages.get(key)
            if page is None or key not in self._raw:
                return
            del self._raw[key]
            self._num_bytes += len(blob) - len(page.blob)
            page.flags, page.blob = flags, blob
            self._trim_rows()

    def clear(self) -> None:
        with self._lock:
            self._pages.clear()
            self._raw.clear()
            self._num_bytes = 0

    def stats(self) -> dict[str, float]:
        with self._lock:
            return {
                "pages": len(self._pages),
                "bytes": self._num_bytes,
                "budget_bytes": self._budget_bytes,
                "evicted_pages": self._num_evicted,
                "dropped_pages": self._num_dropped,
            }

    def close(self) -> None:
        self.clear()
        self._maker.close(_CLOSE_S)
        self._packer.close(_CLOSE_S)
        self._expanders.shutdown(wait=False)
