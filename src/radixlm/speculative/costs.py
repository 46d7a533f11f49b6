"""CostTable: what a step of so many tokens costs, learnt from the steps themselves."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]

_LEVEL_RATE = 0.2
_SHAPE_RATE, _FIRST_RATE = 0.15, 0.5
_MAX_ERROR = 0.3  # of one step, in log seconds: a step that was disturbed says little
_REACHES = (0.4, 1.5)  # a node moves others at distance d (log tokens) by the mean exp(-d / reach)


class CostTable:
    """Seconds of a step: exp(level + shape[tokens]), and with draft steps on the device
    first_draft_s + draft_s * draft steps more.

    Only two steps in a row of different sizes say something about the shape (the kernels) and about
    the draft steps: the level moves with the length of the contexts and
    with the machine's load. ``slope`` is what one token more costs, over a step of one token,
    before anything was measured; ``draft_share`` what a draft step costs."""

    def __init__(self, slope: float = 0.08, draft_share: float = 0.0) -> None:
        self._nodes = np.unique(np.geomspace(1, 4096, 60).astype(int)).astype(np.float64)
        self._shape = np.log1p(slope * (self._nodes - 1))
        self._level: float | None = None
        self._draft_share = draft_share
        self.draft_s = self.first_draft_s = 0.0
        self._last: tuple[int, int, float] | None = None  # tokens, draft steps, seconds
        self._num_contrasts, self._num_draft_contrasts = 0, [0, 0]

    def observe(self, num_tokens: int, seconds: float, draft_steps: int = 0) -> None:
        """A step of ``num_tokens`` and ``draft_steps`` of the device's drafter took so long."""
        if seconds <= 0:
            return
        if self._level is None:
            self.draft_s = seconds * self._draft_share / (1 + self._draft_share * draft_steps)
            self._level = math.log(seconds - self.draft_s * draft_steps) - self._log(num_tokens)
        trust = 0.0
        if self._last is not None:
            trust = self._contrast(*self._last, num_tokens, draft_steps, seconds)
        self._last = num_tokens, draft_steps, seconds
        forward_s = max(seconds - float(self.drafts_s(draft_steps)), 0.1 * seconds)
        error = math.log(forward_s) - self._level - self._log(num_tokens)
        if trust <= _LEVEL_RATE:
            error, trust = min(max(error, -_MAX_ERROR), _MAX_ERROR), _LEVEL_RATE
        self._level += trust * error

    def forget_last(self) -> None:
        """The next step does not follow the last one (a prefill came between them)."""
        self._last = None

    def _contrast(
        self, tokens: int, steps: int, seconds: float, new_tokens: int, new_steps: int, new_s: float
    ) -> float:
        """Compare two steps in a row; how much the second one's level is to be trusted."""
        if steps != new_steps:
            expected = self._forward_s(new_tokens) - self._forward_s(tokens)
            expected += float(self.drafts_s(new_steps) - self.drafts_s(steps))
            return self._contrast_drafts(steps, new_steps, new_s - seconds - expected)
        if tokens != new_tokens:
            drafts_s = float(self.drafts_s(steps))
            old_s, now_s = max(seconds - drafts_s, 1e-9), max(new_s - drafts_s, 1e-9)
            error = math.log(now_s / old_s) - self._log(new_tokens) + self._log(tokens)
            self._num_contrasts += 1
            rate = max(_SHAPE_RATE, _FIRST_RATE / self._num_contrasts**0.5)
            error *= rate * min(1.0, _MAX_ERROR * rate / _SHAPE_RATE / max(abs(error), 1e-9))
            for count, sign in ((new_tokens, 0.5), (tokens, -0.5)):
                distance = np.abs(np.log(self._nodes / count))
                near = sum(np.exp(-distance / reach) for reach in _REACHES) / len(_REACHES)
                self._shape += sign * error * near
        return 0.0

    def _contrast_drafts(self, steps: int, new_steps: int, error_s: float) -> float:
        """So many draft steps more cost so much more than expected; the share of the difference
        that is believed."""
        is_first = not (steps and new_steps)  # what drafting costs at all, or one step more
        self._num_draft_contrasts[is_first] += 1
        # it may be far from the share of a step that was assumed: the first contrasts tell
        rate = max(_SHAPE_RATE, 1 / self._num_draft_contrasts[is_first])
        error = error_s / (new_steps - steps) * (max(steps, new_steps) if is_first else 1)
        most = _MAX_ERROR / _SHAPE_RATE * max(self._forward_s(1), float(self.drafts_s(1))) * rate
        error = rate * min(max(error, -most), most)
        # the first draft step is never cheaper than further ones: it also writes what waited
        if is_first:
            self.first_draft_s += error
            self.draft_s = max(0.0, self.draft_s + min(0.0, self.first_draft_s))
            self.first_draft_s = max(0.0, self.first_draft_s)
        else:  # what as many steps as now cost stays the same
            mean_steps = (steps + new_steps) / 2
            error = min(max(error, -self.draft_s), self.first_draft_s / mean_steps)
            self.draft_s += error
            self.first_draft_s -= error * mean_steps
        return rate

    def _log(self, num_tokens: int) -> float:
        return float(np.interp(num_tokens, self._nodes, self._shape))

    def _forward_s(self, num_tokens: int) -> float:
        return math.exp(self._log(num_tokens) + (self._level or 0.0))

    def seconds(self, num_tokens: NDArray[np.int64] | Float64Array) -> Float64Array:
        """Seconds of steps of so many tokens, more for more of them; relative to a step of one
        token before any was measured."""
        log_s = np.maximum.accumulate(np.interp(num_tokens, self._nodes, self._shape))
        return np.exp(log_s + (self._level or 0.0))

    def drafts_s(self, steps: NDArray[np.int64] | int) -> Float64Array:
        """Seconds of so many draft steps on the device."""
        return self.draft_s * np.asarray(steps) + self.first_draft_s * (np.asarray(steps) > 0)
