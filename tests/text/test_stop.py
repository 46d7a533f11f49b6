"""Incremental stop matching equals a search of the whole text, for any chunks."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixlm.base.errors import InvalidRequest
from radixlm.text.stop import MAX_HELD_CHARS, StopChecker

QUICK = settings(
    max_examples=100,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
LETTERS = st.text("abc\n", max_size=24)
EXPRESSIONS = st.sampled_from(
    [
        "a+b",
        "(ab|ba)c",
        "a.b",
        "[^a]c",
        r"b{2,3}",
        "(?i)ABC",
        r"a\nb",
        "c(a|b)*c",
        "(?s)a.c",
        "ab?c",
    ]
)


def search(text: str, stops: list[str], regexes: list[str]) -> tuple[int, int, str] | None:
    """(start, end, stop) of the longest match that ends first, by brute force."""
    for end in range(1, len(text) + 1):
        for start in range(end):
            part = text[start:end]
            for stop in stops:
                if part == stop:
                    return start, end, stop
            for regex in regexes:
                if re.fullmatch(regex, part):
                    return start, end, regex
    return None


def run(checker: StopChecker, text: str, sizes: list[int]) -> tuple[str, str | None, list[str]]:
    emitted, position, index = [], 0, 0
    while position < len(text):
        size = sizes[index % len(sizes)]
        emit, matched = checker.feed(text[position : position + size])
        emitted.append(emit)
        if matched is not None:
            return "".join(emitted), matched, emitted
        position, index = position + size, index + 1
    emit, matched = checker.finish()
    return "".join([*emitted, emit]), matched, emitted


@QUICK
@given(
    LETTERS,
    st.lists(st.text("abc\n", min_size=1, max_size=4), max_size=3),
    st.lists(EXPRESSIONS, max_size=2),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.booleans(),
)
def test_chunks_equal_the_whole_text(
    text: str, stops: list[str], regexes: list[str], sizes: list[int], trim: bool
) -> None:
    out, matched, _ = run(StopChecker(stops, regexes, trim), text, sizes)
    expected = search(text, stops, regexes)
    if expected is None:
        assert (out, matched) == (text, None)
    else:
        start, end, stop = expected
        assert out == text[: start if trim else end]
        assert matched is not None
        assert matched == stop or search(text, [matched], [matched]) is not None


@QUICK
@given(LETTERS, st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3))
def test_only_a_possible_start_of_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    checker = StopChecker(stops, (), True)
    sent = ""
    for end in range(1, len(text) + 1):
        emit, matched = checker.feed(text[end - 1])
        sent += emit
        if matched:
            break
        openings = [stop[:size] for stop in stops for size in range(len(stop))]
        held = max((part for part in openings if text[:end].endswith(part)), key=len)
        assert sent == text[: end - len(held)]


def test_other_text_is_sent_at_once() -> None:
    checker = StopChecker(["STOP", "\n\nUser:"])
    assert [checker.feed(piece)[0] for piece in ("hello ", "S", "T", "X", "\n", "a")] == [
        "hello ",
        "",
        "",
        "STX",
        "",
        "\na",
    ]
    assert StopChecker([]).feed("abc") == ("abc", None)


def test_after_a_match_nothing_is_sent() -> None:
    checker = StopChecker(["b"])
    assert checker.feed("abc") == ("a", "b")
    assert checker.feed("more") == ("", "b")
    assert checker.finish() == ("", "b")


def test_without_trim_the_stop_is_part_of_the_text() -> None:
    checker = StopChecker(["END"], (), False)
    assert checker.feed("x E") == ("x E", None)
    assert checker.feed("ND tail") == ("ND", "END")


@pytest.mark.parametrize(
    ("regex", "text", "kept"),
    [
        (r"\bend\b", "bend ending end.", "bend ending "),
        (r"\bend\b", "the end", "the "),
        (r"^stop", "a stop\nstop", None),
        (r"(?m)^stop", "a stop\nstop here", "a stop\n"),
        (r"\d+\.$", "no 12. x", "no "),
        (r"a\Bb", "ab", ""),
        (r"(?a:\w\d)!", "é1! a1!", "é1! "),
        (r"[\w-]+:\s", "a key-1:\tb", "a "),
    ],
)
def test_boundaries(regex: str, text: str, kept: str | None) -> None:
    for size in (1, 3, 100):
        out, matched, _ = run(StopChecker([], [regex]), text, [size])
        assert (out, matched) == ((text, None) if kept is None else (kept, regex))


def test_an_endless_expression_holds_back_a_bounded_text() -> None:
    checker = StopChecker([], ["(?s)a.*b"])
    text = "a" + "x" * (3 * MAX_HELD_CHARS)
    out = checker.feed(text)[0]
    assert len(out) == len(text) - MAX_HELD_CHARS
    assert checker.feed("xb")[1] == "(?s)a.*b"


@pytest.mark.parametrize(
    "regex",
    [
        "(",
        "a*",
        "(a)\\1",
        "(?=a)b",
        "(?<!a)b",
        "(?>a)b",
        "a++b",
        "((a{1,99}){1,99}){1,99}",
        "a{9999}",
    ],
)
def test_invalid_expressions(regex: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        StopChecker([], [regex])
    assert caught.value.param == "stop_regex"


def test_a_malicious_expression_takes_linear_time() -> None:
    checker = StopChecker([], ["(a+)+b", "(a|aa)+c", "(.*)*=(.*)*!"])
    start = time.thread_time()
    checker.feed("a" * 3000)
    assert time.thread_time() - start < 5


@pytest.mark.parametrize("size", [1, 2, 9])
@pytest.mark.parametrize(
    ("stops", "text", "emitted", "matched"),
    [
        (["abcd", "bc"], "xxabcyy", "xxa", "bc"),
        (["abcd", "bc"], "xxabcd", "xxa", "bc"),
        (["aab", "b"], "xaab", "x", "aab"),  # the longest of those that end here
        (["abcdx", "bcdy", "cd"], "abcdy", "ab", "cd"),
        (["aaab"], "aaaab", "a", "aaab"),
    ],
)
def test_a_stop_inside_another_matches_first(
    stops: list[str], text: str, emitted: str, matched: str, size: int
) -> None:
    found, stop, _ = run(StopChecker(stops), text, [size])
    assert (found, stop) == (emitted, matched)
