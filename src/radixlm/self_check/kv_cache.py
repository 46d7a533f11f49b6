"""SelfCheck: the invariants of a KV cache manager, checked while nothing runs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import numpy as np

from radixlm.memory.pages import PageAllocator
from radixlm.scheduler.control import Commands, ControlHandler
from radixlm.scheduler.kv_cache_manager import KVCacheManager
from radixlm.scheduler.request import Request
from radixlm.self_check import check
from radixlm.self_check.check import Holding

log = logging.getLogger(__name__)

_NO_SLOT = -1


class SelfCheck(Commands):
    """Logs, counts and repairs violations of pages and slots."""

    def __init__(self, handler: ControlHandler) -> None:
        self._handler = handler

    def idle(self) -> None:
        scheduler = self._handler.scheduler
        kv_manager, running = scheduler.kv_manager, scheduler.planner.running
        violations = find_violations(kv_manager, running)
        if not violations:
            return
        self._handler.num_breaches += len(violations)
        for violation in violations:
            log.error("KV cache manager: %s", violation)
        repair(kv_manager, running)


def find_violations(kv_manager: KVCacheManager, running: Iterable[Request] = ()) -> list[str]:
    """Invariant violations in words; empty if each page and each slot has one owner."""
    found: list[str] = []
    for part, own in _parts(kv_manager, running):
        found += check.check(part.pages, part.slots, part.prefix_cache, own, _second(part))
    return found


def repair(kv_manager: KVCacheManager, running: Iterable[Request] = ()) -> None:
    """Free what nobody owns."""
    for part, own in _parts(kv_manager, running):
        check.repair(part.pages, part.slots, part.prefix_cache, own, _second(part))


def _parts(
    kv_manager: KVCacheManager, running: Iterable[Request]
) -> Iterator[tuple[KVCacheManager, list[Holding]]]:
    """The managers with pages of their own, and what is held of each."""
    requests = list(running)
    for part in kv_manager.parts:
        slots = range(part.slots.first, part.slots.first + part.slots.num_total)
        own = [_holding(part, request) for request in requests if request.slot in slots]
        yield part, [*own, *_reserved(part), *_forks(part)]


def _second(part: KVCacheManager) -> PageAllocator | None:
    """The second page space."""
    return part.window.pages if part.window is not None else None


def _holding(part: KVCacheManager, request: Request) -> Holding:
    """What a running request has of its own, and the prefix that it has locked."""
    own = slice(request.num_inserted // part.page_size, request.num_allocated // part.page_size)
    row = None
    if part.window is not None:
        saved = part.drafts.saved.get(request.slot, np.empty(0, np.int32))
        row = np.append(request.window[own], saved)
    return Holding(request.slot, request.pages[own], request.handle, row, request.is_window_locked)


def _reserved(part: KVCacheManager) -> Iterator[Holding]:
    """Pages that are on their way, and the prefixes that they go on from."""
    held, none = part.reservations, np.empty(0, np.int32)
    for handle in held.pins:
        yield Holding(_NO_SLOT, none, handle, none)
    pages, row = (np.array(list(some), np.int32) for some in (held.reserved, held.window_reserved))
    yield Holding(_NO_SLOT, pages, None, row)


def _forks(part: KVCacheManager) -> Iterator[Holding]:
    """The pages of further paths of drafts."""
    for fork in part.drafts.forks.values():
        full, *window = fork.pages
        yield Holding(_NO_SLOT, full, None, window[0] if window else np.empty(0, np.int32))
