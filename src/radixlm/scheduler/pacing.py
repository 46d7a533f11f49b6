"""ChunkPacer: how many tokens of prompts a step may compute while other requests decode, so that it
ends within the time between two tokens that they are to have (--target-itl-ms).

A step takes ``base + tokens * each`` seconds: the base is that of steps without prompts, and a
token of a prompt takes longer the longer its context is, so that the newest steps count most.
"""

FIRST = 128  # tokens of prompts in a step while nothing is known
LEAST = 16  # a prompt goes on, whatever the target
_NEW = 0.5  # weight of the newest step


class ChunkPacer:
    """``target_s``: seconds that a step may take."""

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._base_s = 0.0
        self._each_s: float | None = None

    def tokens(self) -> int:
        """Tokens of prompts that the next step may compute beside decodes."""
        if self._each_s is None:
            return FIRST
        count = (self._target_s - self._base_s) / max(self._each_s, 1e-9)
        return max(LEAST, int(min(count, 1 << 30)) // LEAST * LEAST)

    def observe(self, num_decodes: int, num_tokens: int, seconds: float) -> None:
        """A step has ended: of ``num_decodes`` requests and ``num_tokens`` tokens of prompts."""
        if not num_tokens:
            self._base_s = _mean(self._base_s or seconds, seconds)
            return
        if num_decodes:  # while prompts go on no other step tells that the base has become shorter
            self._base_s = min(self._base_s, seconds)
        each_s = max(0.0, seconds - self._base_s * bool(num_decodes)) / num_tokens
        self._each_s = each_s if self._each_s is None else _mean(self._each_s, each_s)


def _mean(old: float, new: float) -> float:
    return old + _NEW * (new - old)
