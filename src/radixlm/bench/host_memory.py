"""Speed of the host's KV bookkeeping: ``python -m radixlm.bench.host_memory [--json]``.

Three figures, each the median of several rounds on trees of their own, with the goal beside it.
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

_VOCAB_SIZE = 150_000


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured duration: median and worst of the rounds, and the most it should be."""

    name: str
    median_ms: float
    worst_ms: float
    goal_ms: float

    @property
    def is_met(self) -> bool:
        """Whether the median keeps the goal."""
        return self.median_ms <= self.goal_ms


def long_prompt(page_size: int, eviction: str, num_tokens: int = 100_000) -> float:
    """Milliseconds to match and insert a prompt whose first half is cached."""
    pool, cache = _new(num_tokens * 2, page_size, eviction)
    ids = _tokens(num_tokens, seed=1)
    half = ids[: num_tokens // 2]
    cache.insert(half, _take(pool, half))
    start = time.perf_counter()
    match = cache.match(ids)
    cache.lock(match.handle)
    fresh = pool.alloc((num_tokens - match.num_tokens) // page_size)
    assert fresh is not None
    result = cache.insert(ids, np.concatenate([match.pages, fresh]))
    cache.unlock(match.handle)
    end = time.perf_counter()
    assert result.num_cached_pages == num_tokens // page_size
    return (end - start) * 1e3


def shared_prefix(
    page_size: int, eviction: str, num_requests: int = 1000, num_tokens: int = 4000
) -> float:
    """Milliseconds a match, over requests that share a prefix and differ behind it.

    Every request is inserted after its match, so the fan-out under the prefix grows to all.
    """
    num_own = 4 * page_size
    pool, cache = _new(num_tokens + num_requests * num_own, page_size, eviction)
    prefix = _tokens(num_tokens, seed=2)
    cache.insert(prefix, _take(pool, prefix))
    spent = 0.0
    for i in range(num_requests):
        ids = np.concatenate([prefix, np.full(num_own, i, np.int32)])
        start = time.perf_counter()
        match = cache.match(ids)
        spent += time.perf_counter() - start
        assert match.num_tokens == num_tokens // page_size * page_size
        cache.insert(ids, np.concatenate([match.pages, _take(pool, ids[match.num_tokens :])]))
    return spent / num_requests * 1e3


def evict_half(
    page_size: int, eviction: str, num_tokens: int = 1_000_000, num_leaves: int = 10_000
) -> float:
    """Milliseconds to evict half of a tree of many leaves, all used in random order."""
    pool, cache = _new(num_tokens, page_size, eviction)
    size = max(page_size, num_tokens // num_leaves // page_size * page_size)
    prompts = [_tokens(size, seed=i) for i in range(num_tokens // size)]
    for prompt in prompts:
        cache.insert(prompt, _take(pool, prompt))
    for i in np.random.default_rng(0).permutation(len(prompts)).tolist():
        cache.match(prompts[i])
    num_pages = cache.total_pages // 2
    start = time.perf_counter()
    num_freed = cache.evict(num_pages)
    end = time.perf_counter()
    assert num_freed == num_pages
    return (end - start) * 1e3


def measure(page_size: int, eviction: str, num_rounds: int) -> list[Figure]:
    """All figures of one configuration."""
    label = f"page size {page_size}, {eviction}"
    return [
        _figure(f"match + insert of 100,000 tokens, {label}", 5.0, num_rounds,
                lambda: long_prompt(page_size, eviction)),
        _figure(f"a match, 1,000 requests share 4,000 tokens, {label}", 0.1, num_rounds,
                lambda: shared_prefix(page_size, eviction)),
        _figure(f"evict half of 1,000,000 tokens in 10,000 leaves, {label}", 50.0, num_rounds,
                lambda: evict_half(page_size, eviction)),
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table, or JSON; 1 if a goal is missed and ``--strict`` is given."""
    parser = argparse.ArgumentParser(description="Speed of the host's KV bookkeeping.")
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


def _figure(name: str, goal_ms: float, num_rounds: int, run: Callable[[], float]) -> Figure:
    """Runs one benchmark ``num_rounds`` times, garbage collected in between, not during."""
    rounds: list[float] = []
    for _ in range(max(1, num_rounds)):
        gc.collect()
        gc.disable()
        try:
            rounds.append(run())
        finally:
            gc.enable()
    return Figure(name, statistics.median(rounds), max(rounds), goal_ms)


def _table(figures: list[Figure]) -> str:
    """The figures as lines of fixed columns."""
    width = max(len(figure.name) for figure in figures)
    lines = [f"{'':{width}}  {'median':>10}  {'worst':>10}  {'goal':>10}"]
    for f in figures:
        values = "  ".join(f"{ms:>7.3f} ms" for ms in (f.median_ms, f.worst_ms, f.goal_ms))
        lines.append(f"{f.name:{width}}  {values}  {'met' if f.is_met else 'MISSED'}")
    return "\n".join(lines) + "\n"


def _new(num_tokens: int, page_size: int, eviction: str) -> tuple[PageAllocator, RadixCache]:
    """A pool with room for ``num_tokens`` and an empty tree on it."""
    pool = PageAllocator(num_tokens // page_size + 2, page_size)
    return pool, RadixCache(pool, page_size, eviction)


def _take(pool: PageAllocator, ids: TokenIds) -> TokenIds:
    """Pages for the whole pages of ``ids``."""
    pages = pool.alloc(len(ids) // pool.page_size)
    assert pages is not None
    return pages


def _tokens(num_tokens: int, seed: int) -> TokenIds:
    """Random token ids, int32 [num_tokens]."""
    return np.random.default_rng(seed).integers(0, _VOCAB_SIZE, num_tokens, np.int32)


if __name__ == "__main__":
    sys.exit(main())
