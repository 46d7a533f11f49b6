"""Window pools have the size that the flags give."""

import pytest

from radixlm.base.errors import ConfigError
from radixlm.pools.window_ratio import window_ratio


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
