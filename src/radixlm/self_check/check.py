"""Invariants of the KV cache: Each page and each slot has exactly one owner, each lock a request.

    pages  = page 0 + free + owned by the prefix cache + a request's own
    slots  = free + running
    locks  = what the running requests hold

Meant for idle moments and tests: cost grows with the pools.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np

from radixlm.base.record import Record
from radixlm.memory.pages import CACHED, HELD, NULL_PAGE, PageAllocator, PageIds
from radixlm.memory.prefix.base import Handle, PrefixCache
from radixlm.memory.slots import SlotAllocator
from radixlm.self_check.audit import Audit, audit

_MAX_NAMED: Final = 8


class Holding(NamedTuple):
    """What one running request has; a plain tuple of the first three will do.

    pages: its page table, or only its own part of it: pages on the path of ``handle`` are known to
        be the cache's. handle: the prefix it has locked (once), or None.
    window_pages: the same of the window group, null entries skipped.
    is_window_locked: False after ``unlock_window``.
    slot: -1 of pages and locks that no request has (``scheduler/reservations.py``).
    """

    slot: int
    pages: PageIds
    handle: Handle | None
    window_pages: PageIds | None = None
    is_window_locked: bool = True


Running = Iterable[Holding | tuple[int, PageIds, Handle | None]]


class Repair(Record):
    """What ``repair`` found, what it got back, and what it could not mend.

    num_pages, num_slots: leaked ones that are free again (of all groups).
    remaining: violations that only the end of a request can mend (two owners of one page).
    """

    violations: list[str]
    num_pages: int
    num_slots: int
    remaining: list[str]


def check(
    allocator: PageAllocator,
    slots: SlotAllocator,
    cache: PrefixCache,
    running: Running,
    window_allocator: PageAllocator | None = None,
) -> list[str]:
    """Violations, each with both numbers; an empty list if all is well. Changes nothing."""
    holdings = [Holding(*entry) for entry in running]
    found = audit(cache, [(h.handle, h.is_window_locked) for h in holdings])
    violations = _check_slots(slots, holdings) + found.violations
    for group in _groups(allocator, window_allocator, found, holdings):
        violations += _check_group(group)
    return violations


def repair(
    allocator: PageAllocator,
    slots: SlotAllocator,
    cache: PrefixCache,
    running: Running,
    window_allocator: PageAllocator | None = None,
) -> Repair:
    """Sets locks, free lists and slots to what the tree and the running requests really have.

    A page with two owners stays with both and is never free; it is named in ``remaining``.
    """
    holdings = [Holding(*entry) for entry in running]
    violations = check(allocator, slots, cache, holdings, window_allocator)
    if not violations:
        return Repair([], 0, 0, [])
    locks = [(h.handle, h.is_window_locked) for h in holdings]
    found = audit(cache, locks, is_repair=True)
    num_pages = 0
    for group in _groups(allocator, window_allocator, found, holdings):
        num_free = group.allocator.num_free
        cached = np.unique(_in_pool(group.allocator, group.cached))
        held = np.unique(_in_pool(group.allocator, _concatenate([pages for _, pages in group.own])))
        group.allocator.rebuild(held=np.setdiff1d(held, cached), cached=cached)
        num_pages += max(0, group.allocator.num_free - num_free)
    num_slots = slots.num_free
    all_slots = range(slots.first, slots.first + slots.num_total)
    slots.rebuild(h.slot for h in holdings if h.slot in all_slots)
    num_slots = max(0, slots.num_free - num_slots)
    remaining = check(allocator, slots, cache, holdings, window_allocator)
    return Repair(violations, num_pages, num_slots, remaining)


class _Group(NamedTuple):
    """One page group: the cache's pages, and (slot, pages) of what requests have of their own."""

    name: str
    allocator: PageAllocator
    cached: PageIds
    own: list[tuple[int, PageIds]]


def _groups(
    allocator: PageAllocator,
    window_allocator: PageAllocator | None,
    found: Audit,
    holdings: list[Holding],
) -> list[_Group]:
    """The page groups with their owners; what a request has locked is not its own."""
    own = [
        (h.slot, np.setdiff1d(h.pages, path, assume_unique=True))
        for h, path in zip(holdings, found.paths, strict=True)
    ]
    groups = [_Group("full", allocator, found.pages, own)]
    if window_allocator is not None:
        own = [
            (h.slot, np.setdiff1d(row[row != NULL_PAGE], path, assume_unique=True))
            for h, path in zip(holdings, found.window_paths, strict=True)
            if (row := h.window_pages) is not None
        ]
        groups.append(_Group("window", window_allocator, found.window_pages, own))
    return groups


def _concatenate(parts: list[PageIds]) -> PageIds:
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _in_pool(allocator: PageAllocator, pages: PageIds) -> PageIds:
    """Those of ``pages`` that can be given out at all."""
    return pages[(pages > NULL_PAGE) & (pages < allocator.num_pages)]


def _check_slots(slots: SlotAllocator, holdings: list[Holding]) -> list[str]:
    """Each running request has a slot of its own, and no other slot is in use."""
    running = Counter(h.slot for h in holdings if h.slot >= 0)
    used = set(slots.used())
    violations = [
        f"slot {slot} has {count} running requests" for slot, count in running.items() if count > 1
    ]
    if lost := sorted(used - running.keys()):
        violations.append(
            f"{len(used)} slots in use, {len(running)} running: {len(lost)} leaked, first {lost[0]}"
        )
    if alien := sorted(running.keys() - used):
        violations.append(
            f"{len(alien)} of {len(running)} running requests have a free slot, first {alien[0]}"
        )
    return violations


def _check_group(group: _Group) -> list[str]:
    """Each page has one owner, and the allocator knows which."""
    name, allocator = group.name, group.allocator
    violations: list[str] = []
    owned = [("the prefix cache", group.cached), *((_owner(s), p) for s, p in group.own)]
    valid = [_in_pool(allocator, pages) for _, pages in owned]
    for (owner, pages), inside in zip(owned, valid, strict=True):
        if len(inside) != len(pages):
            violations.append(
                f"{name}: {len(pages) - len(inside)} of {len(pages)} pages of {owner} are not in "
                f"the pool of {allocator.num_pages}"
            )
    num_owners = np.bincount(_concatenate(valid), minlength=allocator.num_pages)
    shared = np.flatnonzero(num_owners > 1).tolist()
    for page in shared[:_MAX_NAMED]:
        names = [owner for owner, pages in owned for _ in range(int((pages == page).sum()))]
        violations.append(f"{name}: page {page} has {len(names)} owners: {', '.join(names)}")
    if len(shared) > _MAX_NAMED:
        violations.append(f"{name}: {len(shared)} pages have several owners")
    held = _in_pool(allocator, _concatenate([pages for _, pages in group.own]))
    violations += _compare(name, "owned by the cache", allocator.pages_in(CACHED), group.cached)
    violations += _compare(name, "held by requests", allocator.pages_in(HELD), held)
    return violations + [f"{name}: {violation}" for violation in allocator.audit()]


def _owner(slot: int) -> str:
    return f"slot {slot}" if slot >= 0 else "an arrival"


def _compare(name: str, what: str, booked: PageIds, found: PageIds) -> list[str]:
    """What the allocator has booked in one state against what was found there."""
    leaked, missing = np.setdiff1d(booked, found), np.setdiff1d(found, booked)
    if not len(leaked) and not len(missing):
        return []
    return [
        f"{name}: the allocator has {len(booked)} pages {what}, {len(np.unique(found))} are: "
        f"{len(leaked)} leaked {leaked[:3].tolist()}, {len(missing)} not booked "
        f"{missing[:3].tolist()}"
    ]
