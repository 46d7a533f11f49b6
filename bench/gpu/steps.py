"""Times steps of a runner that run one after another, one in flight."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gpu.random_engine import Engine
from gpu.session import Mark, Session
from radixlm.base.record import Record, replace
from radixlm.step.plan import Item, StepPlan


class Times(Record):
    """Medians. `gpu_ms`: a step on the device with its draw; `draw_ms`: the draw; `period_ms`: from
    one step to the next; `host_us`: the launch of one."""

    gpu_ms: float
    draw_ms: float
    period_ms: float
    host_us: float


def time_steps(
    s: Session, engine: Engine, enter: StepPlan, items: tuple[Item, ...], count: int = 30
) -> Times:
    """Run the same step repeatedly; its tokens are written to the same places."""
    runner, marks, host_us = engine.runner, list[tuple[Mark, Mark, Mark]](), list[float]()
    plan, before = replace(enter, items=items), None
    for index in range(s.repeats(count) + (1 if s.is_smoke else 5)):
        began_s = time.perf_counter()
        first = s.mark()
        step = runner.forward(plan if index == 0 else StepPlan(index, items))
        middle = s.mark()
        runner.sample(step, {})
        marks.append((first, middle, s.mark()))
        host_us.append((time.perf_counter() - began_s) * 1e6)
        if before is not None:
            runner.read(before)
        before = step
    assert before is not None
    runner.read(before)
    warm = 1 if s.is_smoke else 5
    marks, pairs = marks[warm:], list(zip(marks[warm - 1 :], marks[warm:], strict=False))
    return Times(
        statistics.median(last.since_ms(first) for first, _, last in marks),
        statistics.median(last.since_ms(middle) for _, middle, last in marks),
        statistics.median(b[2].since_ms(a[2]) for a, b in pairs),
        statistics.median(host_us[warm:]),
    )


def kernels_of(s: Session, run: Callable[[], object], most: int = 8) -> list[dict[str, object]]:
    """The slowest kernels of `run`: name, calls, us; operations on a CPU."""
    is_cuda = s.device.type == "cuda"
    activity = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
    with profile(activities=[activity]) as traced:
        run()
        if is_cuda:
            torch.cuda.synchronize()
    spent: dict[str, list[float]] = {}
    for event in traced.events() or ():
        if not is_cuda or event.device_type == DeviceType.CUDA:
            spent.setdefault(event.name, []).append(event.time_range.elapsed_us())
    found = sorted(spent.items(), key=lambda entry: -sum(entry[1]))[:most]
    return [{"name": n[:80], "calls": len(us), "us": round(sum(us), 1)} for n, us in found]
