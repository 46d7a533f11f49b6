"""The figures of load reports: of one engine, and of several together."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

from radixlm.wire.replies import KEY_BOUNDS, DraftTotals, LoadReport, PageCounts


def total_load(loads: Sequence[LoadReport]) -> LoadReport:
    """Sums of counts and rates, means of shares."""
    total = LoadReport()
    total.drafts = DraftTotals() if any(load.drafts for load in loads) else None
    for name in LoadReport.__struct_fields__:
        value = getattr(total, name)
        if isinstance(value, dict):
            each = (Counter(getattr(load, name)) for load in loads)
            setattr(total, name, dict(sum(each, Counter())))
        elif name not in ("drafts", "released", "pages"):
            setattr(total, name, sum(getattr(load, name) for load in loads))
    for name in DraftTotals.__struct_fields__ if total.drafts else ():
        each_count = [getattr(load.drafts, name) for load in loads if load.drafts]
        setattr(total.drafts, name, sum(each_count))
    total.pages = _add_pages([load.pages for load in loads if load.pages])
    total.released = tuple({tag: None for load in loads for tag in load.released})
    total.cache_hit_rate /= max(1, len(loads))
    total.spec_accept_length /= max(1, sum(load.spec_accept_length > 0 for load in loads))
    return total


def _add_pages(counts: Sequence[PageCounts]) -> PageCounts | None:
    """The pages of several pools together; None of none."""
    if not counts:
        return None
    names = PageCounts.__struct_fields__
    total = PageCounts(*(sum(getattr(one, name) for one in counts) for name in names))
    total.size = counts[0].size
    return total


def count_keys(running: Iterable[str | None], waiting: Iterable[str | None]) -> dict[str, int]:
    """How many routing keys have how many requests, given the key of each: "running" (all keys that
    run), "running 2" (two running requests), "all 3", "all 5" (running and waiting: 4 or 5), by
    KEY_BOUNDS."""
    keys = Counter(filter(None, running))
    found = Counter({"running": len(keys)} if keys else {})
    found.update(f"running {KEY_BOUNDS[bisect_left(KEY_BOUNDS, n)]}" for n in keys.values())
    keys.update(filter(None, waiting))
    found.update(f"all {KEY_BOUNDS[bisect_left(KEY_BOUNDS, n)]}" for n in keys.values())
    return dict(found)
