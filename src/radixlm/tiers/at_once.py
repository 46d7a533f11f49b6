"""Pages that the thread of the steps copies between the pools and memory of the host tier at once,
which is sooner done than another thread woken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from radixlm.tiers.base import Get, Lending, Pages, PageStore, Payload, Put, Rows, Tier, is_lending
from radixlm.tiers.keys import window_key

AT_ONCE_BYTES: Final = 64 << 20  # of a command; more would hold up the steps

Write = Callable[[int, Pages, Rows], bool]


def rows_at_once(
    command: Get | Put, tiers: Sequence[Tier], store: PageStore
) -> list[Payload] | None:
    """The rows of the first tier that have the pages of a Get, or are new for those of a Put that
    it lacks; None where another thread must move them."""
    if not tiers or not is_lending(tiers[0]) or not store.is_on_host:
        return None
    tier, full = tiers[0], store.nbytes(0)
    num_bytes = len(command.keys) * full + len(command.windows) * store.nbytes(1)
    if num_bytes > AT_ONCE_BYTES:
        return None
    if isinstance(command, Put):
        if command.windows or sum(one.takes_puts for one in tiers) != 1:
            return None
        missing = len(command.keys) - tier.contains(command.keys)
        rows = tier.new_rows(missing, full, is_put=True)
        return rows if len(rows) == missing else None
    if command.is_behind:
        return None
    keys = [*command.keys, *(window_key(command.keys[i]) for i in command.windows)]
    rows = tier.lend(keys)
    return rows if len(rows) == len(keys) and sum(map(len, rows)) == num_bytes else None


def get_at_once(command: Get, rows: Sequence[Payload], write: Write) -> int:
    """Copies ``rows`` to the pages of a command, by ``write`` of a space; how many came."""
    pages = np.frombuffer(command.pages, np.int32)
    is_done = write(0, pages, rows[: len(pages)])
    if command.windows:
        window_pages = np.frombuffer(command.window_pages, np.int32)
        is_done = is_done and write(1, window_pages, rows[len(pages) :])
    return len(pages) if is_done else 0


def put_at_once(command: Put, rows: Sequence[Payload], tier: Lending, store: PageStore) -> int:
    """Copies the last pages of a command to ``rows``, which the tier keeps; how many it has now."""
    known = len(command.keys) - len(rows)
    pages = np.frombuffer(command.pages, np.int32)
    store.read(0, pages[known:], rows, is_team=True)
    tier.keep(command.keys[known:], command.parents[known:], rows)
    return len(command.keys)
