"""Which batch sizes get a graph, and that a graph's logits equal those of its step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.cuda_graphs.graphs import (
    FEWEST_PROMPT_TOKENS,
    MOST_PROMPT_TOKENS,
    StepGraphs,
    graph_sizes,
    prompt_sizes,
)
from radixlm.devices.device import CpuDevice


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 600), st.none() | st.integers(1, 700), st.booleans())
def test_sizes_reach_the_largest_batch(most: int, largest: int | None, pads: bool) -> None:
    sizes = graph_sizes(most, None, largest, pads)
    top = min(most, largest or most)
    assert sizes == tuple(sorted(set(sizes))) and sizes[0] == 1
    assert sizes[-1] == (top if pads else min(top, 160))
    if pads:  # padding adds less than half of the batch, and less than 16 rows
        for count in range(1, top + 1):
            size = next(s for s in sizes if s >= count)
            assert size < 2 * count and size - count < 16
    else:
        assert len(sizes) == sizes[-1]


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 9000), st.none() | st.integers(1, 2000))
def test_prompts_are_padded_by_less_than_half(most: int, largest: int | None) -> None:
    sizes = prompt_sizes(most, None, largest)
    assert sizes == tuple(sorted(set(sizes)))
    assert sizes[-1] == min(most, largest or MOST_PROMPT_TOKENS)
    for count in range(FEWEST_PROMPT_TOKENS, sizes[-1] + 1):
        assert next(s for s in sizes if s >= count) <= 1.5 * count
    assert prompt_sizes(most, (8, 8, 5, 10_000)) == tuple(n for n in (5, 8) if n <= most)


def test_requested_sizes() -> None:
    assert graph_sizes(100, (64, 3, 3, 500)) == (3, 64)
    assert graph_sizes(2, (64,)) == ()


@pytest.mark.parametrize("pads", [True, False])
def test_rows_take_the_next_size(pads: bool) -> None:
    graphs = StepGraphs(CpuDevice(), (2, 4), pads)
    assert graphs.size_for(2) == 0  # not captured yet
    table = torch.arange(4.0)
    graphs.capture(lambda size: table[:size, None].clone())
    assert [graphs.size_for(n) for n in (1, 2, 3, 4, 5)] == (
        [2, 2, 4, 4, 0] if pads else [0, 2, 0, 4, 0]
    )
    table += 7
    assert graphs.replay(2).flatten().tolist() == [7, 8]
    assert graphs.replay(4).flatten().tolist() == [7, 8, 9, 10]
    table += 1
    assert graphs.replay(2).flatten().tolist() == [8, 9]


def test_the_largest_is_captured_first() -> None:
    order: list[int] = []
    StepGraphs(CpuDevice(), (1, 8, 4)).capture(
        lambda size: (order.append(size), torch.zeros(size, 3))[1]
    )
    assert order == [8, 4, 1]


def test_without_sizes_there_is_none() -> None:
    graphs = StepGraphs(CpuDevice(), ())
    graphs.capture(lambda size: torch.zeros(size, 1))
    assert graphs.largest == 0 and graphs.size_for(1) == 0
