"""Commands that every rank answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from radixlm.engine.memory import Pools
from radixlm.engine.profile import Profiler
from radixlm.engine.tensor_controls import TensorControls
from radixlm.pools.capacity import PoolSizes


@pytest.mark.parametrize(
    ("window", "has_states", "wanted"), [(0, 0, None), (8, 0, 20), (8, 1, None)]
)
def test_the_capacity_of_sliding_windows_is_told(
    window: int, has_states: int, wanted: int | None
) -> None:
    states: Any = object() if has_states else None
    pools = Pools(PoolSizes(9, 5), 4, torch.float32, 0, window_tokens=window, states=states)
    profiler = Profiler(torch.device("cpu"))
    controls = TensorControls(
        lambda name: None, 0, 0, 36, 0, profiler, window_capacity=pools.num_window_tokens
    )
    usage = controls.commands()["memory_usage"]({})
    assert (usage["token_capacity"], usage["token_capacity_swa"]) == (36, wanted)


def test_a_scrape_does_not_look_at_all_pages_of_the_pools() -> None:
    looks: list[int] = []

    def resident() -> int:
        looks.append(1)
        return 7

    controls = TensorControls(lambda name: None, 0, 0, 0, 3 << 30, Profiler(torch.device("cpu")))
    controls.note_pools(resident)
    usage = controls.commands()["memory_usage"]
    assert "kvcache_resident_bytes" not in usage({"is_brief": True}) and not looks
    assert usage({})["kvcache_resident_bytes"] == 7 and looks == [1]
    controls.note_graphs(1 << 29)
    assert usage({})["startup_available"] == 3.0
    assert {kind: size for kind, size in usage({})["graph"].items() if size} == {"decode": 0.5}
