"""``radixlm bench host``: what scheduler and prefix cache cost, without a model.

A real scheduler over an executor that does nothing; every running request decodes one token a
step, streamed. The garbage collector is on: what it costs belongs to the figures.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from radixlm.base.errors import InvariantError
from radixlm.bench import host_memory, report
from radixlm.bench.options import Parser, positive
from radixlm.memory.pages import PageAllocator
from radixlm.memory.prefix.radix import RadixCache
from radixlm.memory.slots import SlotAllocator
from radixlm.scheduler.hooks import Hooks
from radixlm.scheduler.ledger import KvLedger
from radixlm.scheduler.limits import Limits
from radixlm.scheduler.loop import Scheduler
from radixlm.step.plan import StepPlan
from radixlm.step.result import ItemResult, StepResult
from radixlm.wire.channel import MemoryChannel
from radixlm.wire.codec import scheduler_codec
from radixlm.wire.replies import StepReply, TokenDelta
from radixlm.wire.requests import TokenizedRequest, pack_ids
from radixlm.wire.sampling_params import SamplingParams

# the most that plan and commit together may take, in ms, by the number of running requests
GOALS_MS = {16: 0.1, 256: 0.4}
_VOCAB = 32_000
_TOKEN = 7
_PROMPT = 128


class NullExecutor:
    """Samples the same token for every request, in no time."""

    def forward(self, plan: StepPlan) -> StepPlan:
        """Nothing to launch."""
        return plan

    def sample(self, step: StepPlan, masks: dict[int, Any]) -> None:
        """Nothing to draw."""

    def read(self, step: StepPlan) -> StepResult:
        """One token for each item that emits."""
        return StepResult([ItemResult((_TOKEN,) if item.emit else ()) for item in step.items])

    def control(self, verb: str, args: dict[str, Any]) -> Any:
        """Nothing to control."""
        return {}


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a decode step in ms: median, best, 99th percentile, and median CPU time."""

    name: str
    median_ms: float
    min_ms: float
    p99_ms: float
    cpu_ms: float
    goal_ms: float | None = None

    @property
    def is_met(self) -> bool | None:
        """Whether the CPU time keeps the goal (the wall clock shows who else is running)."""
        return None if self.goal_ms is None else self.cpu_ms <= self.goal_ms


class Clock:
    """Wall and CPU time of one part of each step."""

    def __init__(self) -> None:
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []

    def __enter__(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.cpu_s.append(time.thread_time() - self._cpu_s)
        self.wall_s.append(time.perf_counter() - self._wall_s)


def part(name: str, clocks: Sequence[Clock], goal_ms: float | None = None) -> Part:
    """The figures of ``clocks``, added up step by step."""
    wall_ms = [1e3 * sum(step) for step in zip(*(c.wall_s for c in clocks), strict=True)]
    cpu_ms = [1e3 * sum(step) for step in zip(*(c.cpu_s for c in clocks), strict=True)]
    return Part(
        name,
        statistics.median(wall_ms),
        min(wall_ms),
        float(np.percentile(wall_ms, 99)),
        statistics.median(cpu_ms),
        goal_ms,
    )


class Steps:
    """A scheduler with ``num_running`` requests that decode; ``step`` times one step."""

    def __init__(self, num_running: int, num_steps: int, page_size: int) -> None:
        limits = Limits(
            max_running=num_running,
            max_queued=None,
            step_tokens=num_running * _PROMPT,
            max_prefill_tokens=num_running * _PROMPT,
            context_len=_PROMPT + num_steps + 64,
            page_size=page_size,
            vocab=_VOCAB,
        )
        pages = PageAllocator(num_running * (limits.context_len // page_size + 2) + 2, page_size)
        ledger = KvLedger(
            pages, SlotAllocator(num_running), RadixCache(pages, page_size), page_size
        )
        self._mine, theirs = MemoryChannel.pair()
        self.scheduler = Scheduler(limits, NullExecutor(), theirs, ledger, Hooks())
        self._codec = scheduler_codec()
        self.plan, self.commit, self.encode = Clock(), Clock(), Clock()
        self._fill(num_running, num_steps + 32, page_size)

    def _fill(self, num_running: int, num_tokens: int, page_size: int) -> None:
        """Admit all requests, and compute their prompts."""
        draw = np.random.default_rng(0)
        sampling = SamplingParams(max_new_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        for index in range(num_running):
            # lengths differ, so that each step some requests need a page, as in real life
            length = _PROMPT - index % min(page_size, _PROMPT)
            ids = draw.integers(0, _VOCAB, length, np.int32)
            wire = TokenizedRequest(rid=f"{index:032x}", input_ids=pack_ids(ids), sampling=sampling)
            self._mine.send(wire)
        for _ in range(16):
            self.scheduler.tick(wait=False)
            self._mine.receive(0)
        running = self.scheduler.planner.running
        if len(running) != num_running or any(r.is_prefilling for r in running):
            raise InvariantError(f"{len(running)} of {num_running} requests run")

    def step(self) -> list[TokenDelta]:
        """Plan, compute nothing, commit, encode the deltas for intake."""
        scheduler = self.scheduler
        with self.plan:
            plan = scheduler.planner.plan(1.0)
        assert plan is not None
        result = scheduler.executor.read(plan)
        with self.commit:
            deltas = scheduler.committer.commit(plan, result)
        with self.encode:
            self._codec.encode(StepReply(deltas))
        return deltas


def measure(num_running: int, num_steps: int, page_size: int) -> list[Part]:
    """The parts of a decode step with ``num_running`` requests."""
    steps = Steps(num_running, num_steps + 16, page_size)
    for _ in range(16):
        steps.step()
    for clock in (steps.plan, steps.commit, steps.encode):
        clock.wall_s.clear()
        clock.cpu_s.clear()
    for _ in range(num_steps):
        if len(steps.step()) != num_running:
            raise InvariantError(f"a step gave no token to some of {num_running} requests")
    label = f"{num_running} running"
    return [
        part(f"plan, {label}", [steps.plan]),
        part(f"commit, {label}", [steps.commit]),
        part(f"plan + commit, {label}", [steps.plan, steps.commit], GOALS_MS.get(num_running)),
        part(f"encode the deltas, {label}", [steps.encode]),
    ]


def profile(num_running: int, num_steps: int, page_size: int) -> None:
    """Print which functions of plan and commit take the time."""
    steps = Steps(num_running, num_steps, page_size)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(num_steps):
        steps.step()
    profiler.disable()
    pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(15)


def build_parser() -> Parser:
    """All flags."""
    parser = Parser("radixlm bench host", "Scheduler and prefix cache alone, without a model.")
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    parser.add_argument(
        "--num-running", nargs="+", default=[16, 256], help="running requests", **number
    )
    parser.add_argument("--num-steps", default=1000, help="decode steps measured", **number)
    parser.add_argument("--page-size", default=16, help="tokens of a page", **number)
    parser.add_argument("--num-rounds", default=5, help="rounds of the prefix cache's", **number)
    parser.add_argument("--skip-memory", action="store_true", help="the scheduler only")
    parser.add_argument("--profile", action="store_true", help="print the functions that cost most")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--output-file", metavar="FILE", help="append a line of JSON")
    parser.add_argument("--strict", action="store_true", help="exit 1 if a goal is missed")
    return parser


def main(argv: Sequence[str]) -> int:
    """0, or 1 if a goal is missed and --strict is given."""
    args = build_parser().parse_args(argv)
    positive(args.num_running, "--num-running")
    positive([args.num_steps, args.page_size, args.num_rounds], "--num-steps")
    report.check_writable(args.output_file)
    if args.profile:
        for num_running in args.num_running:
            profile(num_running, args.num_steps, args.page_size)
        return 0
    parts = [p for n in args.num_running for p in measure(n, args.num_steps, args.page_size)]
    memory: list[host_memory.Figure] = []
    if not args.skip_memory:
        for page_size in (1, 16):
            memory += host_memory.measure(page_size, "lru", args.num_rounds)
    result = {
        "num_steps": args.num_steps,
        "page_size": args.page_size,
        "scheduler": [asdict(p) | {"is_met": p.is_met} for p in parts],
        "memory": [asdict(f) | {"is_met": f.cpu_ms <= f.goal_ms} for f in memory],
    }
    if args.output_file:
        report.append_jsonl(args.output_file, [result])
    sys.stdout.write(json.dumps(result, indent=2) + "\n" if args.json else render(parts, memory))
    is_met = all(p.is_met is not False for p in parts) and all(
        f.cpu_ms <= f.goal_ms for f in memory
    )
    return int(args.strict and not is_met)


def render(parts: Sequence[Part], memory: Sequence[host_memory.Figure]) -> str:
    """Both tables."""
    rows = [
        (p.name, *_shown(p.median_ms, p.min_ms, p.p99_ms, p.cpu_ms), *_verdict(p.goal_ms, p.is_met))
        for p in parts
    ]
    headings = ["scheduler, one decode step", "median ms", "min", "p99", "CPU", "goal", ""]
    text = report.table(headings, rows) + "\n"
    if memory:
        cells = [
            (
                f.name,
                *_shown(f.median_ms, f.worst_ms, f.cpu_ms),
                *_verdict(f.goal_ms, f.cpu_ms <= f.goal_ms),
            )
            for f in memory
        ]
        headings = ["prefix cache", "median ms", "worst", "CPU", "goal", ""]
        text += "\n" + report.table(headings, cells) + "\n"
    return text + "\nGoals are held against CPU time: wall time shows who else uses the machine.\n"


def _shown(*values_ms: float) -> tuple[str, ...]:
    return tuple(f"{ms:.3f}" for ms in values_ms)


def _verdict(goal_ms: float | None, is_met: bool | None) -> tuple[str, str]:
    if goal_ms is None:
        return "", ""
    return f"{goal_ms:g}", "met" if is_met else "MISSED"
