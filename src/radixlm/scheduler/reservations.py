"""Reservations: pages and locks that no running request has."""

from __future__ import annotations

from radixlm.memory.prefix.base import Handle


class Reservations:
    """Of one KVCacheManager: here none. The feature that brings pages puts its own in the place.

    num_pages                  pages of the full table that are on their way
    num_spare                  pages that came before anyone asked: whoever needs room gets theirs
    is_closed                  the pool's memory is released: nothing may be reserved
    reserved, window_reserved  all of these pages
    pins                       prefixes that are locked
    """

    def __init__(self) -> None:
        self.is_closed = False
        self.reserved: dict[int, None] = {}
        self.window_reserved: dict[int, None] = {}
        self.pins: list[Handle] = []

    @property
    def num_pages(self) -> int:
        return 0

    @property
    def num_spare(self) -> int:
        return 0

    def free_spare(self, most: int) -> int:
        """Free up to ``most`` spare pages; how many."""
        return 0
