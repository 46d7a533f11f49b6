"""The digest of updated weights: one changed number anywhere gives another."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from radixlm.engine.live_weights import digest_of
from radixlm.wire.weights import WeightsSource


def test_every_number_counts(tmp_path: Path) -> None:
    base, delta = tmp_path / "base", tmp_path / "delta"
    base.mkdir()
    delta.mkdir()
    weight = torch.zeros(3 << 18)  # 3 MB
    save_file({"w": weight}, base / "model.safetensors")
    alone = WeightsSource(str(base), "auto")
    both = WeightsSource(str(base), "auto", deltas=(str(delta),))
    seen = {digest_of(alone)}
    for place in (0, 1000, 200_000, len(weight) - 1):
        changed = weight.clone()
        changed[place] = 1.0
        save_file({"w": changed}, delta / "part.safetensors")
        os.utime(delta / "part.safetensors", ns=(place, place))
        seen.add(digest_of(both))
    assert len(seen) == 5
    assert digest_of(alone) in seen and digest_of(both) == digest_of(both)
