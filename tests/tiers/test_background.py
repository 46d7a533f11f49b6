"""Long work in the background rests while the other threads of the process are busy."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from radixlm.tiers import background
from radixlm.tiers.background import Background


@pytest.mark.parametrize(("others_s", "rest_s"), [(0.0, 0.0), (0.09, 0.0), (0.9, 0.5), (1.8, 0.5)])
def test_it_rests_while_others_work(
    monkeypatch: pytest.MonkeyPatch, others_s: float, rest_s: float
) -> None:
    """One second passes, in which it and the others use so much CPU."""
    own_s = 0.005
    now = SimpleNamespace(wall=100.0, all=7.0, own=3.0)
    clocks = {"monotonic": "wall", "process_time": "all", "thread_time": "own"}
    fakes = {name: lambda field=field: getattr(now, field) for name, field in clocks.items()}
    monkeypatch.setattr(background, "time", SimpleNamespace(**fakes))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    rests: list[float] = []
    thread = Background("test")
    monkeypatch.setattr(thread._is_closing, "wait", rests.append)
    thread.rest()
    now.wall, now.all, now.own = now.wall + 1, now.all + own_s + others_s, now.own + own_s
    rests.clear()
    thread.rest()
    assert rests == pytest.approx([rest_s] if rest_s else [])


def test_the_end_does_not_wait_for_a_rest() -> None:
    thread = Background("test")
    thread.close(1)
    assert thread._is_closing.wait(0)
