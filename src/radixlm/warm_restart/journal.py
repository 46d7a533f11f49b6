"""PageJournal: which pages of a kept pool hold which tokens, written as the radix tree changes.

One record a page, in arrays over memory that outlives the engine. A record has a checksum over its
fields, seeded with that of the page before it, which is written last and cleared first: so a record
that was being written at a kill is no record. The bytes of the page have a checksum too, seeded
with the record's and computed by a thread; until then the page is not found again. ``restore``
(journal_replay.py) puts into a new tree what is whole.
"""

from __future__ import annotations

import os
import queue
import threading
import zlib
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixlm.memory.pages import PageIds
from radixlm.memory.prefix.base import TokenIds
from radixlm.memory.prefix.namespace import CacheNamespace

NAMES_BYTES: Final = 1 << 20
NO_PARENT: Final = -1
ROOT: Final = 1  # the checksum before a first page
IS_KNOWN: Final = 1 << 32  # of a checksum of bytes
HEAD_BYTES: Final = 8  # of a name: length and CRC-32
NICE: Final = 10
STOP_S: Final = 5.0

Digests = Callable[[int, Sequence[int], Sequence[int]], list[int]]
"""(space, pages, seed of each) -> CRC-32 of each page's bytes."""


class PageJournal:
    """The journal of one prefix cache, which tells it of changes (``CacheEvents``).

    checksum uint32 [P], 0: no record; fields int32 [P, 3 + page_size]: page, parent page, place of
    the namespace in ``names``, tokens; window int32 [P]: the window page, 0 for none; digests
    int64 [2, P]: CRC-32 of the bytes of the page and of its window page, with IS_KNOWN.
    """

    def __init__(
        self, memory: NDArray[np.uint8], num_pages: int, page_size: int, digests_of: Digests
    ) -> None:
        """``memory``: uint8 [num_bytes(num_pages, page_size)], zeros where nothing was written."""
        self.page_size, self.digests_of = page_size, digests_of
        ends = np.cumsum(_sizes(num_pages, page_size))
        digests, checksum, fields, window, names = np.split(memory, ends[:-1].tolist())
        self.digests = digests.view(np.int64).reshape(2, num_pages)
        self.checksum, self.window = checksum.view(np.uint32), window.view(np.int32)
        self.fields = fields.view(np.int32).reshape(num_pages, 3 + page_size)
        self.names = names
        self.places: dict[CacheNamespace, int] = {}
        self.names_end = 0
        self._num_due = self._num_done = 0  # each counted by one thread
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="page journal", daemon=True)
        self._thread.start()

    @staticmethod
    def num_bytes(num_pages: int, page_size: int) -> int:
        """Bytes of the journal of a pool of so many pages, page 0 counted."""
        return sum(_sizes(num_pages, page_size))

    def close(self) -> None:
        """Finish the checksums that are due, for some seconds at most."""
        self._jobs.put(None)
        self._thread.join(STOP_S)

    def settle(self, wait_s: float) -> bool:
        """Wait for the checksums of all pages so far; False if that takes longer."""
        done = threading.Event()
        self._jobs.put(done.set)
        return done.wait(wait_s)

    @property
    def num_pending(self) -> int:
        """Checksums that are due: a kill now would lose their pages."""
        return self._num_due - self._num_done

    # ---- changes of the tree, on the scheduler's thread --------------------------------------

    def on_store(
        self, pages: PageIds, token_ids: TokenIds, parent_page: int | None, namespace: Hashable
    ) -> None:
        place = self._place_of(namespace) if len(token_ids) >= self.page_size else None
        above = ROOT if parent_page is None else int(self.checksum[parent_page])
        if place is None or not above:  # a tail, or a prefix that has no record
            return
        self.checksum[pages] = 0
        self.digests[0, pages] = 0
        fields = np.empty((len(pages), self.fields.shape[1]), np.int32)
        fields[:, 0], fields[1:, 1], fields[:, 2] = pages, pages[:-1], place
        fields[0, 1] = NO_PARENT if parent_page is None else parent_page
        fields[:, 3:] = token_ids.reshape(len(pages), self.page_size)
        self.fields[pages] = fields
        for page, record in zip(pages.tolist(), fields, strict=True):
            self.checksum[page] = above = zlib.crc32(record.data, above) or ROOT
        self._later(0, pages)
        if self.window[pages].any():
            self._later(1, pages)

    def on_remove(self, pages: PageIds) -> None:
        self.checksum[pages] = 0

    def on_reset(self) -> None:
        self.checksum[:] = 0
        self.window[:] = 0
        self.places, self.names_end = {}, 0

    def on_window(self, pages: PageIds, window_pages: PageIds | None) -> None:
        """The window pages of ``pages`` are these, or none any more."""
        self.digests[1, pages] = 0
        self.window[pages] = 0 if window_pages is None else window_pages
        if window_pages is not None:
            self._later(1, pages)

    def _place_of(self, namespace: Hashable) -> int | None:
        """Where the namespace stands in ``names``; None if there is no room."""
        namespace = CacheNamespace() if namespace is None else namespace
        assert isinstance(namespace, CacheNamespace)
        place = self.places.get(namespace)
        if place is None:
            data = msgspec.msgpack.encode(namespace)
            head = len(data).to_bytes(4, "little") + zlib.crc32(data).to_bytes(4, "little")
            place, end = self.names_end, self.names_end + HEAD_BYTES + len(data)
            if end > len(self.names):
                return None
            self.names[place:end] = np.frombuffer(head + data, np.uint8)
            self.places[namespace], self.names_end = place, end
        return place

    # ---- checksums of bytes, in the journal's thread -----------------------------------------

    def _later(self, space: int, pages: PageIds) -> None:
        self._num_due += len(pages)
        self._jobs.put(partial(self._compute, space, pages.tolist()))

    def _run(self) -> None:
        if hasattr(os, "setpriority"):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while (job := self._jobs.get()) is not None:
            job()

    def _compute(self, space: int, pages: list[int]) -> None:
        """A page that is replaced meanwhile gets a checksum that its bytes do not have."""
        found = [
            (page, int(self.window[page]) if space else page, int(self.checksum[page]))
            for page in pages
        ]
        found = [one for one in found if all(one[1:])]
        digests = self.digests_of(space, [one[1] for one in found], [one[2] for one in found])
        for (page, _, seed), digest in zip(found, digests, strict=True):
            if int(self.checksum[page]) == seed:
                self.digests[space, page] = digest | IS_KNOWN
        self._num_done += len(pages)


def _sizes(num_pages: int, page_size: int) -> list[int]:
    """Bytes of digests, checksum, fields, window, names."""
    return [16 * num_pages, 4 * num_pages, 4 * num_pages * (3 + page_size), 4 * num_pages,
            NAMES_BYTES]  # fmt: skip
