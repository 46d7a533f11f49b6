"""Requests that are committed together and those committed one by one get the same results."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixlm.memory.prefix.namespace import CacheNamespace
from radixlm.scheduler.hooks import Feature
from radixlm.scheduler.request import Request
from radixlm.scheduler.slot_table import RECENT, SlotTable
from radixlm.wire.requests import AbortRequest, LogprobParams, TokenizedRequest, pack_ids
from radixlm.wire.sampling_params import SamplingParams
from tests.fakes.executor import VOCAB, next_token
from tests.fakes.scheduler_harness import SchedulerHarness


class Follower(Feature):
    """Records the tokens of requests whose ids begin with an f."""

    def __init__(self) -> None:
        self.seen: dict[str, list[int]] = {}

    def arrive(self, request: Request) -> bool:
        return request.rid.startswith("f")

    def committed(self, request: Request, tokens: Sequence[int]) -> None:
        self.seen.setdefault(request.rid, []).extend(tokens)


def alone(prompt: list[int], sampling: SamplingParams) -> list[int]:
    """The tokens of one request alone, token by token."""
    out: list[int] = []
    while len(out) < (sampling.max_new_tokens or 0):
        out.append(next_token(np.array([*prompt, *out])))
        if out[-1] in sampling.stop_token_ids and len(out) >= sampling.min_new_tokens:
            break
    return out


def submit(bench: SchedulerHarness, rid: str, rng: random.Random) -> list[int]:
    """Submit a request with random features that affect its output; returns the expected tokens."""
    prompt = [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 20))]
    sampling = SamplingParams(
        max_new_tokens=rng.choice((1, 5, 30, 2 * RECENT + 3)),
        temperature=0.0,
        ignore_eos=True,
        stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice((0, 0, 1, 2)))),
        min_new_tokens=rng.choice((0, 0, 4)),
        stream_interval=rng.choice((None, 1, 3)),
    )
    wire = TokenizedRequest(
        rid,
        pack_ids(prompt),
        sampling,
        stream=rng.random() < 0.6,
        logprobs=LogprobParams() if rng.random() < 0.2 else None,
    )
    bench.out[rid] = []
    bench.mine.send(wire)
    return alone(prompt, sampling)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("num_pages", [60, 400])
def test_a_mixed_batch_gives_each_request_its_own_tokens(depth: int, num_pages: int) -> None:
    rng, follower = random.Random(depth), Follower()
    bench = SchedulerHarness(num_pages, features=(follower,), depth=depth)
    want, gone = {}, set()
    for index in range(24):
        rid = f"{rng.choice('fx')}{index}"
        want[rid] = submit(bench, rid, rng)
        for _ in range(rng.randrange(6)):
            bench.tick()
        if rng.random() < 0.15:
            gone.add(rid)
            bench.mine.send(AbortRequest(rids=(rid,)))
    bench.run()
    for rid, tokens in want.items():
        if rid in gone:
            assert bench.out[rid] == tokens[: len(bench.out[rid])]
            continue
        assert bench.out[rid] == tokens, rid
        assert follower.seen.get(rid, []) == (tokens if rid[0] == "f" else [])
    assert not bench.scheduler.committer._stop_counts


def test_a_plain_decode_row_sends_a_single_token() -> None:
    bench = SchedulerHarness()
    bench.submit("a", [1, 2, 3], 20, ignore_eos=True)
    bench.submit("b", [1, 2, 4], 20, ignore_eos=True, stream=False)
    bench.run()
    replies = [reply for reply in bench.replies if getattr(reply, "rids", ())]
    assert [tuple(reply.rids) for reply in replies] == [("a",)] * 18
    told = [delta for reply in bench.replies for delta in getattr(reply, "deltas", ())]
    assert [(delta.rid, len(delta.tokens)) for delta in told] == [
        ("a", 1), ("b", 16), ("a", 1), ("b", 4),
    ]  # fmt: skip


def test_the_decode_batch_is_one_object_until_a_request_joins_or_leaves() -> None:
    bench = SchedulerHarness()
    for rid, count in (("a", 6), ("b", 9)):
        bench.submit(rid, [ord(rid) % 31, 2], count, ignore_eos=True)
    bench.run()
    decode_batches = [plan.items.decodes for plan in bench.executor.steps]
    assert [batch.rids for batch in decode_batches] == [(), *[("a", "b")] * 5, *[("b",)] * 3]
    assert len({id(batch) for batch in decode_batches}) == 3


def request(ids: list[int]) -> Request:
    made = Request(
        TokenizedRequest("r", pack_ids(ids), SamplingParams(max_new_tokens=500)),
        frozenset(),
        CacheNamespace(),
    )
    made.max_len = len(ids) + 500
    return made


@given(st.lists(st.tuples(st.sampled_from("apfslw"), st.integers(1, 80)), max_size=30))
def test_a_request_keeps_its_tokens_in_and_out_of_a_slot(steps: list[tuple[str, int]]) -> None:
    rows, mine = SlotTable(2), request([1, 2, 3])
    tokens, sent = [1, 2, 3], 3
    mine.assign_slot(rows, 1)
    for kind, number in steps:
        if kind == "l" and not mine.is_waiting:
            mine.release_slot()
            mine.reset_for_retract()
            assert mine.prefill_len == len(tokens) and mine.is_waiting and mine.num_allocated == 0
        elif kind in "ap" and mine.is_waiting:
            mine.assign_slot(rows, number % 2)
        if kind == "a":  # one by one
            for token in range(number):
                mine.append(token)
                tokens.append(token)
        elif kind == "p":  # all rows of a step
            for token in range(number):
                count = rows.append(np.array([mine.slot]), np.array([token], np.int32))
                tokens.append(token)
                if count[0] >= rows.check_at[mine.slot]:
                    mine.store_recent()
        elif kind == "f":
            assert mine.take_unsent() == tokens[sent:]
            sent = len(tokens)
        assert mine.num_tokens == len(tokens) and mine.num_unsent == len(tokens) - sent
        if kind == "s":
            assert mine.ids.tolist() == tokens and mine.output_ids.tolist() == tokens[3:]
    assert mine.ids.tolist() == tokens


def test_rows_grow_with_their_pages() -> None:
    rows, mine = SlotTable(3), request([1])
    mine.assign_slot(rows, 2)
    mine.add_pages(np.arange(1, 8, dtype=np.int32), None, page_size=4)
    for page in range(8, 40):
        column = rows.add_pages(np.array([2]), np.array([page], np.int32), page_size=4)
        assert column.tolist() == [page - 1]
    assert mine.pages[:39].tolist() == list(range(1, 40)) and mine.num_allocated == 39 * 4
    assert not rows.pages[:2].any()


def test_the_row_without_a_slot_is_never_written() -> None:
    waiting = request([1, 2])
    assert (waiting.num_computed, waiting.inflight, waiting.num_allocated) == (0, 0, 0)
    with pytest.raises(ValueError, match="read-only"):
        waiting.num_computed = 1


@pytest.mark.parametrize("radix", [False, True])
def test_no_request_waits_for_a_computed_prefix(radix: bool) -> None:
    """With a step in flight, and where the tree never takes the other's pages over."""
    bench = SchedulerHarness(400, radix=radix, depth=1)
    for rid in "ab":
        bench.submit(rid, [1 + i % 30 for i in range(12)], 20, ignore_eos=True)
    bench.run()
    decode_batches = [plan.items.decodes.rids for plan in bench.executor.steps]
    assert decode_batches.count(("a", "b")) >= 15
