"""Few pages of window layers: a request that runs alone always gets on."""

from __future__ import annotations

import pytest

from tests.fakes.executor import reference
from tests.fakes.scheduler_harness import SchedulerHarness

WINDOW, PAGE, STEP = 20, 2, 8
PROMPT = [1 + i % 7 for i in range(30)]


@pytest.mark.parametrize("length", [10, 30, 90])
def test_a_request_decodes_past_the_window_that_it_has_locked(length: int) -> None:
    """The pool has what ``engine/memory.py`` gives it at least."""
    num_window = WINDOW // PAGE + (WINDOW + STEP) // PAGE + 3
    harness = SchedulerHarness(
        num_pages=120, page_size=PAGE, window=WINDOW, num_window=1 + num_window, step_tokens=STEP
    )
    for rid in ("first", "hit"):
        harness.submit(rid, PROMPT, length, ignore_eos=True)
        harness.run(600)
        assert harness.out[rid] == reference(PROMPT, length, ignore_eos=True)
    assert harness.cached["hit"] == len(PROMPT) - 1


def test_a_hit_is_admitted_where_its_own_window_is_most_of_the_pool() -> None:
    harness = SchedulerHarness(
        num_pages=21, page_size=PAGE, window=WINDOW, num_window=21, step_tokens=STEP
    )
    for rid in ("first", "hit"):
        harness.submit(rid, PROMPT, 8, ignore_eos=True)
        harness.run(600)
        assert harness.out[rid] == reference(PROMPT, 8, ignore_eos=True)
    assert harness.cached["hit"] == len(PROMPT) - 1
