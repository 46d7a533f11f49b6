"""NgramDrafter: what it proposes, to whom, and how sure it is."""

import numpy as np
import pytest

from radixlm.base.errors import InvalidRequest, NotFound
from radixlm.speculative.ngram import NgramDrafter, NgramOptions
from radixlm.speculative.text_index import SEPARATOR

QUOTE = list(range(100, 130))


def drafter(**options: int | bool) -> NgramDrafter:
    return NgramDrafter(NgramOptions(**options), vocab_size=1000, never=frozenset({999}))


def ids(*parts: list[int]) -> np.ndarray:
    return np.array([token for part in parts for token in part], np.int32)


def tokens(d: NgramDrafter, rid: str, count: int = 8) -> list[int]:
    return d.propose(rid, count).tokens.tolist()


def test_copies_from_its_own_prompt() -> None:
    d = drafter()
    d.start("a", None, ids(QUOTE, [1, 2, 3], QUOTE[:3]))
    found = d.propose("a", 8)
    assert found.tokens.tolist() == QUOTE[3:11]
    assert found.tokens.dtype == np.int32
    assert found.survival.dtype == np.float32
    assert (np.diff(found.survival) <= 0).all()
    d.append("a", [*QUOTE[3:11], 103])  # QUOTE[10], 103 is new: it may replace QUOTE[11]
    assert tokens(d, "a", 2) == QUOTE[12:14]
    d.append("a", [104, 105])
    assert tokens(d, "a") == QUOTE[6:14]


def test_goes_on_behind_a_token_that_was_replaced() -> None:
    d = drafter()
    d.start("a", None, ids(QUOTE, [1, 2], QUOTE[:4]))
    assert tokens(d, "a", 3) == QUOTE[4:7]
    d.append("a", [QUOTE[4], 77])
    assert tokens(d, "a", 3) == QUOTE[6:9]
    d.append("a", [78])  # nor that: the copy is over
    assert tokens(d, "a", 3) == []
    d.append("a", QUOTE[20:22])
    assert tokens(d, "a", 3) == QUOTE[22:25]


def test_no_copy_beyond_the_end_of_its_source() -> None:
    d = drafter()
    d.add_corpus("c", ids([5, 6, 7]))
    d.start("a", None, ids([1, 5, 6]))
    assert tokens(d, "a", 1) == [7]
    d.append("a", [8])
    assert tokens(d, "a") == []


def test_no_draft_without_a_match_of_two_tokens() -> None:
    d = drafter()
    d.start("a", None, ids([1, 2, 3, 4, 2]))
    assert tokens(d, "a") == []
    d = drafter(min_match=3)
    d.start("a", None, ids([1, 2, 3, 4, 2, 3]))
    assert tokens(d, "a") == []


def test_the_latest_or_the_most_frequent_continuation() -> None:
    text = ids([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 7, 6, 1, 2])
    for by_frequency, first in ((False, 7), (True, 3)):
        d = drafter(by_frequency=by_frequency)
        d.start("a", None, text)
        assert tokens(d, "a", 1) == [first]


def test_divided_continuations_survive_less() -> None:
    d = drafter()
    d.start("sure", None, ids([1, 2, 3, 5, 1, 2, 3, 6, 1, 2]))
    d.start("torn", None, ids([1, 2, 4, 5, 1, 2, 3, 6, 1, 2]))
    assert d.propose("sure", 1).survival[0] == pytest.approx(2 * d.propose("torn", 1).survival[0])


def test_learns_what_matches_are_worth() -> None:
    d = drafter(capacity=0)
    for trial in range(60):
        d.start("a", None, ids(QUOTE, [1, 2], QUOTE[:4]))
        before = d.propose("a", 4).survival
        d.append("a", [5, 6] if trial < 30 else QUOTE[4:9])
        d.finish("a")
        if trial in (0, 30):
            first = before
        if trial == 29:
            assert before[0] < 0.5 * first[0]
    assert before[0] > 2 * first[0]


def test_texts_are_shared_within_a_namespace_only() -> None:
    d = drafter()
    d.start("a", "tenant", ids([1, 2, 3]))
    d.append("a", QUOTE)
    d.finish("a")
    d.start("b", "tenant", ids([1, 2, 3]))
    d.start("c", "other", ids([1, 2, 3]))
    assert tokens(d, "b") == QUOTE[:8]  # the same prompt: its answer is known from its start
    assert tokens(d, "c") == []
    d.append("c", QUOTE[:5])
    assert tokens(d, "c") == []
    d.flush()
    assert tokens(d, "b") == []


def test_prompts_of_others_are_not_shared() -> None:
    d = drafter(depth=2)
    d.start("a", None, ids(QUOTE, [1, 2]))
    d.append("a", [3, 4])
    d.finish("a")
    d.start("b", None, ids(QUOTE[:5]))
    assert tokens(d, "b") == []


def test_own_text_before_a_shared_one_of_equal_match() -> None:
    d = drafter()
    d.start("a", None, ids([9]))
    d.append("a", [1, 2, 50, 51])
    d.finish("a")
    d.start("b", None, ids([1, 2, 60, 1, 2]))
    assert tokens(d, "b", 1) == [60]
    d.start("c", None, ids([1, 2, 60, 9, 1, 2]))  # the shared match is longer
    assert tokens(d, "c", 2) == [50, 51]


def test_capacity_evicts_the_namespace_used_least_recently() -> None:
    d = drafter(capacity=100)
    for number in range(12):
        d.start("a", f"tenant {number % 3}", ids([1]))
        d.append("a", [10 * number + place for place in range(9)])
        d.finish("a")
        assert d._shared.num_tokens <= 100
    d.start("new", "tenant 2", ids([110, 111, 112]))
    assert tokens(d, "new", 2) == [113, 114]
    for first in range(10, 100, 30):  # tenant 1 was the oldest when there was no room for text 9
        d.start("old", "tenant 1", ids([first, first + 1, first + 2]))
        assert tokens(d, "old") == []
    d.start("long", "tenant 2", ids([1]))
    d.append("long", list(range(80)))  # more than half of what may be kept
    d.finish("long")
    assert d._shared.num_tokens <= 100


def test_stops_before_what_cannot_be_drafted() -> None:
    for bad in (999, 1000, -5):
        d = drafter()
        d.start("a", None, ids([1, 2, 3, bad, 4, 1, 2]))
        assert tokens(d, "a") == [3]
        d.start("b", None, ids([1, 2, bad, 4, 1, 2]))
        assert tokens(d, "b") == []


def test_unknown_requests_are_ignored() -> None:
    d = drafter()
    d.append("nobody", [1])
    d.finish("nobody")
    assert tokens(d, "nobody") == []


def test_corpora() -> None:
    d = drafter(max_corpus_tokens=40, corpus_budget=3)
    assert d.add_corpus("docs", ids(QUOTE, [SEPARATOR], [7, 8])) == 33
    assert d.corpora == {"docs": 33}
    d.start("a", "any", ids([5, 100, 101]))
    assert tokens(d, "a") == QUOTE[2:5]  # at most the budget
    assert d.add_corpus("cut", ids(QUOTE)) == 7
    with pytest.raises(InvalidRequest, match=r"none fits, of 40 tokens 0 are free"):
        d.add_corpus("more", ids(QUOTE))
    with pytest.raises(InvalidRequest, match="'docs' is loaded"):
        d.add_corpus("docs", ids(QUOTE))
    d.remove_corpus("docs")
    with pytest.raises(NotFound, match="loaded are: cut"):
        d.remove_corpus("docs")
    with pytest.raises(InvalidRequest, match="hold no token"):
        d.add_corpus("empty", ids([]))
    d.remove_corpus("cut")
    assert tokens(d, "a") == []
