"""The rows of the state pool that a step reads and writes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.pools.state import StatePool, state_nbytes

LAYERS = [(((3, 2), False), ((4,), True)), (((5,), True),)]
CPU = torch.device("cpu")


def test_rows_come_back_as_they_were_written() -> None:
    pool = StatePool(LAYERS, 4, 16, torch.bfloat16, CPU)
    states = [torch.randn(2, 3, 2), torch.randn(2, 4)]
    pool.write(0, torch.tensor([3, 1]), states)
    conv, recurrent = pool.read(0, torch.tensor([1, 3]))
    torch.testing.assert_close(conv, states[0].flip(0))
    torch.testing.assert_close(recurrent, states[1].flip(0).bfloat16().float())
    assert not pool.read(1, torch.tensor([1]))[0].any()
    assert state_nbytes(LAYERS, torch.bfloat16) == 6 * 4 + 4 * 2 + 5 * 2
    assert pool.num_bytes == 4 * state_nbytes(LAYERS, torch.bfloat16)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    spans=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=5),
    page_size=st.sampled_from([1, 4, 16]),
)
def test_segments_lead_from_the_last_token_to_the_new_one(
    spans: list[tuple[int, int]], page_size: int
) -> None:
    """In order, the segments cover every token once, each from the page with the state before its
    first token. The state at the last page boundary gets a page of its own."""
    starts, counts = (np.array(column) for column in zip(*spans, strict=True))
    width = int((starts + counts).max() - 1) // page_size + 1
    table = np.arange(1, len(spans) * width + 1).reshape(len(spans), width)
    pool = StatePool([], 999, page_size, torch.float32, CPU)
    owner = np.repeat(np.arange(len(spans)), counts)
    position = np.concatenate([np.arange(s, s + n) for s, n in spans])
    states: dict[int, int] = {0: -1}  # page -> position of the last token in its state
    for (start, _), row in zip(spans, table, strict=True):
        if start:
            states[int(row[(start - 1) // page_size])] = start - 1
    covered: list[int] = []
    for segment in pool.begin(table, starts, counts).segments:
        rows = torch.arange(len(owner))[segment.rows].numpy()
        covered += rows.tolist()
        for part, source, target in zip(
            np.split(rows, segment.num_sequences),
            segment.source.tolist(),
            segment.target.tolist(),
            strict=True,
        ):
            assert len(set(owner[part])) == 1
            assert states[source] == position[part[0]] - 1
            states[target] = int(position[part[-1]])
    assert sorted(covered) == list(range(len(owner)))
    for (start, count), row in zip(spans, table, strict=True):
        end = start + count
        assert states[int(row[(end - 1) // page_size])] == end - 1
        whole = end // page_size * page_size
        if whole > start:
            assert states[int(row[whole // page_size - 1])] == whole - 1
