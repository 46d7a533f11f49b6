"""DraftLength: how many drafted tokens of each row are worth verifying in a step.

A step of R rows and D drafts yields R tokens and the drafts that are accepted, and costs what steps
of R + D tokens have cost. Drafts are taken by their survival, the surest first, up to the number at
which tokens per second are highest; none if that is not clearly better than no drafts at all.

A further path of a tree of drafts costs its own tokens and the one before them. Paths are taken by
the tokens that they are expected to add, up to the number at which the rate is highest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from radixlm.speculative.costs import CostTable, Float64Array
from radixlm.speculative.drafter import Proposal
from radixlm.speculative.trial import Trial
from radixlm.step.plan import Int32Array

Int64Array = NDArray[np.int64]

_MARGIN = 1.04  # of the rate without drafts, which drafts must pass
_DECAY = 0.88  # of what was observed of a request, by draft: old ones count for little
_REST = 0.97  # of it that is left after each step without drafts: bad luck is forgotten
_PRIOR_WEIGHT = 1.0  # drafts that the expectation counts for, against those observed
_ALPHA_RATE = 0.02
_PROBE_TOKENS = 64  # a request without drafts for so many steps gets one draft
_MAX_PROBE_STEPS = 128  # steps after which one of another size is run
_HELD_STEPS, _HELD_DEVICE_STEPS = 8, 32  # for which a choice of no drafts stands
# probes of the device's drafter are rarer, as they cost more: steps, rows, steps between
_DEVICE_PROBES, _PROBED_ROWS, _MAX_DEVICE_PROBE_STEPS = 3, 4, 1024
_JUDGED_ROWS = 8  # from which on drafts of the host are judged by what they gave, as the device's
_HOPELESS_STEPS = 16384  # between them where drafting costs more than the surest drafts would give
# share of a step that asking in vain may take, and the longest pauses by which it is kept: the
# first time, and when it was in vain again
_HOST_SHARE, _PAUSED_STEPS = 0.005, (8, 16, 32, 64)
_IDLE_STEPS = 64  # without proposals, after which it rests
_ASLEEP_STEPS = 7  # in a row for which nothing is asked or observed while it rests
_SEEN_STEPS, _SEEN_TOKENS = 32, 1024  # which it sees after a rest, before it proposes
_PATH_RATE = 0.05  # of the means of what further paths cost and give
_SUREST = 0.97  # chance of each draft where it is not known what will be drafted


class _History:
    """Of one request: its drafts that were accepted and that were compared (all accepted ones and
    the first refused one), and how many of these were expected to be accepted."""

    __slots__ = ("accepted", "chances", "expected", "quiet", "tried")

    def __init__(self) -> None:
        self.accepted = self.tried = self.expected = 0.0
        self.quiet = 0  # steps since it drafted
        self.chances: Float64Array | None = None  # of each draft of the last choice, by itself

    def rest(self, is_quiet: bool) -> None:
        """A step was planned, with drafts or (quiet) without."""
        self.quiet = self.quiet + 1 if is_quiet else 0
        if is_quiet:
            self.accepted, self.tried = _REST * self.accepted, _REST * self.tried
            self.expected *= _REST

    def calibrated(self, proposal: Proposal, count: int) -> Float64Array:
        """The survival of the first ``count`` drafts, by what came of earlier ones."""
        survival = proposal.survival[:count].astype(np.float64)
        before = np.concatenate(([1.0], survival[:-1]))
        chances: Float64Array = survival / np.maximum(before, 1e-6)
        self.chances = chances
        trust = (self.accepted + _PRIOR_WEIGHT) / (self.expected + _PRIOR_WEIGHT)
        calibrated: Float64Array = np.multiply.accumulate(np.minimum(chances * trust, 0.99))
        return calibrated


class DraftLength:
    """``max_drafts``: most drafts of a row. ``is_fixed``: the number was set by the user: a row
    drafts all that is proposed, with all paths, or nothing. ``always``: drafts are verified
    whatever they cost, to measure acceptance."""

    def __init__(
        self,
        max_drafts: int,
        is_fixed: bool = False,
        costs: CostTable | None = None,
        always: bool = False,
    ) -> None:
        self.max_drafts, self.is_fixed, self.always = max_drafts, is_fixed, always
        self.costs, self.trial = costs or CostTable(), Trial()
        self.is_off = False  # draft nothing, to measure what a plain run costs
        self._histories: dict[str, _History] = {}
        self._alpha = 0.6  # chance that a draft is accepted, of all requests
        self._num_held = 0  # steps for which the last choice stands
        self._num_steps = 0  # since the last probe
        self._probe_after, self._num_probes = 4, 0  # steps to the next; of one that runs
        self._num_seen, self._num_idle = _SEEN_STEPS, 0  # steps since a rest, and without proposals
        self._last_draft_steps, self._is_device = 0, False  # whether ``lens`` runs the probes
        self._num_vain = 0  # times in a row that asking was in vain
        self._probes_none = False  # the next probe drafts nothing, not more
        self._num_asleep = 0  # steps that the device's drafter rests in any case
        # of the last choice: each row's survival, and tokens of prompts beside them
        self._rows, self._other_tokens = list[Float64Array](), 0
        # tokens of further paths, and what they give, of a row that drafts; rows of the last
        # choice of paths, and what came of it so far
        self._path_tokens = self._path_gain = 0.0
        self._num_path_rows = self._num_gained = 0

    # ---- choices -----------------------------------------------------------------------------

    def room(self, num_rows: int, other_tokens: int = 0) -> int:
        """The most drafts of a row that could pay in a step of so many rows, and ``other_tokens``
        of prompts; 0: no drafter need be asked."""
        if self.is_off:
            return 0
        if self.always:
            return self.max_drafts
        if num_rows >= _JUDGED_ROWS and not self._is_device and not self.trial.allows(num_rows):
            return 0
        if self._is_probe_due:
            return self.max_drafts
        if self._holds():
            return 0
        depths = np.array(
            [0, *range(1 + self.is_fixed * (self.max_drafts - 1), self.max_drafts + 1)]
        )
        gains = num_rows * _SUREST * (1 - _SUREST**depths) / (1 - _SUREST)
        # rows that are all alike; or a quarter or half of them, with the shortest draft
        counts = num_rows * np.array([0, 0.25 * depths[1], 0.5 * depths[1], *depths[1:]])
        gains = np.interp(counts, num_rows * depths, gains)
        rates = (num_rows + gains) / self.costs.seconds(counts + (num_rows + other_tokens))
        best = int(rates.argmax())
        self._hold(is_none := rates[best] <= _MARGIN * rates[0])
        return 0 if is_none else int(depths[max(1, best - 2)])

    def pause(self, host_s: float, num_tokens: int) -> int:
        """Steps for which the drafters on the host need not be asked again: asking took
        ``host_s``, and nothing was worth a place in a step of ``num_tokens``."""
        if self.always:
            return 0
        step_s = float(self.costs.seconds(np.array([num_tokens]))[0])
        longest = _PAUSED_STEPS[min(self._num_vain, len(_PAUSED_STEPS) - 1)]
        self._num_vain += 1
        return min(longest, int(host_s / (_HOST_SHARE * step_s)))

    def choose(
        self, rids: Sequence[str], proposals: Sequence[Proposal], other_tokens: int = 0
    ) -> Int32Array:
        """How many drafts of each row to verify, int32 [rows]."""
        histories = [self._histories.setdefault(rid, _History()) for rid in rids]
        rows = [
            history.calibrated(proposal, self.max_drafts)
            for history, proposal in zip(histories, proposals, strict=True)
        ]
        sizes = np.array([len(row) for row in rows], np.int32)
        self._rows, self._other_tokens = rows, other_tokens
        if self.always:
            lens = sizes
        else:
            lens, _ = self._best(rows, other_tokens, proposals)
            if lens.any():
                self._num_vain = 0
            lens = self._with_probes(lens, sizes, histories)
        for history, count in zip(histories, lens.tolist(), strict=True):
            history.rest(is_quiet=not count)
        return lens

    def choose_paths(self, proposals: Sequence[Proposal], lens: Int64Array) -> Int64Array:
        """How many further paths of each row to verify, int64 [rows], where ``lens`` drafts of its
        first path are."""
        counts = np.array([len(one.others) for one in proposals]) * (lens > 0)
        if self.always or self.is_fixed or not counts.any():
            return counts
        rows, num_known = np.repeat(np.arange(len(counts)), counts), len(counts)
        gains = np.concatenate([self._gains(n, one) for n, one in enumerate(proposals) if lens[n]])
        widths = np.array([1 + len(path.tokens) for n, one in enumerate(proposals) if lens[n]
                           for path in one.others])  # fmt: skip
        order = np.argsort(-gains, kind="stable")
        num_drafts = zip(self._rows, lens.tolist(), strict=True)
        expected = num_known + sum(float(row[:num].sum()) for row, num in num_drafts)
        given = expected + np.append(0.0, np.cumsum(gains[order]))
        num_tokens = num_known + int(lens.sum()) + self._other_tokens
        rates = given / self.costs.seconds(num_tokens + np.append(0, np.cumsum(widths[order])))
        best = int(rates.argmax())
        return np.bincount(rows[order[:best]], minlength=num_known)

    def _gains(self, row: int, proposal: Proposal) -> Float64Array:
        """Of each further path, by what came of earlier drafts."""
        trust = float(self._rows[row].sum()) / max(float(proposal.survival.sum()), 1e-6)
        return trust * np.array([path.gain for path in proposal.others], np.float64)

    def chose_paths(self, num_rows: int, num_tokens: int) -> None:
        """Of ``num_rows`` rows that draft, further paths of ``num_tokens`` tokens are verified."""
        if self._num_path_rows:
            gain = self._num_gained / self._num_path_rows
            self._path_gain += _PATH_RATE * (gain - self._path_gain)
        self._path_tokens += _PATH_RATE * (num_tokens / num_rows - self._path_tokens)
        self._num_path_rows, self._num_gained = num_rows, 0

    def gained(self, count: int) -> None:
        """A further path has given so many tokens more than the first."""
        self._num_gained += count
        self.trial.accepted(count)

    def sleeps(self) -> bool:
        """Whether the device's drafter rests in the next step too, so that nothing is asked."""
        is_asleep = self.is_asleep
        self._num_asleep -= is_asleep
        return is_asleep

    @property
    def is_asleep(self) -> bool:
        """Whether it rests for some steps more; they need not be observed."""
        return self._num_asleep > 0

    def lens(self, rids: Sequence[str], other_tokens: int = 0) -> Int32Array | None:
        """How many tokens the device's drafter is to propose for each row, int32 [rows]: its draft
        steps cost time before it is known what they propose. None: it rests, and need not see the
        step; it sees some steps again before the next proposal."""
        if self.is_off:
            self._rest()
            return None
        if self.always:
            return np.full(len(rids), self.max_drafts, np.int32)
        self._is_device = True
        self._num_held -= 1
        is_due = self._num_probes > 0 or self._num_steps >= self._probe_after
        is_due &= not self.trial.is_off(len(rids))
        if (self._num_held >= 0 and not is_due) or not rids:
            return self._no_drafts(len(rids))
        lens = self._best_lens([self._alpha_of(rid) for rid in rids], other_tokens)
        is_none = not (lens.any() and self.trial.allows(len(rids)))
        self._num_held = _HELD_DEVICE_STEPS if not lens.any() else 0
        if is_none and is_due and self._is_hopeless(len(rids), other_tokens):
            is_due, self._probe_after = False, _HOPELESS_STEPS
        if is_none and not is_due:
            return self._no_drafts(len(rids))
        self._num_seen, self._num_idle = self._num_seen + 1, 0
        if self._num_seen <= min(_SEEN_STEPS, _SEEN_TOKENS // len(rids)):
            return np.zeros_like(lens)
        if not is_due:
            return lens
        if not self._num_probes:
            self._num_probes = _DEVICE_PROBES if is_none else 1
            self._space_probes(_MAX_DEVICE_PROBE_STEPS if is_none else _MAX_PROBE_STEPS)
        self._num_probes -= 1
        lens[:] = 0
        if is_none:  # some rows tell enough
            lens[:_PROBED_ROWS] = self.max_drafts if self.is_fixed else 1
        return lens

    def _is_hopeless(self, rows: int, other_tokens: int) -> bool:
        """Whether no acceptance would pay for the device's drafter, by costs that were measured."""
        if self._num_probes or self._probe_after >= _HOPELESS_STEPS:
            return False
        return not self._best_lens([_SUREST] * rows, other_tokens).any()

    def _no_drafts(self, rows: int) -> Int32Array | None:
        """The device's drafter proposes nothing; it rests if it will not for long."""
        self._num_idle += 1
        is_off = self.trial.is_off(rows)
        is_soon = self._num_steps + _SEEN_STEPS >= self._probe_after and not is_off
        if (self._num_idle > _IDLE_STEPS or is_off) and not is_soon:
            self._num_seen = 0
            self._rest()
            return None
        self._num_seen += 1
        return np.zeros(rows, np.int32)

    def _rest(self) -> None:
        """In this step and some more, which count here already."""
        self._num_asleep = _ASLEEP_STEPS
        self.costs.forget_last()
        self._num_held -= _ASLEEP_STEPS
        self._num_steps += _ASLEEP_STEPS
        self.trial.pass_steps(_ASLEEP_STEPS)

    def _space_probes(self, most: int = _MAX_PROBE_STEPS) -> None:
        """A probe runs now; the next one is due later than this one was."""
        self._num_steps, self._probe_after = 0, min(self._probe_after * 3 // 2, most)

    def _alpha_of(self, rid: str) -> float:
        history = self._histories.get(rid) or _History()
        accepted = history.accepted + _PRIOR_WEIGHT * self._alpha
        return min(accepted / (history.tried + _PRIOR_WEIGHT), 0.99)

    def _best_lens(self, alphas: Sequence[float], other_tokens: int) -> Int32Array:
        """Drafts of each row at which tokens per second are highest, draft steps included, where
        each draft is accepted with the row's chance."""
        rows, most = len(alphas), self.max_drafts
        survival = np.array(alphas)[:, None] ** np.arange(1.0, most + 1)
        steps = np.array([0, most]) if self.is_fixed else np.arange(most + 1)
        plain_s, twice_s = self.costs.seconds(rows * np.array([1, 2]) + other_tokens)
        # a draft must gain more than its place in the step costs
        is_taken = survival >= (0.0 if self.is_fixed else (twice_s - plain_s) / plain_s)
        is_first = np.append(0, np.full(most, is_taken[:, 0].sum()))
        gains = np.append(0.0, np.cumsum((survival * is_taken).sum(axis=0)))
        gains = (gains + self._path_gain * is_first)[steps]
        counts = np.append(0, np.cumsum(is_taken.sum(axis=0)))
        counts = (counts + self._path_tokens * is_first)[steps]
        forward_s = self.costs.seconds(counts + (rows + other_tokens))
        rates = (rows + gains) / (forward_s + self.costs.drafts_s(steps))
        best = int(rates.argmax())
        if rates[best] <= _MARGIN * rates[0]:
            return np.zeros(rows, np.int32)
        lens: Int32Array = is_taken[:, : steps[best]].sum(axis=1, dtype=np.int32)
        return lens

    def _holds(self) -> bool:
        """Whether the last choice of no drafts stands for this step: it is made every few steps."""
        self._num_held -= 1
        return self._num_held >= 0 and not self._is_probe_due

    def _hold(self, is_none: bool) -> None:
        self._num_held = _HELD_STEPS if is_none else 0

    def _best(
        self, rows: Sequence[Float64Array], other_tokens: int, proposals: Sequence[Proposal] = ()
    ) -> tuple[Int32Array, float]:
        """Drafts of each row at which tokens per second are highest, and that rate over the rate
        without drafts; (zeros, 0) if none is worth it. ``rows``: survival by depth; of the
        ``proposals`` only further paths count."""
        none = np.zeros(len(rows), np.int32)
        sizes = np.array([len(row) for row in rows])
        if self.is_fixed:  # a row is taken whole
            owners = np.argsort([-float(row.mean()) if len(row) else 0.0 for row in rows])
            gains, widths = np.array([row.sum() for row in rows]), sizes
            if any(one.others for one in proposals):
                gains = gains + [self._gains(n, one).sum() for n, one in enumerate(proposals)]
                widths = widths + [
                    sum(1 + len(path.tokens) for path in one.others) for one in proposals
                ]
            gains, widths = gains[owners], widths[owners]
        else:  # survival falls with depth, so that a row's drafts are taken from the first on
            flat = np.concatenate(rows) if rows else np.zeros(0)
            order = np.argsort(-flat, kind="stable")
            owners = np.repeat(np.arange(len(rows)), sizes)[order]
            gains, widths = flat[order], np.ones(len(flat), np.int64)
        counts = len(rows) + other_tokens + np.concatenate(([0], np.cumsum(widths)))
        gains = np.concatenate(([0.0], np.cumsum(gains)))
        rates = (len(rows) + gains) / self.costs.seconds(counts)
        best = int(rates.argmax())
        if not best or rates[best] <= _MARGIN * rates[0]:
            return none, 0.0
        chosen = owners[:best]
        if self.is_fixed:
            none[chosen] = sizes[chosen]
        else:
            none += np.bincount(chosen, minlength=len(rows)).astype(np.int32)
        return none, float(rates[best] / rates[0])

    @property
    def _is_probe_due(self) -> bool:
        return self._num_steps >= self._probe_after

    def _with_probes(
        self, lens: Int32Array, sizes: Int32Array, histories: Sequence[_History]
    ) -> Int32Array:
        """The lengths with one draft for each row that has been quiet. When a probe is due, they
        are replaced by none or by more drafts: only steps of several sizes tell their costs."""
        if self._is_probe_due and not self._is_device:
            self._space_probes()
            self._probes_none = bool(lens.any()) and not self._probes_none
            if self._probes_none:
                return np.zeros_like(lens)
            more = np.minimum(np.maximum(2 * lens, np.arange(len(lens)) % 4 == 0), sizes)
            return np.where(more > 0, sizes, 0).astype(np.int32) if self.is_fixed else more
        for row, history in enumerate(histories):
            if history.quiet >= _PROBE_TOKENS and not lens[row]:
                lens[row] = sizes[row] if self.is_fixed else min(1, sizes[row])
        return lens

    # ---- what came of them -------------------------------------------------------------------

    def observe_step(
        self, num_rows: int, num_tokens: int, seconds: float, draft_steps: int = 0
    ) -> None:
        """A step that only decoded ``num_rows`` requests computed ``num_tokens`` in ``seconds``,
        with ``draft_steps`` of the device's drafter."""
        self._num_steps += 1
        if self._is_device or num_rows >= _JUDGED_ROWS:
            self.trial.observe(num_rows, num_tokens, seconds, draft_steps)
        # the first draft after a rest also writes what waited; steps without any tell little
        is_first = draft_steps > 0 == self._last_draft_steps
        self._last_draft_steps = draft_steps
        if not is_first and not (num_tokens == num_rows and self._num_held > 0):
            self.costs.observe(num_tokens, seconds, draft_steps)

    def pass_steps(self, count: int) -> None:
        """So many steps more went by in one that decoded several tokens in turn."""
        num_asleep = min(count, self._num_asleep)  # which count already
        self._num_asleep -= num_asleep
        self._num_steps += count - num_asleep
        self._num_held -= count - num_asleep
        self.trial.pass_steps(count - num_asleep)

    def skip_step(self) -> None:
        """A step also computed prompts: its time says nothing about drafts."""
        self.costs.forget_last()

    def observe(self, rid: str, drafted: int, accepted: int) -> None:
        """Of ``drafted`` tokens of a request, the first ``accepted`` were."""
        if not drafted:
            return
        self.trial.accepted(accepted)
        history = self._histories.setdefault(rid, _History())
        tried = min(drafted, accepted + 1)
        expected = float(tried * self._alpha)
        if history.chances is not None and len(history.chances) >= tried:
            expected = float(history.chances[:tried].sum())
        kept = _DECAY**tried
        mean = (1 - kept) / (1 - _DECAY) / tried
        history.accepted = kept * history.accepted + mean * accepted
        history.tried = kept * history.tried + mean * tried
        history.expected = kept * history.expected + mean * expected
        self._alpha += _ALPHA_RATE * (accepted - tried * self._alpha)

    def forget(self, rid: str) -> None:
        """The request is over."""
        self._histories.pop(rid, None)
