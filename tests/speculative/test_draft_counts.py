"""DraftCounts: per request, in all, and since a flush."""

from __future__ import annotations

from radixlm.speculative.draft_counts import DraftCounts


def test_counts_of_requests_and_of_all() -> None:
    counts = DraftCounts(has_drafter=True)
    assert counts.of("a") == ([], 0)
    assert counts.accept_len == 0
    for rid, drafted, accepted in (("a", 3, 3), ("b", 2, 0), ("a", 3, 1), ("a", 1, 1)):
        counts.add(rid, drafted, accepted)
    assert counts.of("a") == ([0, 2, 0, 1], 7)
    assert counts.of("b") == ([1], 2)
    totals = counts.totals
    assert (totals.num_rounds, totals.num_drafted, totals.num_accepted) == (4, 9, 5)
    assert counts.accept_len == 1 + 5 / 4
    counts.forget("a")
    counts.forget("a")
    assert counts.of("a") == ([], 0)
    assert counts.totals.num_rounds == 4


def test_a_flush_begins_the_mean_again_and_keeps_totals() -> None:
    counts = DraftCounts(has_drafter=True)
    counts.add("a", 3, 0)
    counts.flush()
    assert counts.accept_len == 0
    counts.add("a", 3, 2)
    assert counts.accept_len == 3
    assert counts.totals.num_rounds == 2


def test_without_a_drafter_requests_show_no_counts() -> None:
    counts = DraftCounts(has_drafter=False)
    counts.add("a", 3, 2)
    assert counts.of("a") == (None, 0)
    assert counts.totals.num_accepted == 2
