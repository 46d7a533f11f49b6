"""Budgets: never above the bytes given, ratios as the flags say."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.base.errors import ConfigError
from radixlm.memory.budget import split_budget, uniform_budget, window_ratio


def test_ratio_of_each_flag():
    assert window_ratio(0.8, None, 1024, 8192) == 0.8
    assert window_ratio(0.8, 0.0, 1024, 8192) == 1.0
    assert window_ratio(0.8, 1.0, 1024, 8192) == 0.125
    assert window_ratio(0.8, 0.5, 1024, 8192) == pytest.approx(0.5625)
    assert window_ratio(0.8, 1.0, 9999, 8192) == 1.0


@pytest.mark.parametrize(
    ("flags", "name"),
    [((0.0, None), "--swa-full"), ((1.5, None), "--swa-full"), ((0.8, 1.1), "--hybrid-kv")],
)
def test_ratios_out_of_range_name_the_flag(flags, name):
    with pytest.raises(ConfigError, match=name):
        window_ratio(*flags, 1024, 8192)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(
    st.integers(1, 10**12),
    st.integers(0, 10**6),
    st.integers(1, 10**6),
    st.floats(0.01, 1.0),
    st.integers(1, 64),
)
def test_split_fits_and_uses_the_budget(total, full_bytes, window_bytes, ratio, min_pages):
    try:
        budget = split_budget(total, full_bytes, window_bytes, ratio, min_pages)
    except ConfigError:
        assert total < (min_pages + 2) * (full_bytes + window_bytes) / min(ratio, 1)
        return
    used = budget.num_full_pages * full_bytes + budget.num_window_pages * window_bytes
    assert used <= total
    assert min_pages < budget.num_window_pages <= budget.num_full_pages
    if budget.num_window_pages > min_pages + 1:
        assert total - used <= full_bytes + 2 * window_bytes
        assert budget.num_window_pages == int(budget.num_full_pages * ratio)


def test_a_window_fits_whatever_the_ratio():
    budget = split_budget(1000, 8, 2, ratio=0.01, min_window_pages=50)
    assert budget.num_window_pages == 51 and budget.num_full_pages == (1000 - 102) // 8


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((100, 8, 2, 0.5, 50), "--mem-fraction-static"),
        ((100, 0, 0, 0.5), "nothing to divide"),
        ((-1, 8, 2, 0.5), "cannot divide"),
        ((100, 8, 2, 0.0), "cannot divide"),
    ],
)
def test_impossible_splits(args, message):
    with pytest.raises(ConfigError, match=message):
        split_budget(*args)


def test_one_group():
    assert uniform_budget(1000, 8, 2).num_full_pages == 100
    assert uniform_budget(1000, 8, 2).num_window_pages == 0
    with pytest.raises(ConfigError, match="--mem-fraction-static"):
        uniform_budget(19, 8, 2)
    with pytest.raises(ConfigError, match="nothing"):
        uniform_budget(19, 0)
