"""How many pages of KV fit, and the error that says what to change when none do."""

from radixlm.base.errors import ConfigError
from radixlm.base.record import Record
from radixlm.base.units import format_bytes


class MemoryFacts(Record):
    """``free_bytes`` before the weights were loaded, ``weight_bytes`` after. Without a fraction all
    is for weights and KV but what steps need besides (``step_bytes``, measured by a trial)."""

    free_bytes: int
    weight_bytes: int
    mem_fraction_static: float | None
    max_total_tokens: int | None
    max_running: int
    context_len: int
    step_bytes: int = 0

    @property
    def static_bytes(self) -> int:
        """What weights and KV may take together."""
        if self.mem_fraction_static is None:
            return self.free_bytes - self.step_bytes
        return int(self.free_bytes * self.mem_fraction_static)

    @property
    def pool_bytes(self) -> int:
        """What is left of that for the pools."""
        return max(0, self.static_bytes - self.weight_bytes)


class WindowShare(Record):
    """Window pages for each full page, and what one request needs to get on."""

    ratio: float
    min_pages: int


class PoolSizes(Record):
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
    page_bytes = max(1, page_bytes)  # a pipeline stage may have no layer that attends
    fits = facts.pool_bytes // page_bytes - 1
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


# pages of states that one request may hold at once: a snapshot it has locked, the running one,
# and two that a step writes
STATES_PER_REQUEST = 4
SPARE_STATES = 64  # snapshots of prefixes beside those of running requests
STATE_SHARE = 0.5  # of the pools' memory, when --max-mamba-cache-size does not say


def state_pages(facts: MemoryFacts, page_bytes: int, wanted: int | None) -> int:
    """Pages of the state pool, page 0 not counted: ``wanted``, else enough for all running
    requests and some snapshots within half of the memory. ConfigError names flag and memory."""
    budget = facts.pool_bytes
    if wanted is not None:
        fits = budget // page_bytes
        if wanted > fits or wanted < STATES_PER_REQUEST:
            raise ConfigError(
                f"--max-mamba-cache-size {wanted}: needs at least {STATES_PER_REQUEST}, and "
                f"{fits} states of {format_bytes(page_bytes)} fit: {_share(facts)} leaves "
                f"{format_bytes(budget)}"
            )
        return wanted
    most = STATES_PER_REQUEST * max(1, facts.max_running) + SPARE_STATES
    count = min(most, int(budget * STATE_SHARE) // page_bytes)
    if count < STATES_PER_REQUEST:
        raise ConfigError(
            f"the states of one request need {format_bytes(STATES_PER_REQUEST * page_bytes)}, half "
            f"of the {format_bytes(budget)} beside the weights is less: raise "
            "--mem-fraction-static"
        )
    return count


def _require(
    wanted: int, fits: int, facts: MemoryFacts, page_bytes: int, flag: str, page_size: int
) -> None:
    if wanted <= fits:
        return
    need = facts.weight_bytes + wanted * page_bytes
    have = facts.static_bytes
    if flag == "--max-total-tokens":
        advice = f"lower --max-total-tokens to {max(0, fits) * page_size} or less"
    else:
        share = need / max(1, facts.free_bytes)
        advice = (
            f"raise --mem-fraction-static to {min(0.99, share + 0.02):.2f}"
            if share < 0.97 and facts.mem_fraction_static is not None
            else "choose a smaller model or a machine with more memory"
        )
    raise ConfigError(
        f"{flag}: weights ({format_bytes(facts.weight_bytes)}) and {wanted * page_size} tokens of "
        f"KV ({format_bytes(wanted * page_bytes)}) need {format_bytes(need)}; {_share(facts)} is "
        f"{format_bytes(have)}: {advice}"
    )


def _share(facts: MemoryFacts) -> str:
    """Where the figure for weights and KV comes from."""
    free = format_bytes(facts.free_bytes)
    if facts.mem_fraction_static is None:
        return f"the free {free} without the {format_bytes(facts.step_bytes)} that steps need"
    return f"--mem-fraction-static {facts.mem_fraction_static} of the free {free}"
