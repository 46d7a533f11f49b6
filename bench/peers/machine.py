"""Ceilings of the machine, CPU use by other processes, and memory of a process tree."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from radixlm.kernels.cpu.extension import native

READ, MULTIPLY_ADD = 0, 1  # kinds of `_cpu.measure`
_READ_BYTES = 512 << 20
_SIDE = 2048


@dataclass(frozen=True, slots=True)
class Ceilings:
    """GB/s of reading with all threads, and the best arithmetic rate for each width.

    `gop_per_s`: bits of the weights -> GFLOP/s (GOP/s of integers) of the fastest unit for them: 32
    (multiply-add), 16 (matrix tiles if there are any), 8.
    """

    gb_per_s: float
    gop_per_s: dict[int, float]


def best_rate(run: Callable[[], float], rounds: int) -> float:
    """The largest of several results; lower ones were disturbed."""
    return max(run() for _ in range(rounds))


def _product_rate(product: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    product()
    return 2.0 * _SIDE**3 / (time.perf_counter() - start_s)


def measure_ceilings(num_threads: int, rounds: int = 7) -> Ceilings:
    """Reading and multiply-adds by the C++ extension, 16 and 8 bits by torch's products."""
    memory = torch.ones(_READ_BYTES // 4)
    torch.set_num_threads(num_threads)
    read = best_rate(
        lambda: native().measure(READ, memory.data_ptr(), memory.nbytes, num_threads), rounds
    )
    fp32 = best_rate(lambda: native().measure(MULTIPLY_ADD, 0, 2_000_000, num_threads), rounds)
    a, b = torch.randn(_SIDE, _SIDE).bfloat16(), torch.randn(_SIDE, _SIDE).bfloat16()
    bf16 = best_rate(lambda: _product_rate(lambda: torch.mm(a, b)), rounds)
    whole = torch.randint(-127, 127, (_SIDE, _SIDE), dtype=torch.int8)
    column_major = whole.t().contiguous().t()
    int8 = best_rate(lambda: _product_rate(lambda: torch._int_mm(whole, column_major)), rounds)
    rates = {32: fp32, 16: max(fp32, bf16), 8: max(fp32, bf16, int8)}
    return Ceilings(read / 1e9, {bits: rate / 1e9 for bits, rate in rates.items()})


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Processor seconds at one moment: of all processes, of ours, stolen by the host; wall time."""

    all_s: float
    own_s: float
    stolen_s: float
    at_s: float


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Cores that other processes used and that the host stole during a measurement."""

    foreign: float
    stolen: float


def tree(pid: int) -> list[psutil.Process]:
    """A process and its descendants."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_use(pid: int | None) -> CpuUse:
    """CPU use now; ours is this process and the tree below `pid`."""
    times = psutil.cpu_times()
    busy_s = times.user + times.nice + times.system + times.irq + times.softirq
    own_s = sum(os.times()[:2])
    for process in tree(pid) if pid is not None else []:
        try:
            used = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        own_s += used.user + used.system
    return CpuUse(busy_s, own_s, times.steal, time.monotonic())


def disturbance(before: CpuUse, after: CpuUse) -> Disturbance:
    """The disturbance between two moments."""
    wall_s = max(after.at_s - before.at_s, 1e-9)
    foreign_s = (after.all_s - before.all_s) - (after.own_s - before.own_s)
    return Disturbance(max(foreign_s / wall_s, 0.0), (after.stolen_s - before.stolen_s) / wall_s)


async def wait_quiet(pid: int | None, most_foreign: float, limit_s: float) -> bool:
    """Wait until others use less than ``most_foreign`` cores for a second; False if they do not
    within ``limit_s``."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        before = cpu_use(pid)
        await asyncio.sleep(1.0)
        if disturbance(before, cpu_use(pid)).foreign < most_foreign:
            return True
    return limit_s <= 0


def peak_rss_mb(pid: int) -> float:
    """Sum of the peak resident sizes of a process tree in MB; shared pages count once for each
    process."""
    total_kb = 0
    for process in tree(pid):
        try:
            status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
        except OSError:
            continue
        total_kb += status_kb(status, "VmHWM")
    return total_kb / 1024


def status_kb(status: str, name: str) -> int:
    """A size in /proc/PID/status, 0 if absent."""
    for line in status.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return 0
