"""The kernel benchmark at toy size: what it calls is right, and its rates follow from its times."""

from __future__ import annotations

import json

import pytest
import torch

from radixlm.bench import kernels
from radixlm.bench.cli import main
from radixlm.kernels.cpu import available
from radixlm.kernels.cpu.cache import CacheShape

needs_extension = pytest.mark.skipif(not available, reason="the C++ kernels are not built")
TOY = (
    "--hidden-size 64 --intermediate-size 96 --num-heads 4 --num-kv-heads 2 --head-dim 32 "
    "--cpu-threads 1 --seconds 0.001 --formats fp32 --json"
).split()


@pytest.fixture(autouse=True)
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_CEILING_BYTES", 1 << 20)
    monkeypatch.setattr(kernels, "_CEILING_SIDE", 64)


@needs_extension
def test_every_kernel_has_figures(capsys) -> None:
    assert main(["kernels", *TOY]) == 0
    result = json.loads(capsys.readouterr().out)
    names = " ".join(row["name"] for row in result["kernels"])
    for wanted in ("1 rows", "16 rows", "512 rows", "decode", "extend", "norm"):
        assert wanted in names
    peak = result["ceilings"]["gb_per_s"]
    for row in result["kernels"]:
        assert 0 < row["best_ms"] <= row["median_ms"]
        assert row["share_of_bytes"] == pytest.approx(row["gb_per_s"] / peak)


@needs_extension
def test_counted_work_is_the_work_done() -> None:
    cases = {case.name: case for case in kernels.linear_cases(96, 64, ["fp32", "int8wo"])}
    assert cases["linear fp32, 16 rows, 64 -> 96"].num_flops == 2 * 16 * 64 * 96
    plain, small = cases["linear fp32, 1 rows, 64 -> 96"], cases["linear int8wo, 1 rows, 64 -> 96"]
    assert small.num_bytes < plain.num_bytes / 2
    out = plain.run()
    assert isinstance(out, torch.Tensor) and out.shape == (1, 96)
    shape = CacheShape(2, 32, 32, 16, torch.float32)
    extend = next(c for c in kernels.attention_cases(shape, 4) if "512 new" in c.name)
    assert extend.num_flops == 2 * (512 * 513 // 2) * 4 * 64


@needs_extension
def test_sizes_without_a_kernel_are_refused(capsys) -> None:
    assert main(["kernels", *TOY, "--page-size", "5"]) == 2
    assert "page_size" in capsys.readouterr().err


def test_a_missing_extension_is_named(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(kernels, "available", False)
    monkeypatch.setattr(kernels, "reason", "radixlm._cpu is not built")
    assert main(["kernels", *TOY]) == 2
    assert "not built" in capsys.readouterr().err
