"""State that the stages share: device, remaining time, timers, and the record, which is written
after every stage."""

from __future__ import annotations

import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu.roofline import Ceilings

Row = dict[str, Any]


@dataclass(slots=True)
class Session:
    """One run. `is_smoke`: on a CPU in tiny shapes, to test the code; its figures mean nothing."""

    device: torch.device
    deadline_s: float  # in time.monotonic()
    out: Path
    quick: bool = False
    is_smoke: bool = False
    ceilings: Ceilings = field(default_factory=Ceilings)
    record: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)  # of the running stage

    def left_s(self) -> float:
        """Remaining seconds of the budget."""
        return self.deadline_s - time.monotonic()

    def add(self, **row: Any) -> Row:
        """Record a result of the stage and write the file. Numbers that JSON lacks become words."""
        row = {k: str(v) if isinstance(v, float) and not isfinite(v) else v for k, v in row.items()}
        self.rows.append(row)
        print("  " + json.dumps(row), flush=True)
        self.write()
        return row

    def write(self) -> None:
        """Write the record atomically."""
        scratch = self.out.with_suffix(".tmp")
        scratch.write_text(json.dumps(self.record, indent=1) + "\n")
        os.replace(scratch, self.out)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Random numbers on the device; zeros would run faster than real data."""
        return torch.empty(shape, device=self.device, dtype=dtype).normal_()

    def repeats(self, count: int) -> int:
        """Number of repetitions of a timing."""
        return 2 if self.is_smoke else count

    def mark(self) -> Mark:
        """A mark at the current time of the device's clock."""
        return Mark(self.device)

    def median_ms(self, run: Callable[[], object], count: int = 30, warm: int = 3) -> float:
        """Median time of `run` on the device, launched alone each time."""
        for _ in range(1 if self.is_smoke else warm):
            run()
        times = []
        for _ in range(self.repeats(count)):
            start = self.mark()
            run()
            times.append(self.mark().since_ms(start))
        return float(statistics.median(times))

    def graph_ms(self, runs: Sequence[Callable[[], object]], count: int = 30) -> float:
        """Median time of one of `runs`, launched one after another by a graph."""
        if self.device.type != "cuda":
            return self.median_ms(runs[0], count)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for run in runs:
                run()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for run in runs:
                    run()
            return self.median_ms(graph.replay, count) / len(runs)

    def free(self) -> None:
        """Return unused memory to the device."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


class Mark:
    """A point in the current stream; on a CPU a time."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        self._s = 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._s = time.perf_counter()

    def since_ms(self, earlier: Mark) -> float:
        """Time from `earlier` to this mark; waits until the device reaches it."""
        if self._event is None:
            return (self._s - earlier._s) * 1e3
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event))


def relative(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of `want`; infinite if `got` is not finite."""
    got, want = got.double(), want.double()
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got - want).norm() / want.norm().clamp(min=1e-30))
