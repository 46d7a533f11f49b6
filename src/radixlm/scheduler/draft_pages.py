"""DraftPages: pages that a step with drafts takes besides those of its requests."""

from __future__ import annotations

from typing import NamedTuple

from radixlm.scheduler.request import Request
from radixlm.scheduler.slot_table import Int64Array
from radixlm.step.plan import Int32Array


class Fork(NamedTuple):
    """Pages of a further path of drafts, for the columns from ``first`` on, of each page space."""

    first: int
    pages: tuple[Int32Array, ...]


class DraftPages:
    """Of one KVCacheManager: here none. ``speculative`` puts its own in the place.

    forks  pages of further paths of drafts, by row of the page tables
    saved  copies of the states from before a step that verifies drafts, by slot
    """

    def __init__(self) -> None:
        self.forks: dict[int, Fork] = {}
        self.saved: dict[int, Int32Array] = {}

    def adopt(self, request: Request, page_row: int, num_tokens: int) -> None:
        """A path of drafts was right: the request goes on in its pages, up to ``num_tokens``."""

    def free_forks(self) -> None:
        """The step with further paths of drafts is over."""

    def restore_state(self, request: Request, start: int) -> None:
        """Put the state after ``start`` tokens back, where the step has written over it."""

    def free_saved(self, slots: Int64Array) -> None:
        """Free the saved states of these slots, whose step can be undone no more."""
