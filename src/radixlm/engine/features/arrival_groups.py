"""Where pages can come to: the KV cache of an engine, or of a group of data-parallel attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from radixlm.engine.features.arrival_rules import ArrivalOptions
from radixlm.engine.features.page_puts import PagePuts, WritePolicy
from radixlm.engine.features.preload import Preload
from radixlm.engine.features.reserved_pages import ReservedPages
from radixlm.memory.prefix.base import Handle, TokenIds
from radixlm.memory.prefix.namespace import CacheNamespace
from radixlm.scheduler.kv_cache_manager import KVCacheManager
from radixlm.scheduler.request import Request
from radixlm.step.plan import Int32Array
from radixlm.tiers.base import Command, Get, Report


class PagePort(Protocol):
    """The workers of the ranks that share a KV cache."""

    def send(self, command: Command) -> None:
        """Never waits."""

    def poll(self) -> list[Report]:
        """What has come since the last call: the minimum of all ranks' answers."""

    def settle(self, timeout_s: float) -> list[Report]:
        """Wait until no command is under way; what has come meanwhile."""


class ArrivalGroup:
    """A KV cache, the workers that move its pages, and what goes on between them. ``number``: of
    the group."""

    def __init__(
        self,
        number: int,
        kv_manager: KVCacheManager,
        port: PagePort,
        options: ArrivalOptions,
        write_policy: WritePolicy,
        next_job: Callable[[], int],
        seed_of: Callable[[CacheNamespace], bytes],
        counts: Counter[str],
    ) -> None:
        """``seed_of``: the seed of a namespace's keys; ``counts``: for metrics."""
        self.number, self.kv, self.port = number, kv_manager, port
        self.reservations = ReservedPages(kv_manager)
        reserved = kv_manager, self.reservations
        self.puts = PagePuts(*reserved, options, write_policy, port.send, next_job, seed_of, counts)
        max_pages = options.preload_bytes // max(1, options.page_bytes[0])
        self.preload = Preload(*reserved, max_pages, port.send, next_job, counts)

    def num_there(self, ids: TokenIds, keys: Sequence[bytes], namespace: CacheNamespace) -> int:
        """Leading pages of a prompt that are cached, or came before it and wait to be claimed."""
        cached = self.kv.prefix_cache.peek(ids, namespace) // self.kv.page_size
        return cached + self.reservations.count_spare(keys[cached:])

    def drop_spare(self) -> None:
        """Free the pages that nobody has claimed."""
        self.reservations.free_spare(self.reservations.num_spare)


def pages_of_prompts(kv_manager: KVCacheManager) -> int:
    """Pages that the prompts of running requests still need."""
    table, slots = kv_manager.table, kv_manager.slots.used()
    missing = np.maximum(table.prefill_len[slots] - table.num_allocated[slots], 0)
    return kv_manager.pages_for(int(missing.sum()))


class ArrivalJob:
    """A Get and what is reserved for it: ``pages`` behind ``base``, the prefix that ``handle``
    locks, and ``row`` of the second space. ``ids``: the tokens of all of these pages."""

    def __init__(
        self,
        group: ArrivalGroup,
        request: Request,
        get: Get,
        base: Int32Array,
        handle: Handle,
        reserved: tuple[Int32Array, Int32Array],
    ) -> None:
        self.group, self.get = group, get
        self.rid, self.namespace = request.rid, request.namespace
        self.base, self.handle, (self.pages, self.row) = base, handle, reserved
        page_size = len(get.tokens) // (4 * len(self.pages))
        self.ids = request.ids[: (len(base) + len(self.pages)) * page_size].copy()
        self.num_arrived = 0
        self.is_taken = False  # the cache has what had arrived: the rest is of no use
