"""Long garbage collections are logged; short ones are not, and none without the flag."""

from __future__ import annotations

import gc
import logging

import pytest

from radixlm.observe.gcwatch import GcWatch


@pytest.mark.parametrize(("threshold_s", "count"), [(0.5, 1), (2.0, 0), (0.0, 0)])
def test_long_collections_are_warned_about(
    threshold_s: float, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = iter(range(1000))  # each read of the clock is a second later
    watch = GcWatch(threshold_s, lambda: float(next(now_s)))
    gc.disable()
    watch.install()
    try:
        with caplog.at_level(logging.WARNING, "radixlm"):
            gc.collect()
    finally:
        watch.remove()
        gc.enable()
    said = [record for record in caplog.records if record.name.startswith("radixlm")]
    assert len(said) == count  # other loggers may report what the collection finds
    assert watch not in gc.callbacks
    assert not count or "took 1.000 s" in caplog.text
