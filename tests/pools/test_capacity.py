"""How many pages fit; errors name the numbers and one flag that helps."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.base.errors import ConfigError
from radixlm.pools.capacity import MemoryFacts, PoolSizes, WindowShare, pool_sizes

GIB = 2**30


def _facts(**changes: object) -> MemoryFacts:
    values: dict[str, object] = {
        "free_bytes": 10 * GIB,
        "weight_bytes": 2 * GIB,
        "mem_fraction_static": 0.6,
        "max_total_tokens": None,
        "max_running": 1000,
        "context_len": 10**6,
    }
    return MemoryFacts(**{**values, **changes})  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    st.integers(1, 64 * GIB),
    st.integers(0, 8 * GIB),
    st.floats(0.05, 0.95),
    st.integers(1, 1 << 20),
    st.sampled_from([1, 16, 64]),
)
def test_never_more_than_the_share(
    free: int, weights: int, fraction: float, page_bytes: int, page_size: int
) -> None:
    facts = _facts(free_bytes=free, weight_bytes=weights, mem_fraction_static=fraction)
    try:
        sizes = pool_sizes(facts, page_bytes, 0, page_size, None)
    except ConfigError:
        # not even two pages (one is the null page) fit
        assert (free * fraction - weights) < 2 * page_bytes + 1
        return
    assert sizes.num_full >= 1
    assert (sizes.num_full + 1) * page_bytes + weights <= free * fraction + 1


def test_no_more_than_can_be_used() -> None:
    facts = _facts(max_running=3, context_len=100)
    assert pool_sizes(facts, 1000, 0, 16, None) == PoolSizes(3 * 7)


def test_the_requested_number() -> None:
    assert pool_sizes(_facts(max_total_tokens=1000), 1000, 0, 16, None) == PoolSizes(63)


def test_window_layers_have_their_own_count() -> None:
    facts = _facts(max_total_tokens=1000)
    assert pool_sizes(facts, 500, 500, 1, WindowShare(0.25, 10)) == PoolSizes(1000, 250)
    # one request must be able to run with any ratio
    assert pool_sizes(facts, 500, 500, 1, WindowShare(0.001, 40)) == PoolSizes(1000, 40)
    small = _facts(max_total_tokens=20)
    assert pool_sizes(small, 500, 500, 1, WindowShare(0.5, 40)) == PoolSizes(20, 20)


def test_too_many_tokens_are_refused_with_a_number_that_works() -> None:
    facts = _facts(max_total_tokens=10**7)
    with pytest.raises(ConfigError) as caught:
        pool_sizes(facts, 16_384, 0, 16, None)
    text = str(caught.value)
    assert "2.00 GiB" in text or "2 GiB" in text or "2.0 GiB" in text, text
    assert text.startswith("--max-total-tokens") and "0.6" in text
    works = int(re.findall(r"lower --max-total-tokens to (\d+)", text)[0])
    assert pool_sizes(_facts(max_total_tokens=works), 16_384, 0, 16, None).num_full == works // 16
    with pytest.raises(ConfigError):
        pool_sizes(_facts(max_total_tokens=works + 16), 16_384, 0, 16, None)


def test_weights_that_need_a_larger_share_say_which() -> None:
    facts = _facts(weight_bytes=7 * GIB)
    with pytest.raises(ConfigError) as caught:
        pool_sizes(facts, 16_384, 0, 16, None)
    share = float(re.findall(r"raise --mem-fraction-static to (0\.\d+)", str(caught.value))[0])
    works = _facts(weight_bytes=7 * GIB, mem_fraction_static=share)
    assert pool_sizes(works, 16_384, 0, 16, None).num_full > 0


def test_weights_that_never_fit_say_so() -> None:
    with pytest.raises(ConfigError, match="smaller model"):
        pool_sizes(_facts(weight_bytes=11 * GIB), 16_384, 0, 16, None)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.integers(GIB, 200 * GIB), st.floats(0.0, 0.9), st.floats(0.0, 0.5))
def test_without_a_fraction_all_but_the_steps_memory_is_used(
    free: int, weights: float, steps: float
) -> None:
    facts = _facts(
        free_bytes=free,
        weight_bytes=int(free * weights),
        step_bytes=int(free * steps),
        mem_fraction_static=None,
    )
    page_bytes = 16_384
    left = free - facts.weight_bytes - facts.step_bytes
    try:
        sizes = pool_sizes(facts, page_bytes, 0, 16, None)
    except ConfigError as error:
        assert left < 2 * page_bytes and "that steps need" in str(error)
        return
    used = (sizes.num_full + 1) * page_bytes
    assert used <= left and (left - used < page_bytes or sizes.num_full == 1000 * 62_500)
