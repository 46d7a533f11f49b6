"""Stage 0: ceilings of the device, and whether the code imports on this machine."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import radixlm
from gpu.roofline import Ceilings
from gpu.session import Session

CHAIN = 200
PACKAGES = ("kernels", "attention", "pools", "models", "executor", "scheduler", "engine")


def run(s: Session) -> None:
    """Bandwidth, products, launches, copies. Decode rooflines use the bandwidth of reading."""
    _imports(s)
    bandwidth = _bandwidth(s)
    s.free()  # else cuBLAS takes its workspace from those 4 GiB and keeps all of them
    bf16, fp8 = _bf16(s), _fp8(s)
    if not s.is_smoke:
        s.ceilings = Ceilings(bandwidth * 1e9, bf16 * 1e12, (fp8 or 2 * bf16) * 1e12)
    _launches(s)
    _host_copies(s)


def _bandwidth(s: Session) -> float:
    """GB/s: the better of copying and reading."""
    num_bytes = 1 << 22 if s.is_smoke else 4 << 30
    x = s.normal(num_bytes // 2)
    y = torch.empty_like(x)
    copied = 2 * num_bytes / s.median_ms(lambda: y.copy_(x), 10) / 1e6
    read = num_bytes / s.median_ms(lambda: x.view(1024, -1).amax(1), 10) / 1e6
    s.add(what="copy", GB_s=copied)
    s.add(what="read", GB_s=read)
    return max(copied, read)


def _imports(s: Session) -> None:
    """Import every module except the entry points, with the installed versions."""
    failed = {}
    for package in PACKAGES:
        path = [f"{folder}/{package}" for folder in radixlm.__path__]
        names = [m.name for m in pkgutil.walk_packages(path, f"radixlm.{package}.")]
        for name in names:
            try:
                importlib.import_module(name)
            except ImportError as error:
                failed[name] = str(error)
    s.add(what="imports", failed=failed)


def _bf16(s: Session) -> float:
    size = 256 if s.is_smoke else 8192
    a, b = s.normal(size, size), s.normal(size, size)
    ms = s.median_ms(lambda: a @ b.T, 10)
    return float(s.add(what="gemm bf16", size=size, TF_s=2 * size**3 / ms / 1e9)["TF_s"])


def _fp8(s: Session) -> float:
    """0 on devices without fp8."""
    size = 256 if s.is_smoke else 8192
    if s.device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        s.add(what="gemm fp8 rowwise", error="needs sm_89")
        return 0.0
    a, b = (s.normal(size, size).to(torch.float8_e4m3fn) for _ in "ab")
    scale = torch.rand(size, 1, device=s.device) + 0.5
    product = partial(
        torch._scaled_mm, a, b.T, scale, scale.T.contiguous(), out_dtype=torch.bfloat16
    )
    try:
        ms = s.median_ms(product, 10)
    except (RuntimeError, ValueError) as error:
        s.add(what="gemm fp8 rowwise", error=str(error).splitlines()[0])
        return 0.0
    row = s.add(what="gemm fp8 rowwise", size=size, TF_s=2 * size**3 / ms / 1e9)
    return float(row["TF_s"])


def _launches(s: Session) -> None:
    """Microseconds of an empty kernel after another one, inside a graph."""
    for name, kernel in _empty_kernels(s).items():
        try:
            us = s.graph_ms([kernel] * CHAIN) * 1e3
        except (RuntimeError, TypeError, KeyError, AttributeError) as error:
            s.add(what="empty kernel", how=name, error=str(error).splitlines()[0])
        else:
            s.add(what="empty kernel", how=name, us=us)


def _empty_kernels(s: Session) -> dict[str, Callable[[], Any]]:
    x = s.normal(1)
    kernels: dict[str, Callable[[], Any]] = {"torch add": lambda: x.add_(1)}
    if s.device.type == "cuda":
        empty = importlib.import_module("gpu.empty_kernel").empty_kernel
        kernels["triton"] = lambda: empty[(1,)](x, num_warps=1)
        if torch.cuda.get_device_capability() >= (9, 0):
            kernels["triton, PDL"] = lambda: empty[(1,)](x, num_warps=1, launch_pdl=True)
    return kernels


def _host_copies(s: Session) -> None:
    is_cuda = s.device.type == "cuda"
    for num_bytes in (4096, 1 << 20, 1 << 22 if s.is_smoke else 1 << 28):
        host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        there = torch.zeros(num_bytes, dtype=torch.uint8, device=s.device)
        up = s.median_ms(partial(there.copy_, host, non_blocking=True), 10)
        down = s.median_ms(partial(host.copy_, there, non_blocking=True), 10)
        s.add(
            what="pinned copy", bytes=num_bytes, up_us=up * 1e3, down_us=down * 1e3,
            up_GB_s=num_bytes / up / 1e6, down_GB_s=num_bytes / down / 1e6,
        )  # fmt: skip
