"""How many pages of KV fit, and the error that says what to change when none do."""

from __future__ import annotations

from dataclasses import dataclass

from radixlm.base.errors import ConfigError
from radixlm.base.units import format_bytes


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """``free_bytes`` before the weights were loaded, ``weight_bytes`` after."""

    free_bytes: int
    weight_bytes: int
    mem_fraction_static: float
    max_total_tokens: int | None
    max_running: int
    context_len: int


@dataclass(frozen=True, slots=True)
class WindowShare:
    """Window pages for each full page, and what one request needs to get on."""

    ratio: float
    min_pages: int


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Pages of each space, page 0 not counted; ``num_window`` is 0 without a window space."""

    num_full: int
    num_window: int = 0


def pool_sizes(
    facts: MemoryFacts,
    full_bytes: int,
    window_bytes: int,
    page_size: int,
    window: WindowShare | None,
) -> PoolSizes:
    """Pages of the KV pools: what the static share of the free memory leaves beside the weights,
    not more than all running requests at full context could use.

    ``full_bytes``, ``window_bytes``: of one page over the layers of each kind. Without ``window``
    all layers share one space. ConfigError states needed and available memory and the flag."""
    page_bytes = full_bytes + (int(window.ratio * window_bytes) if window else window_bytes)
    budget = int(facts.free_bytes * facts.mem_fraction_static) - facts.weight_bytes
    fits = max(0, budget) // page_bytes - 1
    useful = -(-facts.context_len // page_size) * max(1, facts.max_running)
    if facts.max_total_tokens is not None:
        pages = -(-facts.max_total_tokens // page_size)
        _require(pages, fits, facts, page_bytes, "--max-total-tokens", page_size)
    else:
        _require(1, fits, facts, page_bytes, "--mem-fraction-static", page_size)
        pages = min(fits, useful)
    if window is None:
        return PoolSizes(pages)
    # what one request needs must fit whatever the ratio says
    return PoolSizes(pages, min(pages, max(int(pages * window.ratio), window.min_pages)))


def _require(
    wanted: int, fits: int, facts: MemoryFacts, page_bytes: int, flag: str, page_size: int
) -> None:
    if wanted <= fits:
        return
    need = facts.weight_bytes + wanted * page_bytes
    have = int(facts.free_bytes * facts.mem_fraction_static)
    if flag == "--max-total-tokens":
        advice = f"lower --max-total-tokens to {max(0, fits) * page_size} or less"
    else:
        share = need / max(1, facts.free_bytes)
        advice = (
            f"raise --mem-fraction-static to {min(0.99, share + 0.02):.2f}"
            if share < 0.97
            else "choose a smaller model or a machine with more memory"
        )
    raise ConfigError(
        f"{flag}: weights ({format_bytes(facts.weight_bytes)}) and {wanted * page_size} tokens of "
        f"KV ({format_bytes(wanted * page_bytes)}) need {format_bytes(need)}; "
        f"--mem-fraction-static {facts.mem_fraction_static} of the free "
        f"{format_bytes(facts.free_bytes)} is {format_bytes(have)}: {advice}"
    )
