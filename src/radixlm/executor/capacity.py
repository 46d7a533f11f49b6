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


def num_pages(facts: MemoryFacts, page_bytes: int, page_size: int) -> int:
    """Pages of the KV pool: what the static share of the free memory leaves beside the weights,
    not more than all running requests at full context could use.

    ConfigError states needed and available memory and the one flag to change."""
    budget = int(facts.free_bytes * facts.mem_fraction_static) - facts.weight_bytes
    fits = max(0, budget) // page_bytes
    useful = -(-facts.context_len // page_size) * max(1, facts.max_running)
    if facts.max_total_tokens is not None:
        wanted = -(-facts.max_total_tokens // page_size)
        _require(wanted, fits, facts, page_bytes, "--max-total-tokens", page_size)
        return wanted
    _require(1, fits, facts, page_bytes, "--mem-fraction-static", page_size)
    return min(fits, useful)


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
