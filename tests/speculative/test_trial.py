"""Trial: drafts go on while they give more tokens a second than plain steps, and only then."""

import numpy as np
import pytest

from radixlm.speculative.trial import Trial


def drafted_share(accepted: float, steps: int, trial: Trial, rows: int = 2) -> float:
    """Share of steps with drafts; such a step takes 1.5 of a plain one."""
    rng, count, was_drafting = np.random.default_rng(0), 0, False
    for _ in range(steps):
        drafts = trial.allows(rows)
        seconds = 0.01 * (1.5 if drafts else 1.0) * float(rng.normal(1, 0.05))
        for _ in range(rows if was_drafting else 0):
            trial.accepted(int(rng.random() < accepted))
        trial.observe(rows, rows * (1 + was_drafting), seconds, int(drafts))
        count, was_drafting = count + drafts, drafts
    return count / steps


@pytest.mark.parametrize(
    ("accepted", "pays"), [(0.9, True), (0.75, True), (0.3, False), (0, False)]
)
def test_drafts_that_pay_go_on(accepted: float, pays: bool) -> None:
    trial = Trial()
    drafted_share(accepted, 2000, trial)
    share = drafted_share(accepted, 4000, trial)
    assert share > 0.97 if pays else share < 0.03


def test_drafts_that_begin_to_pay_are_found() -> None:
    trial = Trial()
    assert drafted_share(0.0, 3000, trial) < 0.1
    assert drafted_share(0.9, 12000, trial) > 0.4


def test_another_number_of_requests_is_judged_by_itself() -> None:
    trial = Trial()
    drafted_share(0.9, 500, trial, rows=2)
    assert drafted_share(0.0, 3000, trial, rows=32) < 0.1


def test_numbers_of_requests_that_come_and_go_are_judged_in_the_end() -> None:
    """Drafts pay for one request, not for four; each number runs for five steps."""
    trial, num_drafted = Trial(), {1: 0, 4: 0}
    for number in range(2000):
        rows = 1 if number // 5 % 2 else 4
        drafts = trial.allows(rows)
        trial.accepted(drafts * rows)
        trial.observe(rows, rows * (1 + drafts), 0.01 * (1 + drafts * rows * 0.3), int(drafts))
        num_drafted[rows] += drafts
    assert num_drafted[1] > 900
    assert num_drafted[4] < 200


def test_a_slower_machine_ends_no_drafts() -> None:
    """All steps take twice as long from some moment on, in the middle of a trial."""
    for begins in range(60, 90):
        trial, num_drafted = Trial(), 0
        for number in range(400):
            drafts = trial.allows(1)
            num_drafted += drafts
            trial.accepted(drafts)
            seconds = 0.015 if drafts else 0.01
            trial.observe(1, 1 + drafts, seconds * (1 + (number >= begins)), int(drafts))
        assert num_drafted > 350


def test_one_disturbed_step_ends_no_drafts() -> None:
    trial, num_drafted = Trial(), 0
    for _ in range(40):
        drafts = trial.allows(1)
        num_drafted += drafts
        trial.accepted(drafts)
        seconds = 0.015 * (10 if num_drafted == 2 else 1) if drafts else 0.01
        trial.observe(1, 1 + drafts, seconds, int(drafts))
    assert num_drafted > 30
