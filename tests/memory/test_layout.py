"""Pool sizes: the flag in the error for an impossible size."""

import pytest

from radixlm.base.errors import ConfigError
from radixlm.memory.layout import WindowPool


@pytest.mark.parametrize(
    ("make", "flag"),
    [
        (lambda: WindowPool(1, 20), "--swa-full-tokens-ratio"),
        (lambda: WindowPool(4, 0), "window of 0"),
    ],
)
def test_impossible_sizes_name_the_flag(make, flag):
    with pytest.raises(ConfigError, match=flag):
        make()
