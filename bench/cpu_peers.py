"""Compares this server with other engines on this machine: same model, same prompts, in turn.

    PYTHONPATH=src python bench/cpu_peers.py --home FOLDER [--peers radixlm,llama.cpp,openvino]
        [--bits 16,8,4] [--cases decode,prefill512,...] [--rounds 2] [--out DIR]

FOLDER has models/q3-0.6b (or --model) and the files of the peers; missing ones are reported and
skipped. Every round starts each engine again, the second round in the opposite order; long cases
run in the first `--long-rounds` only. A ratio above 1 means that this server is better. Servers get
token ids through /v1/completions; OpenVINO runs in its own process, without HTTP.

DIR gets samples.json (all samples), tables.md and chart.svg.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from peers import machine, model, results
from peers.drive import Running
from peers.engines import PEERS, Engine, Given, Setup, find, parse_given
from peers.workload import CASES, COMMON, WARM_UP, Case, Prompts, chosen, value_of

from radixlm.base.errors import ConfigError, TransferError


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. `wait_s`: how long to wait for a quiet machine before each measurement."""

    engines: dict[int, list[Engine]]
    cases: list[Case]
    num_rounds: int
    num_long_rounds: int
    num_repeats: int
    num_threads: int
    wait_s: float
    most_foreign: float
    timeout_s: float
    seed: int
    logs: Path

    def visits(self) -> Iterator[tuple[int, int, Engine]]:
        """(round, bits, engine) in the order of the run; every other round is reversed."""
        for number in range(self.num_rounds):
            for bits, engines in self.engines.items():
                for engine in engines if number % 2 == 0 else reversed(engines):
                    yield number, bits, engine

    def cases_of(self, number: int) -> Iterator[Case]:
        """The cases of a round, short ones several times."""
        for case in self.cases:
            if case.is_long and number >= self.num_long_rounds:
                continue
            for _ in range(1 if case.is_long else self.num_repeats):
                yield case


@dataclass(slots=True)
class Record:
    """Samples and failures of the run."""

    samples: list[results.Sample] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, sample: results.Sample) -> None:
        """Keep and print one sample."""
        self.samples.append(sample)
        print(
            f"{time.strftime('%T')} {sample.bits:2} bit {sample.engine:10} {sample.case:12} "
            f"{results.number(sample.value):>8}   others {sample.foreign:.2f} cores",
            flush=True,
        )

    def fail(self, what: str) -> None:
        """Keep and print one failure."""
        self.problems.append(what)
        print(f"FAILED {what}", file=sys.stderr, flush=True)


async def measure(running: Running, case: Case, prompts: list[list[int]], plan: Plan,
                  bits: int) -> results.Sample:  # fmt: skip
    """Run one case once. TransferError or ValueError if the engine fails."""
    await machine.wait_quiet(running.pid, plan.most_foreign, plan.wait_s)
    before = machine.cpu_use(running.pid)
    timed = await running.generate(prompts, case.num_output)
    noise = machine.disturbance(before, machine.cpu_use(running.pid))
    value = value_of(case, timed)
    name = running.engine.name
    return results.Sample(name, bits, case.name, value, noise.foreign, noise.stolen)


async def visit(number: int, bits: int, engine: Engine, plan: Plan, record: Record) -> None:
    """Start an engine, run the cases of the round, stop it."""
    prompts = Prompts(plan.seed + 1000 * number + bits)
    log = plan.logs / f"{engine.name}-{bits}-{number}.log"
    before = machine.cpu_use(None)
    async with Running(engine, plan.num_threads, log, plan.timeout_s) as running:
        noise = machine.disturbance(before, machine.cpu_use(running.pid))
        record.add(results.Sample(engine.name, bits, results.START, running.start_s,
                                  noise.foreign, noise.stolen))  # fmt: skip
        for case in WARM_UP:
            await running.generate(prompts.of(case), case.num_output)
        for case in plan.cases_of(number):
            asked = prompts.of(case)
            try:
                record.add(await measure(running, case, asked, plan, bits))
            except (TransferError, ValueError) as error:
                record.fail(f"{engine.name}, {bits} bit, {case.name}: {error}")
        memory_mb = machine.peak_rss_mb(running.pid)
        record.add(results.Sample(engine.name, bits, results.MEMORY, memory_mb))


async def run(plan: Plan, record: Record) -> None:
    """All visits. An engine that does not start is reported, and the others go on."""
    for number, bits, engine in plan.visits():
        try:
            await visit(number, bits, engine, plan, record)
        except TransferError as error:
            record.fail(f"{engine.name}, {bits} bit: {error}")


def write(out: Path, record: Record, ceilings: machine.Ceilings, size: model.ModelSize,
          plan: Plan) -> str:  # fmt: skip
    """Write the three files; returns the tables."""
    predicted = {
        (case.name, bits): model.predict(case, size, bits, ceilings)
        for case in plan.cases
        for bits in plan.engines
    }
    lines = results.summarise(record.samples, predicted)
    rates = ", ".join(f"{bits} bit {rate:,.0f}" for bits, rate in ceilings.gop_per_s.items())
    heading = (
        f"{plan.num_threads} threads; ceilings measured before: {ceilings.gb_per_s:.1f} GB/s of "
        f"reading, arithmetic in GFLOP/s: {rates}\n\n"
    )
    tables = heading + results.markdown(lines)
    facts = {
        "time": time.time(),
        "platform": platform.platform(),
        "load": os.getloadavg(),
        "threads": plan.num_threads,
        "ceilings": asdict(ceilings),
        "commands": {
            f"{engine.name}-{bits}": engine.command
            for bits, engines in plan.engines.items()
            for engine in engines
        },
        "samples": [asdict(sample) for sample in record.samples],
        "problems": record.problems,
    }
    (out / "samples.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    (out / "tables.md").write_text(tables, encoding="utf-8")
    (out / "chart.svg").write_text(results.drawing(lines), encoding="utf-8")
    return tables


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """All flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--home", type=Path, default=os.environ.get("PEERS_HOME"), help="default: PEERS_HOME")
    add("--model", type=Path, help="checkpoint; default: models/q3-0.6b below --home")
    add("--peers", default=",".join(PEERS), help="comma-separated, of " + ", ".join(PEERS))
    add(
        "--server",
        action="append",
        default=[],
        metavar="NAME:BITS:COMMAND",
        help="a server that answers /v1/completions with token ids, its model named m; "
        "{port} in COMMAND",
    )
    add("--bits", default="16,8,4", help="comma-separated widths of the weights")
    add("--cases", default=",".join(COMMON), help="comma-separated, of " + ", ".join(CASES))
    add("--rounds", type=int, default=2)
    add("--long-rounds", type=int, default=1, help="rounds that run the cases of 16 requests")
    add("--repeats", type=int, default=2, help="times that a round runs each short case")
    add("--threads", type=int, default=os.cpu_count() or 1)
    add("--wait", type=float, default=0.0, metavar="SECONDS", help="wait so long for quiet")
    add("--most-foreign", type=float, default=0.06, help="cores of others that count as quiet")
    add("--timeout", type=float, default=400.0, help="seconds that a case may take")
    add("--seed", type=int, default=1)
    add("--out", type=Path, help="default: a new temporary folder")
    add("--options", default="", help="further options of our server")
    return parser.parse_args(argv)  # fmt: skip


def make_plan(args: argparse.Namespace, setup: Setup, given: Sequence[Given], logs: Path) -> Plan:
    """ConfigError for an unknown name, or if no engine is installed."""
    names = [name for name in args.peers.split(",") if name]
    for kind, asked, known in (("--peers", names, PEERS), ("--cases", args.cases.split(","), CASES),
                               ("--bits", args.bits.split(","), ("16", "8", "4"))):  # fmt: skip
        odd = [name for name in asked if name not in known]
        if odd:
            raise ConfigError(f"{kind} {odd[0]!r}: choose from {', '.join(known)}")
    engines = {}
    for bits in (int(text) for text in args.bits.split(",")):
        engines[bits], missing = find(names, given, setup, bits)
        for line in missing:
            print(f"left out: {line}", file=sys.stderr)
    if not any(engines.values()):
        raise ConfigError("no engine to run")
    return Plan(
        engines, chosen(args.cases.split(",")), args.rounds, args.long_rounds, args.repeats,
        args.threads, args.wait, args.most_foreign, args.timeout, args.seed, logs,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """1 if a measurement failed, 2 for a wrong option."""
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        if args.home is None:
            raise ConfigError("--home (or PEERS_HOME) is needed: the folder of models and peers")
        out = args.out or Path(tempfile.mkdtemp(prefix="radixlm-peers-"))
        out.mkdir(parents=True, exist_ok=True)
        folder = args.model or args.home / "models" / "q3-0.6b"
        cases = [CASES[name] for name in args.cases.split(",") if name in CASES]
        longest = 64 + max((case.num_input + case.num_output for case in cases), default=0)
        options = tuple(args.options.split())
        setup = Setup(folder, args.home, args.threads, options, longest=longest)
        plan = make_plan(args, setup, [parse_given(text) for text in args.server], out)
        size = model.read_size(folder)
        ceilings = machine.measure_ceilings(args.threads)
    except (ConfigError, OSError, KeyError) as error:
        print(f"cpu_peers: {error}", file=sys.stderr)
        return 2
    record = Record()
    try:
        asyncio.run(run(plan, record))
    except KeyboardInterrupt:
        record.fail("interrupted")
    print(write(out, record, ceilings, size, plan), end="")
    print(f"\n{out}/samples.json, tables.md, chart.svg")
    return int(bool(record.problems))


if __name__ == "__main__":
    sys.exit(main())
