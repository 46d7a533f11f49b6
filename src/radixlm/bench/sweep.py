"""`radixlm bench sweep`: the highest request rate at which enough requests keep their limits.

The rate is doubled until it is too much (or halved until it is not), then the gap is bisected. All
runs send the same prompts, so a cache that kept them would make each run faster than the one before
it: it is emptied first where the server has `/flush_cache`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import uvloop

from radixlm.base.errors import ConfigError, TransferError
from radixlm.bench import report, serve
from radixlm.bench.load import Traffic
from radixlm.bench.slo import limits_ms
from radixlm.config.verb_parser import VerbParser


@dataclass(frozen=True, slots=True)
class Search:
    """Rates in requests a second. `attainment`: share that must keep the limits; `precision`:
    largest ratio of the rates on both sides of the answer, less 1."""

    start: float = 1.0
    highest: float = 1024.0
    attainment: float = 0.99
    precision: float = 0.1
    max_runs: int = 12

    def __post_init__(self) -> None:
        if not 0 < self.start <= self.highest:
            raise ConfigError("--start-rate: more than 0 and at most --highest-rate")
        if not (0 < self.attainment <= 1 and self.precision > 0 and self.max_runs > 0):
            raise ConfigError(
                "--attainment above 0 up to 1, --precision above 0, --max-runs 1 or more"
            )


async def highest_rate(
    search: Search, attained: Callable[[float], Awaitable[float]]
) -> float | None:
    """The highest rate measured whose share is enough; None if no rate was slow enough."""
    good: float | None = None
    bad: float | None = None
    rate = search.start
    for _ in range(search.max_runs):
        if await attained(rate) >= search.attainment:
            good = rate
        else:
            bad = rate
        if good is not None and bad is not None and bad / good <= 1 + search.precision:
            break
        if good is None:
            rate = rate / 2
        elif bad is None:
            if good >= search.highest:
                break
            rate = min(2 * good, search.highest)
        else:
            rate = (good * bad) ** 0.5
    return good


def build_parser() -> VerbParser:
    """The flags of `bench serve`, and those of the search."""
    parser = serve.build_parser("radixlm bench sweep", "Find the highest rate that meets an SLO.")
    base = Search()
    group = parser.add_argument_group("search")
    for flag, default, text in (
        ("--start-rate", base.start, "first request rate"),
        ("--highest-rate", base.highest, "no rate above it is tried"),
        ("--attainment", base.attainment, "share of requests that must keep --goodput"),
        ("--precision", base.precision, "stop when the rates on both sides are so near"),
    ):
        group.add_argument(flag, type=float, default=default, metavar="X", help=text)
    group.add_argument("--max-runs", type=int, default=base.max_runs, metavar="N", help="at most")
    return parser


def main(argv: Sequence[str]) -> int:
    """0 if a rate meets the limits, else 1."""
    args = build_parser().parse_args(argv)
    if not limits_ms(args.goodput):
        raise ConfigError("give the limits, such as --goodput ttft:500 tpot:50")
    if args.request_rate != float("inf") or args.ramp_up_strategy:
        raise ConfigError("--request-rate and ramps: the sweep chooses the rates; --start-rate 1")
    search = Search(
        args.start_rate, args.highest_rate, args.attainment, args.precision, args.max_runs
    )
    report.check_writable(args.output_file)
    return int(uvloop.run(_sweep(args, search)))


async def _sweep(args: argparse.Namespace, search: Search) -> int:
    run = serve.Run(args)
    found: list[dict[str, Any]] = []

    async def attained(rate: float) -> float:
        if not (args.flush_cache or found):
            args.flush_cache = await _can_flush(run)
        run.traffic = Traffic(rate, args.max_concurrency, args.seed)
        result, _ = await run.measure()
        found.append(result | {"request_rate": rate})
        sys.stderr.write(f"{_summary(found[-1])}\n")
        if args.output_file:
            report.append_jsonl(args.output_file, found[-1:])
        return float(result["slo_attainment"])

    try:
        await run.prepare()
        best = await highest_rate(search, attained)
    finally:
        run.client.close()
    sys.stdout.write(
        json.dumps({"rate": best, "runs": found}) + "\n" if args.json else render(found, best)
    )
    return int(best is None)


async def _can_flush(run: serve.Run) -> bool:
    """Whether the server can empty its prefix cache; else a warning."""
    try:
        if (await run.client.ask("POST", "/flush_cache")).status in (200, 400):  # 400: it is busy
            return True
    except TransferError:
        pass
    sys.stderr.write("no /flush_cache: the runs repeat their prompts; serve without prefix cache\n")
    return False


def _summary(run: Mapping[str, Any]) -> str:
    """What is told of a run while others follow."""
    return (
        f"{run['request_rate']:.3g} req/s: {100 * run['slo_attainment']:.1f} % in the limits, "
        f"p99 TTFT {run['p99_ttft_ms']:.0f} ms, p99 TPOT {run['p99_tpot_ms']:.1f} ms"
    )


def render(runs: Sequence[dict[str, Any]], best: float | None) -> str:
    """A line for each rate, lowest first, and the answer."""
    rows = [
        (
            f"{run['request_rate']:.3g}",
            f"{100 * run['slo_attainment']:.1f}%",
            f"{run['request_goodput']:.2f}",
            f"{run['p99_ttft_ms']:.0f}",
            f"{run['p99_tpot_ms']:.1f}",
            f"{run['output_throughput']:.0f}",
        )
        for run in sorted(runs, key=lambda run: float(run["request_rate"]))
    ]
    heads = ("rate", "in limits", "goodput", "p99 TTFT ms", "p99 TPOT ms", "tok/s")
    last = "No rate met the limits." if best is None else f"Highest rate within: {best:.3g} req/s"
    if best is not None and best == max(run["request_rate"] for run in runs):
        last += " (no higher one was tried: raise --highest-rate, --max-runs)"
    return f"{report.table(heads, rows)}\n{last}\n"
