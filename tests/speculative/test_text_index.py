"""TextIndex against a plain search."""

import numpy as np
import pytest

from radixlm.speculative.text_index import MAX_CANDIDATES, SEPARATOR, TextIndex


def longest_match(text: list[int], tail: list[int], min_match: int) -> int:
    """The longest end of ``tail`` that occurs in ``text`` with a token behind it."""
    best = 0
    for end in range(len(text) - 1):
        length = 0
        while length < min(len(tail), end + 1, 32) and text[end - length] == tail[-1 - length]:
            length += 1
        best = max(best, length)
    return best if best >= min_match else 0


@pytest.mark.parametrize("seed", range(30))
def test_finds_the_longest_match(seed: int) -> None:
    rng = np.random.default_rng(seed)
    # few occurrences of each pair of tokens: all candidates are looked at
    text = rng.integers(0, rng.integers(12, 40), rng.integers(2, 300)).astype(np.int32)
    index = TextIndex()
    for part in np.array_split(text, rng.integers(1, 9)):
        index.extend(part)
        index.find(index.ids, lag=int(rng.integers(1, 20)))
    assert index.ids.tolist() == text.tolist()
    start = int(rng.integers(0, len(text)))
    for tail in (text, text[: start + 1], rng.integers(0, 12, 8).astype(np.int32)):
        found = index.find(tail, min_match=2, lag=1)
        expected = longest_match(text.tolist(), tail.tolist(), 2)
        assert (int(found.lengths.max()) if found else 0) == expected
        if found is not None:
            assert found.ends.tolist() == sorted(found.ends.tolist(), reverse=True)
            for end, length in zip(found.ends.tolist(), found.lengths.tolist(), strict=True):
                assert text[end - length + 1 : end + 1].tolist() == tail[-length:].tolist()


def test_long_chains_find_places_behind_many_short_matches() -> None:
    unique = np.arange(100, 110)
    noise = np.tile([108, 109, 5], 3 * MAX_CANDIDATES)  # later places of the last two tokens
    index = TextIndex(np.concatenate((unique, [77], noise, [6])).astype(np.int32))
    found = index.find(unique.astype(np.int32), lag=1)
    assert found is not None
    assert found.lengths.tolist() == [10]
    assert index.following(found.ends, 2).tolist() == [[77, 108]]


def test_no_match_crosses_a_separator() -> None:
    index = TextIndex(np.array([1, 2, 3, SEPARATOR, 4, 5, 9], np.int32))
    assert index.find(np.array([3, 4, 5], np.int32), min_match=3, lag=1) is None
    found = index.find(np.array([3, 4, 5], np.int32), min_match=2, lag=1)
    assert found is not None
    assert found.lengths.tolist() == [2]


def test_what_follows_a_loop_goes_on_looping() -> None:
    index = TextIndex(np.array([7, 1, 2, 3, 1, 2, 3], np.int32))
    found = index.find(index.ids, lag=1)
    assert found is not None
    assert index.following(found.ends, 7)[0].tolist() == [1, 2, 3, 1, 2, 3, 1]


def test_grows_beyond_its_tables() -> None:
    text = np.arange(5000, dtype=np.int32)
    index = TextIndex(text[:10])
    for first in range(10, 5000, 499):
        index.extend(text[first : first + 499])
        index.find(index.ids)
    for start in (3, 1200, 4990):
        found = index.find(text[start : start + 4], lag=1)
        assert found is not None
        assert found.ends.tolist() == [start + 3]
