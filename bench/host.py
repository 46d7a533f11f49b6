"""The host's time for a decode step and for the prefix cache, without a model.

    python bench/host.py --num-running 16 256

Every running request decodes one streamed token a step (`host_step.py`). The garbage collector
stays on, because a server pays for it too.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import host_memory
import numpy as np
from host_step import Steps
from step_clock import PARTS, Clock

from radixlm.base.errors import InvariantError
from radixlm.bench import report
from radixlm.bench.cli import run
from radixlm.bench.options import positive
from radixlm.config.verb_parser import VerbParser

# the most that plan and commit together, and that the whole step, may take of the host, in ms, by
# the number of running requests
GOALS_MS = {16: 0.1, 256: 0.4}
WHOLE_GOALS_MS = {256: 0.4}
WARM_UP = 16


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
        """Whether the CPU time reaches the goal. Wall time also shows other processes."""
        return None if self.goal_ms is None else self.cpu_ms <= self.goal_ms


def part(name: str, clocks: Sequence[Clock], goal_ms: float | None = None) -> Part:
    """The figures of `clocks`, summed step by step."""
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


def measure(num_running: int, num_steps: int, page_size: int) -> list[Part]:
    """The parts of a decode step with `num_running` requests, and the whole step timed alone."""
    steps = Steps(num_running, 2 * num_steps + WARM_UP, page_size)
    for _ in range(WARM_UP):
        steps.step()
    label = f"{num_running} running"
    whole = steps.watch(("whole",))
    _run_steps(steps, num_steps, num_running)
    total = part(f"whole step, {label}", [whole["whole"]], WHOLE_GOALS_MS.get(num_running))
    clocks = steps.watch(PARTS)
    _run_steps(steps, num_steps, num_running)
    both = [clocks["plan"], clocks["commit"]]
    return [
        *(part(f"{name}, {label}", [clocks[name]]) for name in PARTS),
        part(f"plan + commit, {label}", both, GOALS_MS.get(num_running)),
        total,
    ]


def _run_steps(steps: Steps, num_steps: int, num_running: int) -> None:
    for _ in range(num_steps):
        if steps.step() != num_running:
            raise InvariantError(f"a step gave no token to some of {num_running} requests")


def profile(num_running: int, num_steps: int, page_size: int) -> None:
    """Print the functions that take most of a step."""
    steps = Steps(num_running, num_steps, page_size)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(num_steps):
        steps.step()
    profiler.disable()
    pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(15)


def build_parser() -> VerbParser:
    """All flags."""
    parser = VerbParser("python bench/host.py", "A decode step's host work, and the prefix cache.")
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    parser.add_argument(
        "--num-running", nargs="+", default=[16, 256], help="running requests", **number
    )
    parser.add_argument("--num-steps", default=1000, help="decode steps measured", **number)
    parser.add_argument("--page-size", default=16, help="tokens of a page", **number)
    parser.add_argument("--num-rounds", default=5, help="rounds of the prefix cache's", **number)
    parser.add_argument("--skip-memory", action="store_true", help="the decode step only")
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
        (
            p.name,
            *_shown(p.median_ms, p.min_ms, p.p99_ms, p.cpu_ms),
            *_goal_cells(p.goal_ms, p.is_met),
        )
        for p in parts
    ]
    headings = ["host, one decode step", "median ms", "min", "p99", "CPU", "goal", ""]
    text = report.table(headings, rows) + "\n"
    if memory:
        cells = [
            (
                f.name,
                *_shown(f.median_ms, f.worst_ms, f.cpu_ms),
                *_goal_cells(f.goal_ms, f.cpu_ms <= f.goal_ms),
            )
            for f in memory
        ]
        headings = ["prefix cache", "median ms", "worst", "CPU", "goal", ""]
        text += "\n" + report.table(headings, cells) + "\n"
    return text + "\nGoals are held against CPU time: wall time shows who else uses the machine.\n"


def _shown(*values_ms: float) -> tuple[str, ...]:
    return tuple(f"{ms:.3f}" for ms in values_ms)


def _goal_cells(goal_ms: float | None, is_met: bool | None) -> tuple[str, str]:
    if goal_ms is None:
        return "", ""
    return f"{goal_ms:g}", "met" if is_met else "MISSED"


if __name__ == "__main__":
    sys.exit(run("bench/host.py", main, sys.argv[1:]))
