"""Runs requests through a whole scheduler in this thread and measures its steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gpu.random_engine import Engine
from gpu.requests import BenchRequest
from gpu.session import Mark
from radixlm.base.errors import EngineError
from radixlm.executor.runner import Runner
from radixlm.step.plan import Items, StepPlan
from radixlm.wire.replies import StepReply
from radixlm.wire.requests import Control, TokenizedRequest, pack_ids
from radixlm.wire.sampling_params import SamplingParams

STUCK_S = 60.0  # limit without a token; includes the compilation of kernels


@dataclass(slots=True)
class Drive:
    """Results of a run. `host_us`: times of decode ticks without waiting for the device."""

    tokens: list[list[int]]
    seconds: float = 0.0
    num_steps: int = 0
    cached_tokens: int = 0
    host_us: list[float] = field(default_factory=list)
    gap_share: float | None = None  # idle share of the device between decode steps, by events
    rows: list[int] = field(default_factory=list)

    @property
    def num_out(self) -> int:
        return sum(map(len, self.tokens))


class Watched:
    """A runner that records when its steps begin (with the upload) and end on the device, and how
    long it waits for results."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._device = runner, runner.device.where
        self._upload = runner.device.upload
        self._first = Mark(self._device)
        runner.device.upload = self._note  # type: ignore[method-assign]
        self.marks: list[
            tuple[Mark, Mark, int]
        ] = []  # (begin, end, rows); 0 rows if a step is not all decodes
        self.waited_s = 0.0
        self.rows = 0

    def close(self) -> None:
        """Restore the runner."""
        self._runner.device.upload = self._upload  # type: ignore[method-assign]

    def _note(self, host: Tensor, target: Tensor) -> None:
        self._first = Mark(self._device)
        self._upload(host, target)

    def forward(self, plan: StepPlan) -> Any:
        self.rows = 0 if Items.of(plan.items).prefills else len(plan.items)
        return self._runner.forward(plan)

    def sample(self, step: Any, masks: Any) -> None:
        self._runner.sample(step, masks)
        self.marks.append((self._first, Mark(self._device), self.rows))

    def read(self, step: Any) -> Any:
        began_s = time.perf_counter()
        if step.token_copy is not None and step.token_copy._event is not None:
            step.token_copy._event.wait()
        self.waited_s += time.perf_counter() - began_s
        return self._runner.read(step)

    def control(self, verb: str, args: dict[str, Any]) -> Any:
        return self._runner.control(verb, args)

    def gap_share(self, min_rows: int) -> float | None:
        """Idle time between two decode steps of at least `min_rows` rows, as a share of all
        time."""
        idle = busy = 0.0
        for (_, end, rows), (first, last, following) in zip(
            self.marks, self.marks[1:], strict=False
        ):
            if min(rows, following) >= min_rows:
                idle += max(0.0, first.since_ms(end))
                busy += last.since_ms(first)
        return idle / (idle + busy) if busy else None


def flush(engine: Engine) -> None:
    """Empty the prefix cache and the channel."""
    engine.mine.send(Control("flush", "flush_cache"))
    engine.scheduler.tick(wait=False)
    engine.mine.receive(0)


def drive(engine: Engine, requests: Sequence[BenchRequest], min_rows: int = 1) -> Drive:
    """Run all requests at once, greedy and to full length."""
    scheduler, found = engine.scheduler, Drive([[] for _ in requests])
    watched = Watched(engine.runner)
    scheduler.executor = watched
    for index, request in enumerate(requests):
        sampling = SamplingParams(max_new_tokens=request.output, temperature=0.0, ignore_eos=True)
        engine.mine.send(TokenizedRequest(f"{index}", pack_ids(request.ids), sampling))
    before, num_open = scheduler.num_steps, len(requests)
    began_s = checked_s = time.perf_counter()
    try:
        while num_open:
            num_open -= _tick(engine, watched, found)
            if time.perf_counter() - checked_s > 1 and found.num_out == 0:
                _check(began_s)
    finally:
        scheduler.executor = engine.runner
        watched.close()
    if engine.runner.device.where.type == "cuda":
        torch.cuda.synchronize()
    found.seconds = time.perf_counter() - began_s
    while scheduler.inflight:
        scheduler.tick(wait=False)
    found.num_steps = scheduler.num_steps - before
    found.gap_share = watched.gap_share(min_rows)
    return found


def _check(began_s: float) -> None:
    if time.perf_counter() - began_s > STUCK_S:
        raise EngineError(f"no token in {STUCK_S:.0f} s")


def _tick(engine: Engine, watched: Watched, found: Drive) -> int:
    """One tick of the loop; the number of finished requests."""
    waited_s, num_steps, began_s = watched.waited_s, len(watched.marks), time.perf_counter()
    engine.scheduler.tick(wait=False)
    host_s = time.perf_counter() - began_s - (watched.waited_s - waited_s)
    if len(watched.marks) > num_steps and watched.rows:
        found.host_us.append(host_s * 1e6)
        found.rows.append(watched.rows)
    ended = 0
    replies = [reply for reply in engine.mine.receive(0) if isinstance(reply, StepReply)]
    for reply in replies:
        for rid, token in zip(reply.rids, reply.tokens, strict=True):
            found.tokens[int(rid)].append(token)
        for delta in reply.deltas:
            found.tokens[int(delta.rid)].extend(delta.tokens)
            if delta.finish is not None:
                if delta.finish.kind in ("error", "abort"):
                    raise EngineError(f"a request failed: {delta.finish.message}")
                ended += 1
                found.cached_tokens += delta.cached_tokens
    return ended


def host_us(found: Drive, min_rows: int) -> float | None:
    """Median of the ticks that decoded at least `min_rows` rows."""
    pairs = zip(found.host_us, found.rows, strict=True)
    chosen = [us for us, rows in pairs if rows >= min_rows]
    return statistics.median(chosen) if chosen else None


def idle_share(
    engine: Engine, requests: Sequence[BenchRequest], skip: int, count: int
) -> float | None:
    """Share of `count` steps after the first `skip` in which no kernel and no copy runs, by the
    profiler. The profiler's own cost makes the share slightly too large."""
    if engine.runner.device.where.type != "cuda":
        return None
    for index, request in enumerate(requests):
        sampling = SamplingParams(max_new_tokens=request.output, temperature=0.0, ignore_eos=True)
        engine.mine.send(TokenizedRequest(f"{index}", pack_ids(request.ids), sampling))
    for _ in range(skip):
        engine.scheduler.tick(wait=False)
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        for _ in range(count):
            engine.scheduler.tick(wait=False)
        torch.cuda.synchronize()
    while engine.scheduler.planner.running or engine.scheduler.inflight:
        engine.scheduler.tick(wait=False)
    engine.mine.receive(0)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in traced.events() or ()
        if event.device_type == DeviceType.CUDA
    )
    return uncovered(spans)


def uncovered(spans: Sequence[tuple[float, float]]) -> float | None:
    """Share of the time between the first and the last that none of the sorted spans covers."""
    if not spans:
        return None
    begin, reached, idle = spans[0][0], spans[0][1], 0.0
    for start, end in spans[1:]:
        idle += max(0.0, start - reached)
        reached = max(reached, end)
    return idle / (reached - begin) if reached > begin else None
