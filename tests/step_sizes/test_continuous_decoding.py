"""What ContinuousDecoding tells drafters that a pass costs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from radixlm.scheduler.kv_cache_manager import KVCacheManager
from radixlm.scheduler.limits import Limits
from radixlm.step.plan import DecodeBatch, Items
from radixlm.step.result import StepResult
from radixlm.step_sizes.continuous_decoding import ContinuousDecoding

PREPARED_S, PASS_S, OTHER_S = 0.0002, 0.0002, 0.0003  # of the first pass, of each, and of the rest


def _observe(continuous: ContinuousDecoding, num_passes: int) -> float:
    """A step of one row in so many passes, as a model of the times above takes."""
    items: Any = SimpleNamespace(decodes=cast(DecodeBatch, SimpleNamespace(slots=np.array([0]))))
    items.more_N = None if num_passes == 1 else np.array([num_passes - 1])
    result: Any = SimpleNamespace(counts=np.array([num_passes]))
    return continuous.observe(
        cast(Items, items),
        cast(StepResult, result),
        PREPARED_S + num_passes * PASS_S + OTHER_S,
        PREPARED_S + PASS_S,
    )


def test_a_lone_step_counts_as_one_of_many_passes_once_they_were_measured() -> None:
    manager: Any = SimpleNamespace(table=SimpleNamespace(goes_on=np.ones(1, bool)))
    limits = Limits(1, None, 16, 16, 64, 4, max_passes=0)
    continuous = ContinuousDecoding(limits, cast(KVCacheManager, manager))
    before_s = _observe(continuous, 1)
    assert before_s > PREPARED_S + PASS_S
    for _ in range(40):
        many_s = _observe(continuous, 16)
    assert _observe(continuous, 1) == pytest.approx(many_s, rel=0.2)
    assert many_s < 0.7 * before_s
