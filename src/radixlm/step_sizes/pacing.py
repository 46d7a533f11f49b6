"""ChunkPacer: how many tokens of prompts a step computes while other requests decode.

So many that the step ends within the time between two tokens that they are to have:
--target-itl-ms, or some times what they take without prompts.

A step takes ``base + rows * each`` seconds, a row being a token of a prompt or a decoding request
beyond the first: the base is that of one request that decodes, and a token of a prompt takes longer
the longer its context is, so that the newest steps count most.
"""

from radixlm.scheduler.plan_parts import LEAST

FIRST = 128  # tokens of prompts in a step while nothing is known
TIMES = 5  # the time between two tokens without prompts that is kept beside them
UNNOTICED_S = 0.05  # between two tokens; shorter times are no faster to a reader
_NEW = 0.5  # weight of the newest step
_PLAIN = 0.1  # without prompts: what it takes by chance would count TIMES times


class ChunkPacer:
    """``target_s``: seconds that a step may take; None: TIMES those of a step without prompts, and
    UNNOTICED_S at least."""

    def __init__(self, target_s: float | None) -> None:
        self._fixed_s = target_s
        self._base_s = 0.0
        self._each_s: float | None = None

    @property
    def is_for_readers(self) -> bool:
        """Whether only streams need their tokens in time; else every request does."""
        return self._fixed_s is None

    def target_s(self, num_decodes: int) -> float:
        """What a step of ``num_decodes`` requests and some tokens of prompts may take."""
        if self._fixed_s is not None:
            return self._fixed_s
        return max(UNNOTICED_S, TIMES * self._plain_s(num_decodes))

    def tokens(self, num_decodes: int) -> int:
        """Tokens of prompts that the next step may compute beside ``num_decodes`` requests."""
        if self._each_s is None:
            return FIRST
        left_s = self.target_s(num_decodes) - self._plain_s(num_decodes)
        count = left_s / max(self._each_s, 1e-9)
        return max(LEAST, int(min(count, 1 << 30)) // LEAST * LEAST)

    def observe(self, num_decodes: int, num_tokens: int, seconds: float) -> None:
        """A step has ended: of ``num_decodes`` requests and ``num_tokens`` tokens of prompts."""
        num_more = max(0, num_decodes - 1)
        if not num_tokens:
            base_s = max(seconds / 2, seconds - num_more * (self._each_s or 0.0))
            self._base_s = _mean(self._base_s or base_s, base_s, _PLAIN)
            return
        if num_decodes:  # while prompts go on no other step tells that the base has become shorter
            self._base_s = min(self._base_s, seconds)
        each_s = max(0.0, seconds - self._base_s * bool(num_decodes)) / (num_tokens + num_more)
        self._each_s = each_s if self._each_s is None else _mean(self._each_s, each_s)

    def _plain_s(self, num_decodes: int) -> float:
        """What a step without prompts takes."""
        return self._base_s + max(0, num_decodes - 1) * (self._each_s or 0.0)


def _mean(old: float, new: float, weight: float = _NEW) -> float:
    return old + weight * (new - old)
