"""The CPU kernel benchmark at toy size: its calls are right, and rates follow from times."""

from __future__ import annotations

import json

import pytest
import torch
from tests.bench.scripts import bench_module

from radixlm.bench.cli import run
from radixlm.kernels.cpu import available
from radixlm.kernels.cpu import linear as cpu_linear
from radixlm.kernels.cpu.cache import CacheShape

kernels = bench_module("cpu_kernels")
Ceilings = kernels.Ceilings

needs_extension = pytest.mark.skipif(not available, reason="the C++ kernels are not built")
TOY = (
    "--hidden-size 64 --intermediate-size 96 --num-heads 4 --num-kv-heads 2 --head-dim 32 "
    "--cpu-threads 1 --seconds 0.001 --formats fp32 w8a8 --num-experts 6 --experts-per-token 2 "
    "--moe-intermediate-size 32 --latent-rank 40 --latent-rope-dim 8 --json"
).split()


def main(*args: str) -> int:
    return run("bench/cpu_kernels.py", kernels.main, args)


@pytest.fixture(autouse=True)
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_MEMORY_BYTES", 1 << 20)
    monkeypatch.setattr(kernels, "_WEIGHT_BYTES", 1 << 15)


@needs_extension
def test_every_kernel_has_figures(capsys) -> None:
    assert main(*TOY) == 0
    result = json.loads(capsys.readouterr().out)
    names = " ".join(row["name"] for row in result["kernels"])
    for wanted in (
        "1 rows",
        "16 rows",
        "512 rows",
        "decode",
        "extend",
        "latents decode",
        "latents extend",
        "experts",
        "norm",
        "lora",
    ):
        assert wanted in names
    for row in result["kernels"]:
        assert 0 < row["best_ms"] <= row["median_ms"]
        peak = row["ceilings"]["gb_per_s"]
        assert row["share_of_bytes"] == pytest.approx(row["gb_per_s"] / peak)
        assert peak <= result["ceilings"]["gb_per_s"]
    assert result["ceilings_of_a_thread"]["int8_gop_per_s"] > 0
    units = {row["arithmetic"] for row in result["kernels"] if "w8a8" in row["name"]}
    assert units == {"int8"}


def test_shares_are_of_the_unit_that_works() -> None:
    tiles, none = Ceilings(20.0, 300.0, 4000.0, 8000.0), Ceilings(25.0, 280.0, 0.0, 900.0)
    assert [tiles.rate(name) for name in ("fp32", "bf16", "int8")] == [300.0, 4000.0, 8000.0]
    assert [none.rate(name) for name in ("fp32", "bf16", "int8")] == [280.0, 280.0, 900.0]
    assert tiles.best(none) == Ceilings(25.0, 300.0, 4000.0, 8000.0)
    text = kernels.render(2, tiles, none, [])
    assert "4000 in bfloat16, 8000 of int8" in text and "1 thread: 25.0 GB/s" in text


@needs_extension
def test_counted_bytes_and_operations() -> None:
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
def test_experts_are_counted_once_each() -> None:
    alone, many = kernels.expert_cases((16, 2, 64, 32), ["int8wo"])
    weights = 3 * 64 * 32  # weights of an expert, one byte each, without scales
    assert 2 * weights < alone.num_bytes < 2.2 * weights + 2 * 4096
    assert alone.num_bytes < many.num_bytes <= 8 * alone.num_bytes
    products = max(1, cpu_linear.pack(torch.ones(32, 64), None, "int8wo").byte_products)
    assert many.num_flops == 16 * alone.num_flops == 2 * 16 * 2 * weights * products
    out = many.run()
    assert isinstance(out, torch.Tensor) and out.shape == (16, 64) and bool(out.isfinite().all())


@needs_extension
def test_adapters_are_counted_once_for_all_of_their_rows() -> None:
    cases = {case.name: case for case in kernels.lora_cases(96, 64, 8)}
    many = cases["lora, 64 rows of 4 adapters of rank 8, 64 to 96"]
    assert many.num_bytes == 4 * 8 * (64 + 96) * 2 + 64 * 64 * 4 + 2 * 64 * 96 * 4
    assert many.num_flops == 2 * 64 * 8 * (64 + 96)
    many.run()


@needs_extension
def test_more_choices_than_experts_are_refused(capsys) -> None:
    assert main(*TOY, "--experts-per-token", "7") == 2
    assert "--experts-per-token" in capsys.readouterr().err


@needs_extension
def test_sizes_without_a_kernel_are_refused(capsys) -> None:
    assert main(*TOY, "--page-size", "5") == 2
    assert "page_size" in capsys.readouterr().err


def test_a_missing_extension_is_named(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(kernels, "available", False)
    monkeypatch.setattr(kernels, "reason", "radixlm._cpu is not built")
    assert main(*TOY) == 2
    assert "not built" in capsys.readouterr().err
