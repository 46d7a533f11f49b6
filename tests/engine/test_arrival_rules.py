"""When pages are fetched: speeds that were measured, and what is not known yet."""

from __future__ import annotations

import pytest

from radixlm.engine.features.arrival_rules import ArrivalOptions, FetchRules
from radixlm.tiers.base import Done

PAGE = 1000  # bytes, of 16 tokens


class _Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def _rules(tokens_per_s: float) -> FetchRules:
    """Rules of a model whose prompts were computed at that rate."""
    clock = _Clock()
    rules = FetchRules(ArrivalOptions(page_size=16, page_bytes=(PAGE, 0)), clock)
    clock.now_s = 10.0
    rules.computed(int(tokens_per_s * 10), 0.0)
    return rules


def _fetch(rules: FetchRules, num_pages: int, seconds: float) -> None:
    rules.fetched(Done(0, num_pages, [("storage", num_pages, num_pages * PAGE, seconds)], seconds))


def test_a_slow_first_fetch_of_few_pages_says_nothing_about_many() -> None:
    rules = _rules(1600)  # 10 ms a page
    assert rules.pays(3, None)
    _fetch(rules, 3, 0.040)  # a cold disk: slower than computing
    assert not rules.pays(3, None) and rules.pays(64, None)
    _fetch(rules, 64, 0.070)
    assert rules.pays(64, None) and rules.pays(20, None) and not rules.pays(3, None)


def test_a_slow_tier_is_refused_and_tried_again_ever_less_often() -> None:
    rules = _rules(1600)
    gaps, gap = [], 0
    for _ in range(300):
        if rules.pays(64, None):
            gaps, gap = [*gaps, gap], 0
            _fetch(rules, 64, 5.0)
        else:
            gap += 1
    assert gaps == [0, 7, 15, 31, 63, 63, 63]


def test_a_tier_that_was_slow_once_is_used_again() -> None:
    rules = _rules(1600)
    _fetch(rules, 64, 5.0)
    refused = 0
    while not rules.pays(64, None):
        refused += 1
    for _ in range(9):  # it is fast again, and the average follows
        _fetch(rules, 64, 0.05)
    assert refused == 7 and rules.pays(64, None)


def test_fetches_of_one_size_give_their_rate() -> None:
    rules = _rules(1600)
    for _ in range(3):
        _fetch(rules, 10, 0.05)
    assert rules.pays(10, None) and rules.stats()["fetch_bytes_per_s"] == pytest.approx(200_000)


def test_the_policy_timeout_has_a_base_a_slope_and_an_end() -> None:
    now = [0.0]
    options = ArrivalOptions(16, "timeout", 1.0, 0.5, timeout_max_s=3.0)
    rules = FetchRules(options, lambda: now[0])
    for num_pages, limit_s in ((64, 1.5), (128, 2.0), (6400, 3.0)):
        now[0] = limit_s
        assert not rules.is_late(0.0, num_pages, None)
        now[0] = limit_s + 0.01
        assert rules.is_late(0.0, num_pages, None)
