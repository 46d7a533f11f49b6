"""Items as columns convert back to the same items, and so do their results."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.step_results import item_results, step_result

from radixlm.step.plan import Item, Items, StepPlan
from radixlm.step.result import ItemResult
from radixlm.wire.requests import LogprobParams

TOKENS = np.array([5, 6, 7], np.int32)  # one for all, because arrays are compared by identity


def item(index: int, kind: int, start: int) -> Item:
    rid = f"r{index}"
    if kind == 0:
        return Item(rid, index, start, 3, TOKENS, emit=False)
    if kind == 1:
        return Item(rid, index, start, 1, None, True, LogprobParams(top=2))
    return Item(rid, index, start, 1, None, True, None, 0, None, kind == 2)


ITEMS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 99)), max_size=8)


@given(ITEMS)
def test_items_survive_the_round_trip(drawn: list[tuple[int, int]]) -> None:
    given_ = tuple(item(i, kind, start) for i, (kind, start) in enumerate(drawn))
    items = Items.of(given_)
    assert Items.of(items) is items
    assert tuple(items) == given_ and len(items) == len(given_)
    assert [items[i] for i in range(len(given_))] == list(given_)
    assert StepPlan(0, given_).num_tokens == sum(i.count for i in given_)
    assert items.prefills == given_[len(items.starts) :]
    assert not items.prefills or items.prefills[0].tokens is not None


@given(ITEMS, st.integers(0, 4))
def test_results_survive_the_round_trip(drawn: list[tuple[int, int]], odd: int) -> None:
    items = tuple(item(i, kind, start) for i, (kind, start) in enumerate(drawn))
    results = [ItemResult((7 + i,) if it.emit else ()) for i, it in enumerate(items)]
    if odd < len(results):
        results[odd] = ItemResult(error="no")
    assert item_results(step_result(items, results)) == results
