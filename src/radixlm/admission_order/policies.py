"""The scheduling policies, as functions that sort the waiting requests."""

import random
from collections import Counter
from collections.abc import Callable, Sequence

from radixlm.memory.prefix.base import PrefixCache
from radixlm.scheduler.request import Request

# with more waiting requests than this, prefix-aware policies cost more than they save
MAX_MATCHED = 128
# sorts the waiting requests, by the cache, the running ones and the time in seconds
SortWaiting = Callable[[list[Request], PrefixCache, Sequence[Request], float], None]


def _fcfs(
    waiting: list[Request], cache: PrefixCache, running: Sequence[Request], now_s: float
) -> None:
    """Oldest first: the list is in this order."""


def _longest_output(
    waiting: list[Request], cache: PrefixCache, running: Sequence[Request], now_s: float
) -> None:
    waiting.sort(key=lambda r: -r.max_new_tokens)


def _shuffled(
    waiting: list[Request], cache: PrefixCache, running: Sequence[Request], now_s: float
) -> None:
    random.shuffle(waiting)


def _longest_prefix(
    waiting: list[Request], cache: PrefixCache, running: Sequence[Request], now_s: float
) -> None:
    if len(waiting) <= MAX_MATCHED:
        hits = {r.rid: cache.peek(r.ids[: r.prefill_len - 1], r.namespace) for r in waiting}
        waiting.sort(key=lambda r: -hits[r.rid])


def _depth_first(
    waiting: list[Request], cache: PrefixCache, running: Sequence[Request], now_s: float
) -> None:
    """Depth first, by the weight of subtrees: a page weighs the waiting requests that share it."""
    if len(waiting) > MAX_MATCHED:
        return
    paths = {
        r.rid: cache.match(r.ids[: r.prefill_len - 1], r.namespace).pages.tolist() for r in waiting
    }
    weight = Counter(page for path in paths.values() for page in path)
    waiting.sort(key=lambda r: [(-weight[page], page) for page in paths[r.rid]] or [(0, 0)])


def _routing_key(
    waiting: list[Request], cache: PrefixCache, running: Sequence[Request], now_s: float
) -> None:
    """Those first whose routing key most running requests have; equal keys together."""
    counts = Counter(r.wire.routing_key or "" for r in running)
    del counts[""]
    if counts:
        waiting.sort(key=lambda r: (-counts[key := r.wire.routing_key or ""], key))


def _uncached(request: Request, cache: PrefixCache) -> int:
    """The tokens that its prompt step computes."""
    known = request.ids[: request.prefill_len - 1]
    return request.prefill_len - cache.peek(known, request.namespace)


def _shortest_prefill(
    waiting: list[Request], cache: PrefixCache, running: Sequence[Request], now_s: float
) -> None:
    """Those first of whose prompts the cache lacks least."""
    if len(waiting) <= MAX_MATCHED:
        waiting.sort(key=lambda r: _uncached(r, cache))


def _response_ratio(
    waiting: list[Request], cache: PrefixCache, running: Sequence[Request], now_s: float
) -> None:
    """Those first that have waited longest for each token that the cache lacks, so that short
    prompts go first and long ones do not starve (highest response ratio next)."""
    if len(waiting) <= MAX_MATCHED:
        waiting.sort(key=lambda r: (r.queued_s - now_s) / _uncached(r, cache))


POLICIES: dict[str, SortWaiting] = {
    "fcfs": _fcfs,
    "lpm": _longest_prefix,
    "dfs-weight": _depth_first,
    "lof": _longest_output,
    "random": _shuffled,
    "routing-key": _routing_key,
    "shortest-prefill-first": _shortest_prefill,
    "hrrn": _response_ratio,
}
