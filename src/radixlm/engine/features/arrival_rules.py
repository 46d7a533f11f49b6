"""When to bring pages instead of computing them, and how long to wait for them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final, Literal

from radixlm.base.env import TRANSFER_WAIT_S
from radixlm.base.record import Record
from radixlm.tiers.base import Done, Found
from radixlm.wire.transfer import Hint

Policy = Literal["auto", "best_effort", "wait_complete", "timeout"]

MAX_WAIT_S: Final = 60.0  # even where a policy waits for all
_KEEP: Final = 0.8  # of a moving average, when a value is added
_FAR: Final = 4.0  # times the bytes of the largest fetch: what that takes is not known yet
_REFUSALS: Final = 8, 64  # between two trials of a tier that was too slow: at first, at most


class ArrivalOptions(Record):
    """``policy``: how long a request waits for pages; ``timeout_base_s``, ``timeout_per_ki_s``
    (a 1,024 tokens) and ``timeout_max_s``: of the policy "timeout". ``min_tokens``: fewer are
    computed. ``page_bytes``: of both spaces. ``window_pages``: pages of the second space that the
    end of a prefix needs. ``puts_late``: a draft model fills its part of pages later on.
    ``max_put_bytes``: that may wait to be read; more are not kept. ``preload_bytes``: of pages that
    a tier on disk gives back before anyone asks; 0 where there is no such tier. ``is_prefill``:
    decode servers pull what requests with a hint have computed."""

    page_size: int
    policy: Policy = "auto"
    timeout_base_s: float = 1.0
    timeout_per_ki_s: float = 0.25
    timeout_max_s: float = math.inf
    min_tokens: int = 1
    page_bytes: tuple[int, int] = (0, 0)
    window_pages: int = 0
    puts_late: bool = False
    max_put_bytes: int = 1 << 30
    preload_bytes: int = 0
    is_prefill: bool = False


class _Rate:
    """A moving average of amounts a second."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        self._amount = _KEEP * self._amount + amount
        self._seconds = _KEEP * self._seconds + seconds

    @property
    def value(self) -> float:
        """0 before the first amount."""
        return self._amount / self._seconds if self._seconds > 0 else 0.0


class _Line:
    """Seconds of a fetch by its bytes: a line through the last fetches, by least squares, with
    weights that fall. One small fetch tells what a fetch costs, not how fast many bytes come."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of 1, bytes, bytes^2, seconds, bytes * seconds
        self._largest = 0.0

    def add(self, num_bytes: float, seconds: float) -> None:
        terms = (1.0, num_bytes, num_bytes**2, seconds, num_bytes * seconds)
        self._sums = [_KEEP * total + term for total, term in zip(self._sums, terms, strict=True)]
        self._largest = max(num_bytes, _KEEP * self._largest)

    def seconds(self, num_bytes: float) -> float | None:
        """None where fetches of that size are not known yet."""
        if not self._largest or num_bytes > _FAR * self._largest:
            return None
        fixed, each = self._fit()
        return fixed + each * num_bytes

    def _fit(self) -> tuple[float, float]:
        """Seconds of a fetch, and of each of its bytes; neither is below zero."""
        count, x, xx, y, xy = self._sums
        spread = count * xx - x * x
        if spread <= 1e-3 * count * xx:  # fetches of one size
            return 0.0, y / x
        each = (count * xy - x * y) / spread
        if each <= 0:
            return y / count, 0.0
        fixed = (y - each * x) / count
        return (fixed, each) if fixed > 0 else (0.0, xy / xx)

    @property
    def rate(self) -> float:
        """Bytes a second of all fetches together; 0 before the first."""
        return self._sums[1] / self._sums[3] if self._sums[3] > 0 else 0.0


class FetchRules:
    """Policy "auto" fetches what comes sooner than it is computed, and waits no longer than that
    would take. Speeds are measured; what is not known yet is tried."""

    def __init__(
        self, options: ArrivalOptions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._options, self._clock = options, clock
        self._prefill, self._tiers, self._lookup_s = _Rate(), _Line(), 0.0
        self._last_s = 0.0
        self._refusals, self._most_refusals = 0, _REFUSALS[0]

    def looked_up(self, found: Found) -> None:
        self._lookup_s = _KEEP * self._lookup_s + (1 - _KEEP) * found.seconds

    def fetched(self, done: Done) -> None:
        """A fetch is over."""
        num_bytes = sum(size for _, _, size, _ in done.tiers)
        if num_bytes:
            self._tiers.add(num_bytes, sum(seconds for *_, seconds in done.tiers))

    def computed(self, num_tokens: int, started_s: float) -> None:
        """Tokens of a prompt were computed since the last call, or since the request began."""
        now_s = self._clock()
        since_s, self._last_s = max(self._last_s, started_s), now_s
        if num_tokens > 0 and now_s > since_s:
            self._prefill.add(num_tokens, now_s - since_s)

    def pays(self, num_pages: int, hint: Hint | None) -> bool:
        """Whether to fetch so many pages."""
        if self._options.policy != "auto" or hint is not None:
            return True
        num_bytes = num_pages * self._options.page_bytes[0] + self._options.page_bytes[1]
        seconds = self._tiers.seconds(num_bytes)
        if seconds is None or self._lookup_s + seconds < self._compute_s(num_pages):
            self._refusals, self._most_refusals = 0, _REFUSALS[0]
            return True
        self._refusals += 1
        if self._refusals < self._most_refusals:
            return False
        self._refusals, self._most_refusals = 0, min(2 * self._most_refusals, _REFUSALS[1])
        return True

    def is_over(self, start_s: float) -> bool:
        """Nobody waits longer than this."""
        return self._clock() - start_s > MAX_WAIT_S

    def is_late(self, start_s: float, num_pages: int, hint: Hint | None) -> bool:
        """Whether a request that has waited since ``start_s`` should go on without the pages."""
        options, waited_s = self._options, self._clock() - start_s
        if hint is not None:  # its tier gives up when there is no progress
            return 0 < hint.deadline_s < self._clock() or waited_s > TRANSFER_WAIT_S.get()
        if self.is_over(start_s) or options.policy == "wait_complete":
            return self.is_over(start_s)
        if options.policy == "timeout":
            num_ki = num_pages * options.page_size / 1024
            limit_s = options.timeout_base_s + num_ki * options.timeout_per_ki_s
            return waited_s > min(limit_s, options.timeout_max_s)
        return waited_s > self._compute_s(num_pages)

    def _compute_s(self, num_pages: int) -> float:
        """Seconds to compute pages; infinite before the first prefill, which tells."""
        rate = self._prefill.value
        return num_pages * self._options.page_size / rate if rate else float("inf")

    def stats(self) -> dict[str, float]:
        return {
            "prefill_tokens_per_s": self._prefill.value,
            "fetch_bytes_per_s": self._tiers.rate,
            "lookup_seconds": self._lookup_s,
        }
