"""How a memory budget is divided between full layers and window layers."""

from __future__ import annotations

from dataclasses import dataclass

from radixlm.base.errors import ConfigError
from radixlm.base.units import format_bytes


@dataclass(frozen=True, slots=True)
class PageBudget:
    """Pages of each group, page 0 counted; ``num_window_pages`` is 0 without a window group."""

    num_full_pages: int
    num_window_pages: int


def window_ratio(
    swa_full_tokens_ratio: float,
    hybrid_kvcache_ratio: float | None,
    window_tokens: int,
    context_tokens: int,
) -> float:
    """Tokens of the window pool for each token of the full pool, in (0, 1].

    ``--hybrid-kvcache-ratio`` h, where given, goes before ``--swa-full-tokens-ratio``: 0 makes both
    pools hold the same tokens, 1 gives each request of a whole context just its window.
    """
    if hybrid_kvcache_ratio is None:
        if not 0 < swa_full_tokens_ratio <= 1:
            raise ConfigError(
                f"--swa-full-tokens-ratio is {swa_full_tokens_ratio}, needs to be above 0 and at "
                "most 1 (0.8 is the default)"
            )
        return swa_full_tokens_ratio
    if not 0 <= hybrid_kvcache_ratio <= 1:
        raise ConfigError(f"--hybrid-kvcache-ratio is {hybrid_kvcache_ratio}, needs 0 to 1")
    share = min(1.0, window_tokens / context_tokens)
    return 1 - hybrid_kvcache_ratio * (1 - share)


def split_budget(
    total_bytes: int,
    full_page_bytes: int,
    window_page_bytes: int,
    ratio: float,
    min_window_pages: int = 1,
) -> PageBudget:
    """Pages of both groups that together take at most ``total_bytes``.

    full_page_bytes, window_page_bytes: of one page over all layers of that group.
    ratio: window pages for each full page, see ``window_ratio``.
    min_window_pages: what one request needs to get on (its window and a step), page 0 not counted.
    """
    if min(total_bytes, full_page_bytes, window_page_bytes) < 0 or not 0 < ratio <= 1:
        raise ConfigError(f"cannot divide {total_bytes} bytes at {ratio} window pages a full page")
    pair_bytes = full_page_bytes + ratio * window_page_bytes
    if pair_bytes <= 0:
        raise ConfigError("neither full nor window layers keep keys and values: nothing to divide")
    num_full = int(total_bytes / pair_bytes)
    num_window = int(num_full * ratio)
    # One window must fit whatever the ratio says; the full group pays for it.
    if num_window < min_window_pages + 1:
        num_window = min_window_pages + 1
        rest = max(0, total_bytes - num_window * window_page_bytes)
        num_full = rest // full_page_bytes if full_page_bytes else max(num_full, num_window)
    is_over = num_full * full_page_bytes + num_window * window_page_bytes > total_bytes
    if is_over or num_full < num_window:
        need = num_window * (full_page_bytes + window_page_bytes)
        raise ConfigError(
            f"the KV pools have {format_bytes(total_bytes)} and need {format_bytes(need)} for one "
            f"window of {min_window_pages} pages: raise --mem-fraction-static"
        )
    return PageBudget(num_full, num_window)


def uniform_budget(
    total_bytes: int, full_page_bytes: int, window_page_bytes: int = 0
) -> PageBudget:
    """Pages of the one group that all layers share (``--disable-hybrid-swa-memory``)."""
    page_bytes = full_page_bytes + window_page_bytes
    if page_bytes <= 0:
        raise ConfigError("no layer keeps keys and values: nothing to divide")
    if total_bytes < 2 * page_bytes:
        raise ConfigError(
            f"the KV pool has {format_bytes(total_bytes)} and needs {format_bytes(2 * page_bytes)} "
            "for two pages: raise --mem-fraction-static"
        )
    return PageBudget(total_bytes // page_bytes, 0)
