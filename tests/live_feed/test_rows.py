"""Rows of requests: the spans that moments, tokens and deaths make of them."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from typing import Any

import pytest

from radixlm.intake.request_state import RequestState
from radixlm.live_feed.rows import KEEP, MAX_IDS, MAX_SPANS, RequestRows
from radixlm.wire.replies import Finish, TokenDelta
from radixlm.wire.requests import TokenizedRequest, pack_ids
from radixlm.wire.sampling_params import SamplingParams


class Case:
    """One observer with a clock of its own."""

    def __init__(self, **options: Any) -> None:
        self.now_s = 100.0
        self.rows = RequestRows(clock=lambda: self.now_s, **options)

    def submit(self, rid: str = "r", num_tokens: int = 5) -> RequestState:
        ids = pack_ids(list(range(num_tokens)))
        wire = TokenizedRequest(rid=rid, input_ids=ids, sampling=SamplingParams())
        state = RequestState(wire, 0, None, None)
        state.arrival_s = self.now_s
        self.rows.submitted(state)
        return state

    def prefill(self, state: RequestState, start_s: float, end_s: float, first: int = 0) -> None:
        self.rows.scheduled(state, (state.rid, "prefill", start_s, end_s, 4, first))

    def tokens(self, state: RequestState, at_s: float, count: int = 1) -> None:
        self.now_s = at_s
        state.apply_delta(TokenDelta(state.rid, [1] * count, cached_tokens=3, prompt_tokens=5))
        state.first_token_s = state.first_token_s and at_s
        state.last_token_s = at_s
        self.rows.progressed(state, count)

    def end(self, state: RequestState, at_s: float) -> None:
        state.finished_s = at_s
        self.rows.ended(state, Finish("stop"))

    def spans(self, rid: str = "r") -> list[Any]:
        return [tuple(span) for span in self.rows.rows[rid].shown(False)["spans"]]


def test_a_life_without_trouble() -> None:
    case = Case()
    state = case.submit()
    case.prefill(state, 101, 0)
    assert case.spans() == [("queue", 100.0, 101, 0), ("prefill", 101, None, 4)]
    case.prefill(state, 101, 102)
    case.prefill(state, 102, 103, 4)
    case.tokens(state, 103.1)
    case.tokens(state, 104, 2)
    case.end(state, 105)
    assert case.spans() == [
        ("queue", 100.0, 101, 0),
        ("prefill", 101, 102, 4),
        ("prefill", 102, 103, 4),
        ("decode", 103, 105, 3),
    ]
    shown = case.rows.rows["r"].shown(True)
    assert shown["id"] == hashlib.sha256(b"r").hexdigest()[:12] and shown["rid"] == "r"
    assert (shown["prompt"], shown["cached"], shown["out"]) == (5, 3, 3)
    assert (shown["begun_s"], shown["ended_s"], shown["finish"]) == (100.0, 105, "stop")


def test_a_grammar_compiles_before_the_queue() -> None:
    case = Case()
    state = case.submit()
    case.rows.scheduled(state, ("r", "grammar", 100.0, 100.5, 0, 0))
    case.prefill(state, 101, 102)
    phases = [("grammar", 100.0, 100.5, 0), ("queue", 100.5, 101, 0), ("prefill", 101, 102, 4)]
    assert case.spans() == phases


def test_a_retracted_request_is_computed_again() -> None:
    case = Case()
    state = case.submit()
    case.prefill(state, 101, 102)
    case.tokens(state, 102)
    case.rows.scheduled(state, ("r", "retracted", 103, 0.0, 0, 0))
    assert case.spans()[-1] == ("retracted", 103, None, 0)
    case.prefill(state, 104, 105)
    case.tokens(state, 105)
    phases = [span[0] for span in case.spans()]
    assert phases == ["queue", "prefill", "decode", "retracted", "prefill", "decode"]
    assert case.rows.rows["r"].cached == 3, "what it had at its first start"


def test_forced_tokens_are_no_prefill() -> None:
    case = Case()
    state = case.submit()
    case.prefill(state, 101, 102)
    case.tokens(state, 102)
    case.prefill(state, 103, 104)
    assert [span[0] for span in case.spans()] == ["queue", "prefill", "decode"]


def test_a_death_holds_rows_until_they_go_on() -> None:
    case = Case()
    first, second = case.submit("a"), case.submit("b")
    case.prefill(first, 101, 102)
    case.tokens(first, 102)
    case.now_s = 103.0
    seen = case.rows.version
    case.rows.held([first, second], "signal SIGKILL")
    (death,) = case.rows.changed_deaths(seen)
    assert death.shown() == {
        "t": 103.0,
        "why": "signal SIGKILL",
        "held": 2,
        "went_on": [],
        "dump": None,
    }
    assert [row.rid for row in case.rows.changed(seen)] == ["a", "b"]
    seen = case.rows.version
    case.prefill(first, 104, 105)
    case.tokens(first, 105.5)
    assert [d.shown()["went_on"] for d in case.rows.changed_deaths(seen)] == [
        [[case.rows.rows["a"].id, 2.5]]
    ]
    assert case.spans("a")[2:] == [
        ("decode", 102, 103.0, 1),
        ("engine_dead", 103.0, 104, 0),
        ("prefill", 104, 105, 4),
        ("decode", 105, None, 1),
    ]
    assert case.spans("b") == [("queue", 100.0, 103.0, 0), ("engine_dead", 103.0, None, 0)]
    case.end(second, 106)
    assert case.spans("b")[-1] == ("engine_dead", 103.0, 106, 0)
    case.rows.note_dump(50.0, "too early")
    case.rows.note_dump(103.2, "requests-1.jsonl")
    assert death.dump == "requests-1.jsonl"


def test_only_the_last_rows_are_kept() -> None:
    case = Case(hidden="probe-")
    running = case.submit("first")
    for i in range(KEEP):
        case.end(case.submit(f"r{i}"), 101)
    case.submit("probe-1")
    assert len(case.rows.rows) == KEEP and "first" in case.rows.rows, "it runs"
    assert "r0" not in case.rows.rows
    case.tokens(running, 102)
    case.end(running, 103)
    case.submit("last")
    assert len(case.rows.rows) == KEEP and "first" not in case.rows.rows
    more = [case.submit(f"s{i}") for i in range(KEEP + 5)]
    assert len(case.rows.rows) == KEEP, "also where all run"
    row = case.rows.of("s0")
    assert "s0" not in case.rows.rows and row is not None and row.rid == "s0"
    for state in more:
        case.end(state, 104)
    case.end(case.submit("last"), 105)
    assert not case.rows._live and case.rows.find("s9") is not None
    found = case.rows.find(case.rows.rows["s10"].id)
    assert found is not None and found.rid == "s10"


def test_texts_are_kept_in_part() -> None:
    case = Case(keeps_ids=True)
    state = case.submit(num_tokens=MAX_IDS + 9)
    case.tokens(state, 101, MAX_IDS + 7)
    case.end(state, 102)
    ids = case.rows.rows["r"].ids
    assert ids is not None and (len(ids[0]), len(ids[1])) == (4 * MAX_IDS, MAX_IDS)


def test_spans_of_a_long_prompt_are_joined() -> None:
    case = Case()
    state = case.submit()
    for chunk in range(3 * MAX_SPANS):
        case.prefill(state, 101 + chunk, 102 + chunk)
    spans = case.spans()
    assert len(spans) == MAX_SPANS and spans[-1][2] == 101 + 3 * MAX_SPANS
    assert sum(span[3] for span in spans) == 4 * 3 * MAX_SPANS


@pytest.mark.parametrize("num_chunks", [3, 3 * MAX_SPANS])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_chunks_that_were_announced_count_once(depth: int, num_chunks: int) -> None:
    """With steps in flight a chunk is announced before the ones ahead of it have ended."""
    case = Case()
    state = case.submit(num_tokens=4 * num_chunks)
    row, done = case.rows.rows["r"], []
    for turn in range(num_chunks + depth):
        if turn < num_chunks:
            case.prefill(state, 101 + turn, 0, 4 * turn)
        if (ended := turn - depth) >= 0:
            case.prefill(state, 101 + ended, 102 + turn, 4 * ended)
            done.append(row.prefilled)
    assert done == [4 * (i + 1) for i in range(num_chunks)]
    spans = case.spans()
    assert len(spans) == min(num_chunks + 1, MAX_SPANS)
    assert sum(span[3] for span in spans) == 4 * num_chunks
    assert all(one[2] == two[1] for one, two in pairwise(spans)), "they follow each other"
    assert spans[-1][2] == 101 + num_chunks + depth


def test_a_short_chunk_ends_after_a_long_one_was_announced() -> None:
    case = Case()
    state = case.submit()
    case.prefill(state, 102, 0, 4)
    case.prefill(state, 101, 103, 0)
    case.prefill(state, 102, 104, 4)
    assert case.spans() == [("queue", 100.0, 102, 0), ("prefill", 102, 104, 8)]


def test_times_and_rates() -> None:
    case = Case()
    state = case.submit()
    case.tokens(state, 101)
    for second in range(1, 5):
        case.tokens(state, 101 + second, 2)
    case.end(state, 106)
    case.now_s = 106.0
    assert case.rows.rates() == (pytest.approx(1.0), pytest.approx(9 / 5))
    got = case.rows.percentiles()
    for kind, value in (("ttft", 1.0), ("itl", 0.5), ("e2e", 6.0)):
        found = got[kind]["1m"]
        assert found is not None and found[0] == pytest.approx(value, rel=0.03)


def test_who_wants_rows_that_end_gets_them() -> None:
    case = Case()
    ended: list[tuple[str, str]] = []
    case.rows.on_end.append(lambda state, row: ended.append((state.rid, row.spans[-1].phase)))
    state = case.submit()
    case.tokens(state, 101)
    case.end(state, 102)
    assert ended == [("r", "decode")]
