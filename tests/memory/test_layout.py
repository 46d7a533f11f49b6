"""Pool sizes: counts, and the flag in the error for an impossible size."""

import pytest

from radixlm.base.errors import ConfigError
from radixlm.memory.layout import PoolLayout, WindowPool


def test_counts_exclude_the_null_page():
    layout = PoolLayout(16, 5, 2, (WindowPool(3, 20),))
    assert layout.num_tokens == 64


@pytest.mark.parametrize(
    ("make", "flag"),
    [
        (lambda: PoolLayout(0, 5, 2), "--page-size"),
        (lambda: PoolLayout(1, 1, 2), "--mem-fraction-static"),
        (lambda: PoolLayout(1, 5, 0), "--max-running-requests"),
        (lambda: WindowPool(1, 20), "--swa-full-tokens-ratio"),
        (lambda: WindowPool(4, 0), "window of 0"),
    ],
)
def test_impossible_sizes_name_the_flag(make, flag):
    with pytest.raises(ConfigError, match=flag):
        make()
