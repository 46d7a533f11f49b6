"""What changes the digests of a manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from radixlm.base.record import replace
from radixlm.tiers.manifest import Manifest, PageGroup, Rectangle, weights_digest

PLAIN = Manifest("m", "w", "1", "bf16", 16, (PageGroup(0, (0, 1), 2, 64, 64),))


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"},
        {"weights_digest": "x"},
        {"weights_version": "2"},
        {"kv_dtype": "int8"},
        {"page_size": 64},
        {"groups": ()},
        {"quantization": "fp8"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_the_numbers_mean_is_in_both_digests(change: dict[str, Any]) -> None:
    other = replace(PLAIN, **change)
    assert other.digest != PLAIN.digest and other.storage_digest != PLAIN.storage_digest
    (difference,) = PLAIN.differences(other)
    assert difference.startswith(f"{next(iter(change))}: ")


@pytest.mark.parametrize(
    "change",
    [
        {"layout": "tiles"},
        {"numerics": "cuda"},
        {"rectangle": Rectangle(1, 2)},
        {"page_bytes": (1, 0)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_how_the_bytes_lie_is_in_the_storage_digest_only(change: dict[str, Any]) -> None:
    other = replace(PLAIN, **change)
    assert other.digest == PLAIN.digest and other.storage_digest != PLAIN.storage_digest
    assert not PLAIN.differences(other)


def test_weights_digest_reads_names_sizes_and_both_ends(tmp_path: Path) -> None:
    path, ends = tmp_path / "model.safetensors", bytearray(300_000)
    path.write_bytes(ends)
    seen = {weights_digest(tmp_path)}
    for change in (0, 299_999):
        ends[change] = 1
        path.write_bytes(ends)
        seen.add(weights_digest(tmp_path))
    path.write_bytes(ends + b"1")
    seen.add(weights_digest(tmp_path))
    path.rename(tmp_path / "other.safetensors")
    seen.add(weights_digest(tmp_path))
    assert len(seen) == 5
    (tmp_path / "readme.md").write_text("not weights")
    assert weights_digest(tmp_path) in seen
    assert weights_digest(tmp_path / "other.safetensors") in seen


def test_weights_that_differ_in_the_middle_only_are_others(tmp_path: Path) -> None:
    """As of a checkpoint of which some layers were trained."""
    path, data = tmp_path / "model.safetensors", bytearray(8 << 20)
    path.write_bytes(data)
    before = weights_digest(tmp_path)
    data[3 << 20 : 5 << 20] = b"\1" * (2 << 20)
    path.write_bytes(data)
    assert weights_digest(tmp_path) != before
