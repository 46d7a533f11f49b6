"""StepPlan -> ForwardBatch, against the same batch written token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.executor.device_tables import DeviceTables
from radixlm.step.plan import Admission, Item, PageUpdate, StepPlan
from radixlm.wire.sampling_params import SamplingParams
from tests.executor.fake_model import CPU, PAGE, FakeAttention
from tests.fakes.step_batch import prepare

MAX_PAGES = 8


def _admit(tables: DeviceTables, slot: int, prompt_len: int, **fields: object) -> None:
    ids, none = np.arange(prompt_len, dtype=np.int32), np.zeros(0, np.int32)
    tables.admit(Admission(f"r{slot}", slot, SamplingParams(), ids, none, **fields))  # type: ignore[arg-type]


# one sequence: prompt length, tokens computed before, tokens of this step (0: a decode)
SEQUENCES = st.lists(
    st.tuples(st.integers(1, 20), st.integers(0, 20), st.integers(0, 9)), min_size=1, max_size=5
)


@pytest.mark.parametrize("page_size", [PAGE, 1, 6, 12])
@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(SEQUENCES, st.integers(0, 2**32 - 1))
def test_equals_one_token_at_a_time(
    page_size: int, sequences: list[tuple[int, int, int]], seed: int
) -> None:
    max_pages = -(-MAX_PAGES * PAGE // page_size)
    rng = np.random.default_rng(seed)
    slots = rng.permutation(len(sequences) + 2)[: len(sequences)].tolist()
    tables = DeviceTables(len(sequences) + 2, max_pages, 2, CPU)
    items, tokens = [], []
    for slot, (prompt_len, start, count) in zip(slots, sequences, strict=True):
        _admit(tables, slot, prompt_len)
        for group in range(2):
            pages = rng.integers(1, 500, max_pages).astype(np.int32)
            tables.write(PageUpdate(group, slot, 0, pages))
        values = rng.integers(0, 100, max(count, 1)).astype(np.int32)
        tables.next_token[slot] = int(values[0])
        given_ids = values if count else None
        emit = bool(rng.integers(2)) or not count
        items.append(Item(f"r{slot}", slot, start, max(count, 1), given_ids, emit))
        tokens += values.tolist()
    batch = prepare(StepPlan(0, tuple(items)), tables, (0, 1, 0), page_size, FakeAttention())

    assert batch.token_ids_T.tolist() == tokens
    where = [(item, p) for item in items for p in range(item.start, item.start + item.count)]
    assert batch.positions_T.tolist() == [p for _, p in where]
    prompt_of = {slot: sequence[0] for slot, sequence in zip(slots, sequences, strict=True)}
    for t, (item, place) in enumerate(where):
        prompt_len = prompt_of[item.slot]
        # ropes: a prompt token uses the prompt's length, an output token its own length
        want = prompt_len if place < prompt_len else place + 1
        assert batch.rope_len_T[t] == want
        for group, space in enumerate((0, 1, 0)):
            page = int(tables.pages[space][item.slot, place // page_size])
            assert batch.store_GT[group][t] == page * page_size + place % page_size
    ends = np.cumsum([item.count for item in items])
    assert batch.query_start_S1.tolist() == [0, *ends]
    assert batch.kv_len_S.tolist() == [item.start + item.count for item in items]
    assert batch.logits_rows_R.tolist() == [
        int(end) - 1 for end, item in zip(ends, items, strict=True) if item.emit
    ]
    assert batch.max_query_len == max(item.count for item in items)
    assert batch.max_kv_len == max(item.start + item.count for item in items)
    width = -(-batch.max_kv_len // page_size)
    for s, item in enumerate(items):
        assert batch.page_table_GSP[1][s].tolist() == tables.pages[1][item.slot, :width].tolist()
    assert batch.embeds is None


def test_embeds_replace_prompt_rows_chunk_by_chunk() -> None:
    tables = DeviceTables(2, MAX_PAGES, 1, CPU)
    rows = np.arange(5 * 3, dtype=np.float32).reshape(5, 3) + 1
    _admit(tables, 0, 5, embeds=rows)
    _admit(tables, 1, 2)
    other = Item("r1", 1, 0, 2, np.array([7, 8], np.int32), True)

    def step(start: int, count: int) -> tuple[torch.Tensor, list[bool]]:
        zeros = np.zeros(count, np.int32)
        mine = Item("r0", 0, start, count, zeros, False)
        batch = prepare(StepPlan(0, (other, mine)), tables, (0,), PAGE, FakeAttention())
        assert batch.embeds is not None and batch.embeds.mask_T is not None
        return batch.embeds.rows_TD, batch.embeds.mask_T.tolist()

    embeds, mask = step(0, 2)
    assert mask == [False, False, True, True] and embeds[2:].tolist() == rows[:2].tolist()
    embeds, mask = step(2, 3)
    assert mask == [False, False, True, True, True] and embeds[2:].tolist() == rows[2:].tolist()
    embeds, mask = step(4, 3)  # computed again after a retraction, so output tokens follow
    assert mask == [False, False, True, False, False] and embeds[2].tolist() == rows[4].tolist()
    tables.next_token[0] = 11
    decode = Item("r0", 0, 5, 1, None, True)
    batch = prepare(StepPlan(0, (decode,)), tables, (0,), PAGE, FakeAttention())
    assert batch.embeds is None and batch.token_ids_T.tolist() == [11]
