"""Request: what scheduling needs to know of one sequence, and nothing of any feature.

             prompt_len        num_known
ids  |---- prompt ----|-- output --|
     |--- cached ---|--- computed ---|        computed counts steps in flight,
                                              done only the committed ones
"""

from __future__ import annotations

import numpy as np

from radixlm.memory.prefix.base import Handle
from radixlm.step.plan import Ids
from radixlm.wire.replies import Finish
from radixlm.wire.requests import TokenizedRequest


class Request:
    """One sequence from arrival to release. Owned and mutated by the scheduler alone."""

    __slots__ = (
        "_ids",
        "base",
        "computed",
        "done",
        "finish",
        "fresh",
        "full_at",
        "handle",
        "inflight",
        "inserted",
        "interval",
        "is_window_locked",
        "key",
        "max_new",
        "min_new",
        "num_cached",
        "num_known",
        "num_pages",
        "num_planned",
        "pages",
        "prompt_len",
        "queued_s",
        "retractions",
        "rid",
        "share_limit",
        "slot",
        "started_s",
        "stop_ids",
        "window",
        "wire",
    )

    def __init__(
        self,
        wire: TokenizedRequest,
        stop_ids: frozenset[int],
        key: str | None,
        share_limit: int = 1 << 62,
    ) -> None:
        ids = wire.ids()
        self.wire, self.rid, self.stop_ids, self.key = wire, wire.rid, stop_ids, key
        self.max_new = wire.sampling.max_new_tokens or 0
        self.min_new = wire.sampling.min_new_tokens
        self.full_at = 0  # number of known tokens at which it ends, set on arrival
        self._ids = np.array(ids, dtype=np.int32)
        self.num_known = len(ids)
        self.prompt_len = len(ids) - wire.num_emitted
        self.base = len(ids)  # tokens to compute before the next new one
        self.computed = 0
        self.done = 0
        self.num_planned = wire.num_emitted  # output tokens, those in flight included
        self.num_cached = 0
        self.share_limit = share_limit  # tokens from here on are never put into the tree
        self.inserted = 0  # tokens that the prefix tree holds for this request
        self.slot = -1
        self.pages: Ids = np.zeros(0, np.int32)
        self.window: Ids = np.zeros(0, np.int32)  # pages of the window layers, 0 where passed
        self.is_window_locked = True
        self.num_pages = 0
        self.handle: Handle | None = None
        self.inflight = 0
        self.finish: Finish | None = None
        self.retractions = 0
        self.fresh: list[int] = []  # output tokens not yet sent to intake
        self.interval = 1  # tokens between two deltas
        self.queued_s = wire.arrival_s
        self.started_s = 0.0

    @property
    def ids(self) -> Ids:
        """All known tokens (a view)."""
        return self._ids[: self.num_known]

    @property
    def output_ids(self) -> Ids:
        return self._ids[self.prompt_len : self.num_known]

    @property
    def num_output(self) -> int:
        return self.num_known - self.prompt_len

    @property
    def is_prefilling(self) -> bool:
        return self.computed < self.base

    @property
    def is_waiting(self) -> bool:
        return self.slot < 0

    def append(self, token: int) -> None:
        """One more known token; the buffer doubles when full."""
        if self.num_known == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros(max(64, len(self._ids)), np.int32)))
        self._ids[self.num_known] = token
        self.num_known += 1
        self.fresh.append(token)

    def add_pages(self, new: Ids, window: Ids | None = None) -> None:
        """Pages that follow those held; ``window``: of the window layers' space, as many."""
        need = self.num_pages + len(new)
        if need > len(self.pages):
            room = max(need, 2 * len(self.pages), 8)
            self.pages = _grown(self.pages, self.num_pages, room)
            self.window = _grown(self.window, self.num_pages, room)
        self.pages[self.num_pages : need] = new
        if window is not None:
            self.window[self.num_pages : need] = window
        self.num_pages = need

    def back_to_queue(self) -> None:
        """Forget what was computed; all known tokens will be computed again."""
        self.base, self.computed, self.done, self.inserted = self.num_known, 0, 0, 0
        self.num_planned = self.num_output
        self.num_cached = 0
        self.slot, self.num_pages, self.handle = -1, 0, None
        self.retractions += 1


def _grown(row: Ids, used: int, size: int) -> Ids:
    room = np.zeros(size, np.int32)
    room[:used] = row[:used]
    return room
