"""The items that `radixlm eval bundled` asks are those that zoo/items.py writes."""

from __future__ import annotations

import items

from radixlm.evals.bundled import ITEMS
from radixlm.evals.items import read_rows


def test_the_written_items_are_the_held_out_ones() -> None:
    assert read_rows(ITEMS) == list(items.rows(20))
