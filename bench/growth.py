"""How the cost of our steps grows with threads, batch and context, beside what the ceilings allow.

    PYTHONPATH=src python bench/growth.py --model FOLDER [--bits 16,8,4] [--threads 1,2]
        [--batches 1,2,...,64] [--contexts 128,512,...,32768] [--out DIR]

One `radixlm bench one-batch` for each number of threads and width: prefill and decode of 1 request
at every context, and decode at every batch size with short prompts. "allowed" is the time that the
bytes and operations need at the ceilings measured with as many threads (peers/model.py).
DIR gets growth.json and growth.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from peers import machine, model
from peers.engines import OUR_FLAGS

BATCH_INPUT = 64  # tokens of each prompt where the batch grows


@dataclass(frozen=True, slots=True)
class Point:
    """One shape: milliseconds of the prefill and of one decode step, and what is allowed."""

    bits: int
    threads: int
    batch: int
    context: int
    prefill_ms: float
    prefill_allowed_ms: float
    decode_ms: float
    decode_allowed_ms: float


def command(folder: Path, bits: int, threads: int, batches: Iterable[int],
            contexts: Iterable[int], num_output: int) -> list[str]:  # fmt: skip
    """Of the measurement of all batches x contexts."""
    return [
        sys.executable, "-m", "radixlm", "bench", "one-batch", "--json", "--model-path",
        str(folder), "--cpu-threads", str(threads), "--batch-size", *map(str, batches),
        "--input-len", *map(str, contexts), "--output-len", str(num_output), *OUR_FLAGS[bits],
    ]  # fmt: skip


def points(text: str, size: model.ModelSize, bits: int, threads: int,
           ceilings: machine.Ceilings) -> list[Point]:  # fmt: skip
    """From the JSON lines of one measurement."""
    made = []
    for line in text.splitlines():
        if not line.startswith("{"):
            continue
        found = json.loads(line)
        batch, context = found["batch_size"], found["input_len"]
        prefill_s = batch * model.prefill_s(size, bits, ceilings, context)
        mean = context + found["output_len"] / 2
        decode_s = model.decode_s(size, bits, ceilings, batch, mean)
        latencies = (found["prefill_latency"], prefill_s, found["median_decode_latency"], decode_s)
        made.append(Point(bits, threads, batch, context, *(1e3 * each for each in latencies)))
    return made


def markdown(found: Sequence[Point]) -> str:
    """A table for each width and number of threads."""
    parts = []
    for bits, threads in dict.fromkeys((point.bits, point.threads) for point in found):
        rows = [point for point in found if (point.bits, point.threads) == (bits, threads)]
        parts.append(
            f"{bits} bit, {threads} thread{'s' if threads > 1 else ''}\n\n"
            "| batch x context | prefill ms | allowed | of it | decode ms | allowed | of it |\n"
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
            + "".join(
                f"| {p.batch} x {p.context:,} | {p.prefill_ms:,.0f} | {p.prefill_allowed_ms:,.0f} "
                f"| {p.prefill_allowed_ms / p.prefill_ms:.0%} | {p.decode_ms:.1f} "
                f"| {p.decode_allowed_ms:.1f} | {p.decode_allowed_ms / p.decode_ms:.0%} |\n"
                for p in rows
            )
        )
    return "\n".join(parts)


def measure(args: argparse.Namespace, size: model.ModelSize) -> Iterable[Point]:
    """All points, the ceilings anew for each number of threads."""
    for threads in numbers(args.threads):
        ceilings = machine.measure_ceilings(threads)
        for bits in numbers(args.bits):
            for batches, contexts in (
                ([1], numbers(args.contexts)),
                ([n for n in numbers(args.batches) if n > 1], [BATCH_INPUT]),
            ):
                line = command(args.model, bits, threads, batches, contexts, args.steps)
                done = subprocess.run(line, capture_output=True, text=True, check=False)
                if done.returncode:
                    print(f"{' '.join(line)}\n{done.stderr[-1000:]}", file=sys.stderr)
                yield from points(done.stdout, size, bits, threads, ceilings)


def numbers(text: str) -> list[int]:
    """Of a comma-separated list."""
    return [int(part) for part in text.split(",")]


def main() -> int:
    """1 if nothing was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, required=True)
    add("--bits", default="16,8,4")
    add("--threads", default=",".join(str(n + 1) for n in range(os.cpu_count() or 1)))
    add("--batches", default="1,2,4,8,16,32,64")
    add("--contexts", default="128,512,2048,8192,32704")
    add("--steps", type=int, default=9, help="tokens of each answer")
    add("--out", type=Path, help="default: a new temporary folder")
    args = parser.parse_args()
    out = args.out or Path(tempfile.mkdtemp(prefix="radixlm-growth-"))
    out.mkdir(parents=True, exist_ok=True)
    found: list[Point] = []
    for point in measure(args, model.read_size(args.model)):
        print(point, flush=True)
        found.append(point)
        rows = [asdict(each) for each in found]
        (out / "growth.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        (out / "growth.md").write_text(markdown(found), encoding="utf-8")
    print(f"{out}/growth.json, growth.md")
    return int(not found)


if __name__ == "__main__":
    sys.exit(main())
