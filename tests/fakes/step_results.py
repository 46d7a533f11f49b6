"""Results of steps by item, as tests write and read them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from radixlm.step.plan import Item, Items
from radixlm.step.result import ItemResult, StepResult


def step_result(plan_items: Sequence[Item], results: Sequence[ItemResult]) -> StepResult:
    """The results of all items, in their order."""
    items = Items.of(plan_items)
    front = results[: len(items.starts)]
    produced = [got.tokens or (0,) for got in front]
    tokens = np.array([token for some in produced for token in some], np.int32)
    counts = None
    if items.drafts is not None or len(tokens) > len(front):
        counts = np.array([len(some) for some in produced], np.int32)
    odd = {i: got for i, got in enumerate(front) if not got.is_only_tokens}
    return StepResult(tokens, odd, results[len(front) :], counts)


def item_results(result: StepResult) -> list[ItemResult]:
    """A result an item, in the order of the plan."""
    if result.counts is None:
        rows = [(token,) for token in result.tokens.tolist()]
    else:
        parts = np.split(result.tokens, np.cumsum(result.counts)[:-1])
        rows = [tuple(part.tolist()) for part in parts]
    front = [result.detailed.get(i) or ItemResult(row) for i, row in enumerate(rows)]
    return [*front, *result.prefills]
