"""Trial: whether steps with drafts give more tokens a second than plain ones, as measured. The cost
table chooses lengths; this is the judge of whether to draft at all. Plain steps that were measured
long ago do not condemn drafts: the machine may be slower now, so some are run again before."""

from __future__ import annotations

# after so many steps with drafts, the least rate of theirs over the plain one with which they go on
_LEAST_RATES = {3: 0.5, 8: 0.75, 16: 0.9, 32: 0.98}
_PLAIN_STEPS = 3  # plain ones in a row: the first still verifies drafts, and is not measured
_MEASURED_EVERY = 256  # steps, after which plain ones are measured again
_MIN_OFF_STEPS, _MAX_OFF_STEPS = 512, 16384


class Trial:
    """Counts what steps cost and give; by number of running requests."""

    def __init__(self) -> None:
        self._plain_s: dict[int, float] = {}  # of a step for each of its rows
        self._key = self._num_steps = self._num_tokens = self._num_since = 0
        self._seconds = self._slowest_s = 0.0  # of the slowest step
        self._num_plain = 0  # plain steps that are still to be measured
        self._was_plain = False
        self._again_s: list[float] | None = None  # plain steps run again, where drafts seem slow
        self._num_off, self._off_steps = 0, _MIN_OFF_STEPS  # steps without drafts; the next time

    def allows(self) -> bool:
        """Whether the next step may draft."""
        if self._num_plain:
            self._num_plain -= 1
            return False
        return not self._num_off

    @property
    def is_off(self) -> bool:
        """Whether drafts were found not to pay, and not long ago."""
        return self._num_off > 0

    def accepted(self, count: int) -> None:
        """So many drafts of a step were accepted."""
        self._num_tokens += count

    def pass_steps(self, count: int) -> None:
        """So many steps go by."""
        self._num_off = max(0, self._num_off - count)

    def observe(self, num_rows: int, num_tokens: int, seconds: float, draft_steps: int) -> None:
        """A step of ``num_rows`` requests, ``num_tokens`` with drafts that it verified."""
        key = num_rows if num_rows <= 8 else 8 + num_rows // 8
        self.pass_steps(1)
        is_plain = num_tokens == num_rows and not draft_steps
        if is_plain and self._was_plain:
            measured_s, known_s = seconds / num_rows, self._plain_s.get(key)
            if known_s is not None:  # a disturbed step says little
                measured_s = 0.8 * known_s + 0.2 * min(measured_s, 1.5 * known_s)
            self._plain_s[key] = measured_s
            if self._again_s is not None and key == self._key:
                self._again_s.append(seconds / num_rows)
        self._was_plain = is_plain
        if is_plain:
            return
        if key != self._key:
            self._key, self._num_steps, self._num_tokens = key, 0, 0
            self._seconds = self._slowest_s = 0.0
            self._again_s = None
        self._num_steps, self._num_since = self._num_steps + 1, self._num_since + 1
        self._num_tokens, self._seconds = self._num_tokens + num_rows, self._seconds + seconds
        self._slowest_s = max(self._slowest_s, seconds)
        judged = max((num for num in _LEAST_RATES if num <= self._num_steps), default=0)
        is_over = judged == max(_LEAST_RATES)
        if judged and (self._num_steps == judged or self._again_s or is_over):
            self._judge(_LEAST_RATES[judged], is_over)

    def _judge(self, least_rate: float, is_over: bool) -> None:
        plain_s, again_s = self._plain_s.get(self._key), self._again_s
        if again_s:
            plain_s = self._plain_s[self._key] = sum(again_s) / len(again_s)
            self._again_s = None
        if plain_s is None or self._num_since > _MEASURED_EVERY:
            self._num_plain, self._num_since = _PLAIN_STEPS, 0
        # without the slowest step, which may have been disturbed
        num_tokens = self._num_tokens * (1 - 1 / self._num_steps)
        rest_s = self._seconds - self._slowest_s
        fails = plain_s is not None and plain_s * num_tokens < least_rate * rest_s
        if fails and not again_s:
            self._num_plain, self._again_s = _PLAIN_STEPS, []
            return
        if fails:
            self._num_off = self._off_steps
            self._off_steps = min(2 * self._off_steps, _MAX_OFF_STEPS)
        elif is_over and plain_s is not None:
            self._off_steps = _MIN_OFF_STEPS
        if fails or is_over:
            self._num_steps = self._num_tokens = 0
            self._seconds = self._slowest_s = 0.0
