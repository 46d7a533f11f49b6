"""How step time grows with threads, batch size and context, next to the measured ceilings.

    PYTHONPATH=src python bench/growth.py --model FOLDER [--quick] [--bits 16,8,4] [--threads 1,2]
        [--batches 1,2,...,64] [--contexts 128,512,...,32704] [--layers N] [--out DIR]

Runs `radixlm bench one-batch` for each number of threads and width: prefill and decode of 1 request
at every context, and decode at every batch size with short prompts. "allowed" is the time that the
bytes and operations need at the ceilings measured with as many threads (peers/model.py).
FOLDER needs only a config.json: weights are random, and the model's context is set to the longest
measured one. --layers cuts the model to that number of layers. --quick takes about five minutes on
two idle cores: all widths with all threads, 8 bits with one, and contexts above 2,048 with four
layers. DIR gets growth.json and growth.md.
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

BATCH_INPUT = 64  # tokens of each prompt while the batch size varies
LONG_LAYERS = 4  # layers for long contexts in a quick run; every layer costs the same


@dataclass(frozen=True, slots=True)
class Sweep:
    """What one start of the model measures: all batch sizes x contexts."""

    bits: int
    threads: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    layers: int | None = None  # None: as many as the model has


@dataclass(frozen=True, slots=True)
class Point:
    """One shape: measured and allowed milliseconds of the prefill and of one decode step."""

    bits: int
    threads: int
    layers: int
    batch: int
    context: int
    prefill_ms: float
    prefill_allowed_ms: float
    decode_ms: float
    decode_allowed_ms: float


def full(
    bits: Sequence[int], threads: Sequence[int], batches: Sequence[int], contexts: Sequence[int],
    layers: int | None,
) -> list[Sweep]:  # fmt: skip
    """Every context with one request, and every batch size with short prompts, for all widths and
    threads."""
    larger = tuple(batch for batch in batches if batch > 1)
    return [
        Sweep(width, count, *sizes, layers)
        for count in threads
        for width in bits
        for sizes in (((1,), tuple(contexts)), (larger, (BATCH_INPUT,)))
        if all(sizes)
    ]


def quick(all_threads: int) -> list[Sweep]:
    """The smallest and largest shapes."""
    short, batches = (128, 2048), (4, 16, 64)
    sweeps = full((16, 8, 4), (all_threads,), batches, short, None)
    sweeps.append(Sweep(8, all_threads, (1,), (8192, 32704), LONG_LAYERS))
    return sweeps + (full((8,), (1,), (4, 16), short, None) if all_threads > 1 else [])


def described(model_folder: Path, longest: int, layers: int | None, target: Path) -> Path:
    """A folder below `target` with the model's config.json, cut to `layers` and with a context of
    `longest` tokens."""
    config = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
    positions = max(longest, config.get("max_position_embeddings") or 0)
    config["max_position_embeddings"] = positions
    if layers is not None:
        config["num_hidden_layers"] = layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:layers]
    folder = target / f"{config['num_hidden_layers']}-layers"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def command(folder: Path, sweep: Sweep, num_output: int) -> list[str]:
    """The command line of one sweep."""
    return [
        sys.executable, "-m", "radixlm", "bench", "one-batch", "--json", "--model-path",
        str(folder), "--load-format", "dummy", "--skip-tokenizer-init",
        "--cpu-threads", str(sweep.threads), "--batch-size", *map(str, sweep.batches),
        "--input-len", *map(str, sweep.contexts), "--output-len", str(num_output),
        *OUR_FLAGS[sweep.bits],
    ]  # fmt: skip


def points(
    text: str, size: model.ModelSize, sweep: Sweep, ceilings: machine.Ceilings
) -> list[Point]:
    """Points from the JSON lines of one sweep."""
    made, bits = [], sweep.bits
    for line in text.splitlines():
        if not line.startswith("{"):
            continue
        found = json.loads(line)
        batch, context = found["batch_size"], found["input_len"]
        prefill_s = batch * model.prefill_s(size, bits, ceilings, context)
        mean = context + found["output_len"] / 2
        decode_s = model.decode_s(size, bits, ceilings, batch, mean)
        latencies = (found["prefill_latency"], prefill_s, found["median_decode_latency"], decode_s)
        shape = (bits, sweep.threads, size.num_layers, batch, context)
        made.append(Point(*shape, *(1e3 * each for each in latencies)))
    return made


def markdown(found: Sequence[Point]) -> str:
    """A table for each width, number of threads and depth."""
    parts = []
    for kind in dict.fromkeys((point.bits, point.threads, point.layers) for point in found):
        rows = [point for point in found if (point.bits, point.threads, point.layers) == kind]
        bits, threads, layers = kind
        parts.append(
            f"{bits} bit, {threads} thread{'s' if threads > 1 else ''}, {layers} layers\n\n"
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


def measure(model_folder: Path, sweeps: Sequence[Sweep], num_output: int) -> Iterable[Point]:
    """All points; ceilings are measured again for each number of threads."""
    found: dict[int, machine.Ceilings] = {}
    with tempfile.TemporaryDirectory(prefix="radixlm-growth-") as target:
        for sweep in sweeps:
            if sweep.threads not in found:
                found[sweep.threads] = machine.measure_ceilings(sweep.threads)
            longest = max(sweep.contexts) + num_output
            folder = described(model_folder, longest, sweep.layers, Path(target))
            line = command(folder, sweep, num_output)
            done = subprocess.run(line, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{' '.join(line)}\n{done.stderr[-1000:]}", file=sys.stderr)
            size = model.read_size(folder)
            yield from points(done.stdout, size, sweep, found[sweep.threads])


def numbers(text: str) -> list[int]:
    """The numbers of a comma-separated list."""
    return [int(part) for part in text.split(",")]


def main() -> int:
    """1 if nothing was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, required=True)
    add("--bits", default="16,8,4")
    num_cpus = os.cpu_count() or 1
    add("--threads", default=",".join(str(n + 1) for n in range(num_cpus)))
    add("--batches", default="1,2,4,8,16,32,64")
    add("--contexts", default="128,512,2048,8192,32704")
    add("--steps", type=int, default=9, help="tokens of each answer")
    add("--layers", type=int, help="cut the model to so many")
    add("--quick", action="store_true", help="the corners of the tables in about five minutes")
    add("--out", type=Path, help="default: a new temporary folder")
    args = parser.parse_args()
    out = args.out or Path(tempfile.mkdtemp(prefix="radixlm-growth-"))
    out.mkdir(parents=True, exist_ok=True)
    sizes = [numbers(text) for text in (args.bits, args.threads, args.batches, args.contexts)]
    sweeps = quick(num_cpus) if args.quick else full(*sizes, args.layers)
    found: list[Point] = []
    for point in measure(args.model, sweeps, args.steps):
        print(point, flush=True)
        found.append(point)
        rows = [asdict(each) for each in found]
        (out / "growth.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        (out / "growth.md").write_text(markdown(found), encoding="utf-8")
    print(f"{out}/growth.json, growth.md")
    return int(not found)


if __name__ == "__main__":
    sys.exit(main())
