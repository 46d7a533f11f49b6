"""Trial: whether steps with drafts give more tokens a second than plain ones, as measured. The cost
table chooses lengths; this is the judge of whether to draft at all. Plain steps that were measured
long ago do not condemn drafts: the machine may be slower now, so some are run again before."""

from __future__ import annotations

# after so many steps with drafts, the least rate of theirs over the plain one with which they go on
_LEAST_RATES = {3: 0.5, 8: 0.75, 16: 0.9, 32: 0.98}
_PLAIN_STEPS = 3  # plain ones in a row: the first still verifies drafts, and is not measured
_MEASURED_EVERY = 256  # steps with drafts, after which plain ones are measured again
_MIN_OFF_STEPS, _MAX_OFF_STEPS = 512, 16384


class _Account:
    """Steps of about as many running requests."""

    __slots__ = ("again_s", "num_since", "num_steps", "num_tokens", "off_steps", "off_until",
                 "plain_s", "seconds", "slowest_s")  # fmt: skip

    def __init__(self) -> None:
        self.plain_s: float | None = None  # of a plain step for each of its rows
        self.again_s: list[float] | None = None  # plain steps run again, where drafts seem slow
        self.num_since = 0  # steps with drafts since plain ones were asked for
        self.off_until, self.off_steps = 0, _MIN_OFF_STEPS  # no drafts until; the next time
        self.begin()

    def begin(self) -> None:
        """Count steps with drafts from here on."""
        self.num_steps = self.num_tokens = 0
        self.seconds = self.slowest_s = 0.0

    def add_plain(self, row_s: float) -> None:
        if self.again_s is not None:
            self.again_s.append(row_s)
        if self.plain_s is not None:  # a disturbed step says little
            row_s = 0.8 * self.plain_s + 0.2 * min(row_s, 1.5 * self.plain_s)
        self.plain_s = row_s

    def add(self, num_tokens: int, seconds: float) -> None:
        self.num_steps, self.num_since = self.num_steps + 1, self.num_since + 1
        self.num_tokens, self.seconds = self.num_tokens + num_tokens, self.seconds + seconds
        self.slowest_s = max(self.slowest_s, seconds)

    def fails(self, least_rate: float) -> bool:
        """Whether drafts are slower, without the slowest step, which may have been disturbed."""
        num_tokens = self.num_tokens * (1 - 1 / self.num_steps)
        rest_s = self.seconds - self.slowest_s
        return self.plain_s is not None and self.plain_s * num_tokens < least_rate * rest_s


class Trial:
    """Counts what steps cost and give; by number of running requests."""

    def __init__(self) -> None:
        self._accounts: dict[int, _Account] = {}
        self._num_steps = self._num_accepted = 0  # of all steps; drafts of the next one
        self._num_plain = 0  # plain steps that are still to be measured
        self._was_plain = False

    def allows(self, num_rows: int) -> bool:
        """Whether the next step may draft."""
        if self._num_plain:
            self._num_plain -= 1
            return False
        return not self.is_off(num_rows)

    def is_off(self, num_rows: int) -> bool:
        """Whether drafts were found not to pay, and not long ago."""
        return self._account(num_rows).off_until > self._num_steps

    def accepted(self, count: int) -> None:
        """So many drafts of a step were accepted."""
        self._num_accepted += count

    def pass_steps(self, count: int) -> None:
        """So many steps go by."""
        self._num_steps += count

    def observe(self, num_rows: int, num_tokens: int, seconds: float, draft_steps: int) -> None:
        """A step of ``num_rows`` requests, ``num_tokens`` with drafts that it verified."""
        self.pass_steps(1)
        account, num_accepted = self._account(num_rows), self._num_accepted
        self._num_accepted = 0
        is_plain, was_plain = num_tokens == num_rows and not draft_steps, self._was_plain
        self._was_plain = is_plain
        if not is_plain:
            account.add(num_rows + num_accepted, seconds)
            self._judge(account)
        elif was_plain:
            account.add_plain(seconds / num_rows)

    def _account(self, num_rows: int) -> _Account:
        key = num_rows if num_rows <= 8 else 8 + num_rows // 8
        return self._accounts.setdefault(key, _Account())

    def _judge(self, account: _Account) -> None:
        judged = max((num for num in _LEAST_RATES if num <= account.num_steps), default=0)
        is_over, again_s = judged == max(_LEAST_RATES), account.again_s
        if not judged or not (account.num_steps == judged or again_s or is_over):
            return
        if again_s:
            account.plain_s, account.again_s = sum(again_s) / len(again_s), None
        if account.plain_s is None or account.num_since > _MEASURED_EVERY:
            self._num_plain, account.num_since = _PLAIN_STEPS, 0
        fails = account.fails(_LEAST_RATES[judged])
        if fails and not again_s:
            self._num_plain, account.again_s = _PLAIN_STEPS, []
            return
        if fails:
            account.off_until = self._num_steps + account.off_steps
            account.off_steps = min(2 * account.off_steps, _MAX_OFF_STEPS)
        elif is_over and account.plain_s is not None:
            account.off_steps = _MIN_OFF_STEPS
        if fails or is_over:
            account.begin()
