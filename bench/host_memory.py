"""Speed of the radix tree and the page allocator: `python bench/host_memory.py [--json]`.

Figures, each the median of several rounds on trees of their own, with the goal beside it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from radixlm.memory.pages import PageAllocator
from radixlm.memory.prefix.base import TokenIds
from radixlm.memory.prefix.evict import POLICIES
from radixlm.memory.prefix.radix import RadixCache
from radixlm.tiers.base import PageRecord
from radixlm.tiers.codec import Codec
from radixlm.tiers.host import HostTier
from radixlm.tiers.keys import NO_KEY, extend_keys, page_keys

_VOCAB_SIZE = 150_000


@dataclass(frozen=True, slots=True)
class Figure:
    """One duration: median and worst of the rounds, and the goal.

    `cpu_ms` is the median CPU time of the thread. If it is far below `median_ms`, other processes
    ran on this machine.
    """

    name: str
    median_ms: float
    worst_ms: float
    cpu_ms: float
    goal_ms: float

    @property
    def is_met(self) -> bool:
        """Whether the median reaches the goal."""
        return self.median_ms <= self.goal_ms


class Stopwatch:
    """A context manager that sums up wall and CPU time in milliseconds."""

    def __init__(self) -> None:
        self.wall_ms = 0.0
        self.cpu_ms = 0.0

    def __enter__(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.wall_ms += (time.perf_counter() - self._wall_s) * 1e3
        self.cpu_ms += (time.thread_time() - self._cpu_s) * 1e3


def long_prompt(watch: Stopwatch, page_size: int, eviction: str, num_tokens: int = 100_000) -> int:
    """Time match and insert of a prompt whose first half is cached; 1 operation."""
    pool, cache = _new(num_tokens * 2, page_size, eviction)
    ids = _tokens(num_tokens, seed=1)
    half = ids[: num_tokens // 2]
    cache.insert(half, _take(pool, half))
    with watch:
        match = cache.match(ids)
        cache.lock(match.handle)
        fresh = pool.alloc((num_tokens - match.num_tokens) // page_size)
        assert fresh is not None
        result = cache.insert(ids, np.concatenate([match.pages, fresh]))
        cache.unlock(match.handle)
    assert result.num_cached_pages == num_tokens // page_size
    return 1


def shared_prefix(
    watch: Stopwatch,
    page_size: int,
    eviction: str,
    num_requests: int = 1000,
    num_tokens: int = 4000,
) -> int:
    """Time matches of requests that share a prefix; returns their number.

    Every request is inserted after its match, so the fan-out below the prefix grows.
    """
    num_own = 4 * page_size
    pool, cache = _new(num_tokens + num_requests * num_own, page_size, eviction)
    prefix = _tokens(num_tokens, seed=2)
    cache.insert(prefix, _take(pool, prefix))
    for i in range(num_requests):
        ids = np.concatenate([prefix, np.full(num_own, i, np.int32)])
        with watch:
            match = cache.match(ids)
        assert match.num_tokens == num_tokens // page_size * page_size
        cache.insert(ids, np.concatenate([match.pages, _take(pool, ids[match.num_tokens :])]))
    return num_requests


def tier_lookup(watch: Stopwatch, page_size: int, eviction: str, num_tokens: int = 100_000) -> int:
    """Time to find a prompt whose first half is cached and whose rest is in the host tier: its
    keys, then both are asked; 1 operation."""
    pool, cache = _new(num_tokens * 2, page_size, eviction)
    ids, keys = _tokens(num_tokens, seed=1), list[bytes]()
    num_half = num_tokens // 2 // page_size
    cache.insert(ids[: num_half * page_size], _take(pool, ids[: num_half * page_size]))
    tier, tokens = HostTier(1 << 30, Codec()), np.zeros(page_size, np.int32)
    known = page_keys(ids, page_size, b"seed")
    tier.put([PageRecord(key, NO_KEY, tokens, np.zeros(1, np.uint8)) for key in known])
    with watch:
        extend_keys(keys, ids, page_size, b"seed")
        num_cached = cache.peek(ids) // page_size
        num_found = tier.contains(keys[num_cached:])
        match = cache.match(ids)
    assert (len(match.pages), num_found) == (num_half, len(known) - num_half)
    tier.close()
    return 1


def evict_half(
    watch: Stopwatch,
    page_size: int,
    eviction: str,
    num_tokens: int = 1_000_000,
    num_leaves: int = 10_000,
) -> int:
    """Time the eviction of half of a tree of many leaves, used in random order; 1 operation."""
    pool, cache = _new(num_tokens, page_size, eviction)
    size = max(page_size, num_tokens // num_leaves // page_size * page_size)
    prompts = [_tokens(size, seed=i) for i in range(num_tokens // size)]
    for prompt in prompts:
        cache.insert(prompt, _take(pool, prompt))
    for i in np.random.default_rng(0).permutation(len(prompts)).tolist():
        cache.match(prompts[i])
    num_pages = cache.total_pages // 2
    with watch:
        num_freed = cache.evict(num_pages)
    assert num_freed == num_pages
    return 1


def measure(page_size: int, eviction: str, num_rounds: int) -> list[Figure]:
    """All figures of one configuration."""
    label = f"page size {page_size}, {eviction}"
    lookup = _figure(f"match + keys + tier lookup of 100,000 tokens, {label}", 6.0, num_rounds,
                     lambda watch: tier_lookup(watch, page_size, eviction))  # fmt: skip
    return [
        *([lookup] if page_size > 1 else []),  # tiers want pages of 16 tokens or so
        _figure(f"match + insert of 100,000 tokens, {label}", 5.0, num_rounds,
                lambda watch: long_prompt(watch, page_size, eviction)),
        _figure(f"a match, 1,000 requests share 4,000 tokens, {label}", 0.1, num_rounds,
                lambda watch: shared_prefix(watch, page_size, eviction)),
        _figure(f"evict half of 1,000,000 tokens in 10,000 leaves, {label}", 50.0, num_rounds,
                lambda watch: evict_half(watch, page_size, eviction)),
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table or JSON; 1 if a goal is missed and `--strict` is given."""
    parser = argparse.ArgumentParser(description="Speed of the radix tree and the page allocator.")
    parser.add_argument("--page-size", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--eviction", choices=sorted(POLICIES), nargs="+", default=["lru"])
    parser.add_argument("--num-rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--strict", action="store_true", help="exit 1 if a goal is missed")
    options = parser.parse_args(arguments)
    figures = [
        figure
        for page_size in options.page_size
        for eviction in options.eviction
        for figure in measure(page_size, eviction, options.num_rounds)
    ]
    if options.json:
        rows = [asdict(figure) | {"is_met": figure.is_met} for figure in figures]
        sys.stdout.write(json.dumps({"figures": rows}, indent=2) + "\n")
    else:
        sys.stdout.write(_table(figures))
    return int(options.strict and not all(figure.is_met for figure in figures))


def _figure(name: str, goal_ms: float, num_rounds: int, run: Callable[[Stopwatch], int]) -> Figure:
    """Run one benchmark `num_rounds` times, with garbage collection only between rounds."""
    wall_ms: list[float] = []
    cpu_ms: list[float] = []
    for _ in range(max(1, num_rounds)):
        watch = Stopwatch()
        gc.collect()
        gc.disable()
        try:
            num_times = run(watch)
        finally:
            gc.enable()
        wall_ms.append(watch.wall_ms / num_times)
        cpu_ms.append(watch.cpu_ms / num_times)
    median = statistics.median
    return Figure(name, median(wall_ms), max(wall_ms), median(cpu_ms), goal_ms)


def _table(figures: list[Figure]) -> str:
    """The figures as lines of fixed columns."""
    width = max(len(figure.name) for figure in figures)
    lines = [f"{'':{width}}  {'median':>10}  {'worst':>10}  {'CPU time':>10}  {'goal':>10}"]
    for f in figures:
        values = "  ".join(
            f"{ms:>7.3f} ms" for ms in (f.median_ms, f.worst_ms, f.cpu_ms, f.goal_ms)
        )
        lines.append(f"{f.name:{width}}  {values}  {'met' if f.is_met else 'MISSED'}")
    return "\n".join(lines) + "\n"


def _new(num_tokens: int, page_size: int, eviction: str) -> tuple[PageAllocator, RadixCache]:
    """A pool of `num_tokens` and an empty tree on it."""
    pool = PageAllocator(num_tokens // page_size + 2, page_size)
    return pool, RadixCache(pool, page_size, eviction)


def _take(pool: PageAllocator, ids: TokenIds) -> TokenIds:
    """Allocate pages for the full pages of `ids`."""
    pages = pool.alloc(len(ids) // pool.page_size)
    assert pages is not None
    return pages


def _tokens(num_tokens: int, seed: int) -> TokenIds:
    """Random token ids, int32 [num_tokens]."""
    return np.random.default_rng(seed).integers(0, _VOCAB_SIZE, num_tokens, np.int32)


if __name__ == "__main__":
    sys.exit(main())
