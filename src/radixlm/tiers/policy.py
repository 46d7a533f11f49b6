"""When pages are written to the tiers, and how long a request waits for pages from them."""

from __future__ import annotations

from typing import Final, Literal

from radixlm.base.record import Record

Event = Literal["insert", "hit", "evict"]
LONG_PREFIX_TOKENS: Final = 1024
SECOND_HIT: Final = 2


def wants_write(policy: str, event: Event, hits: int, prefix_tokens: int) -> bool:
    """Whether a page is copied to the tiers at an event: its insertion into the radix tree, a hit
    on it (its ``hits``-th), or its eviction. ``prefix_tokens``: from the start up to its end."""
    if policy == "write_through":
        return event == "insert"
    if policy == "write_through_selective":
        is_hit_again = event == "hit" and hits >= SECOND_HIT
        return is_hit_again or (event == "insert" and prefix_tokens >= LONG_PREFIX_TOKENS)
    return event == "evict"


class Speed:
    """Moving averages of a source: bytes a second, and seconds until the first byte."""

    _KEPT: Final = 0.8  # of the average at each new observation

    def __init__(self, bytes_per_s: float = 0.5e9, latency_s: float = 0.002) -> None:
        self.bytes_per_s, self.latency_s = bytes_per_s, latency_s

    def observe(self, num_bytes: int, seconds: float) -> None:
        """``num_bytes`` came in ``seconds``, the latency included."""
        if num_bytes <= 0 or seconds <= 0:
            return
        moving_s = max(seconds - self.latency_s, seconds / 10)
        self.bytes_per_s += (1 - self._KEPT) * (num_bytes / moving_s - self.bytes_per_s)
        least_s = max(0.0, seconds - num_bytes / self.bytes_per_s)
        self.latency_s += (1 - self._KEPT) * (least_s - self.latency_s)

    def seconds(self, num_bytes: int) -> float:
        """How long ``num_bytes`` will take."""
        return self.latency_s + num_bytes / self.bytes_per_s


class Prefetch(Record):
    """How long a request waits for pages that are on their way.

    best_effort    not at all: it starts with what has come when it could be scheduled.
    wait_complete  until all have come.
    timeout        up to base_s + per_ki_token_s for each 1,024 tokens asked for.
    auto           while what is missing comes sooner than it is computed, and in all no longer than
                   computing everything that was asked for would take.
    """

    policy: str = "auto"
    base_s: float = 1.0
    per_ki_token_s: float = 0.25

    def is_worth(self, num_bytes: int, tokens: int, speed: Speed, prefill_rate: float) -> bool:
        """Whether a fetch should be started at all. ``prefill_rate``: tokens computed a second, 0
        if it is not known yet."""
        if self.policy != "auto" or prefill_rate <= 0:
            return True
        return speed.seconds(num_bytes) < tokens / prefill_rate

    def may_wait(
        self,
        waited_s: float,
        tokens: int,
        missing_bytes: int,
        missing_tokens: int,
        speed: Speed,
        prefill_rate: float,
    ) -> bool:
        """Whether a request goes on waiting. ``tokens`` were asked for ``waited_s`` seconds ago, of
        which ``missing_tokens`` with ``missing_bytes`` have not come yet."""
        if self.policy == "best_effort":
            return False
        if self.policy == "wait_complete":
            return True
        if self.policy == "timeout" or prefill_rate <= 0:
            return waited_s < self.base_s + self.per_ki_token_s * tokens / 1024
        if waited_s >= tokens / prefill_rate:
            return False
        return speed.seconds(missing_bytes) < missing_tokens / prefill_rate
