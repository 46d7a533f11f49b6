"""Commands that every rank answers."""

from __future__ import annotations

import torch

from radixlm.engine.profile import Profiler
from radixlm.engine.tensor_controls import TensorControls


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
