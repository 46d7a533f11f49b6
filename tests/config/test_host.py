"""Facts about the machine."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from radixlm.config import host
from radixlm.config.host import (
    cgroup_limits,
    free_memory_bytes,
    has_cuda,
    read_host_info,
    total_memory_bytes,
)


def test_the_host_is_described() -> None:
    found = read_host_info({"context_len": 8})
    assert found.num_cpus == len(os.sched_getaffinity(0))
    assert found.model == {"context_len": 8}
    assert read_host_info().model is None
    assert found.device in ("cpu", "cuda")


def test_cuda_needs_driver_build_and_visibility(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "nvidiactl"
    monkeypatch.setattr(host, "version", lambda name: "2.13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert not has_cuda(driver)
    driver.touch()
    assert has_cuda(driver)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not has_cuda(driver)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(host, "version", lambda name: "2.13.0+cpu")
    assert not has_cuda(driver)

    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(host, "version", absent)
    assert not has_cuda(driver)


def test_limits_of_the_own_control_group_and_those_above_count(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("4:cpu,cpuacct:/x\n3:memory:/a/b\n0::/s/unit.service\n")
    first, second = tmp_path / "memory" / "a", tmp_path / "s" / "unit.service"
    first.mkdir(parents=True)
    second.mkdir(parents=True)
    limits = cgroup_limits(own, tmp_path)
    assert {first / "memory.limit_in_bytes", second / "memory.max"} <= {*limits}
    assert tmp_path / "memory.max" in limits and not any("x" in one.parts for one in limits)
    (second / "memory.max").write_text("max\n")
    (first / "memory.limit_in_bytes").write_text("1000\n")
    (first / "memory.usage_in_bytes").write_text("900\n")
    (first / "memory.stat").write_text("cache 500\nactive_file 100\ninactive_file 300\n")
    assert free_memory_bytes(10_000, limits) == 500
    assert free_memory_bytes(400, limits) == 400
    assert (total_memory_bytes(10_000, limits), total_memory_bytes(900, limits)) == (1000, 900)
