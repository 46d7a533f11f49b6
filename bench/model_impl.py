"""This project's model against transformers', same weights and pages, in one process.

    PYTHONPATH=src python bench/model_impl.py [--layers 8] [--hidden 512] [--prompt 512]
        [--batches 1,8] [--rounds 5] [--threads 1]

A Qwen3 of random weights is written to a folder for the time of the run. The two take turns, round
by round; each figure is the least of the rounds. One thread is timed by the process's own clock,
which other work on the machine does not lengthen; several by the wall's.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers

from radixlm.base.log import set_up_logging
from radixlm.bench import one_batch
from radixlm.bench.one_batch import Batch, Shape
from radixlm.config.parser import parse
from radixlm.engine.model_info import resolved

NUM_OUTPUT = 12


def write_model(folder: Path, layers: int, hidden: int) -> None:
    """A Qwen3 with heads of 64 channels."""
    config = transformers.Qwen3Config(
        vocab_size=8192, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128, head_dim=64,
        max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)


def start(folder: Path, impl: str, threads: int, room: int) -> Batch:
    """The scheduler and model of one implementation."""
    flags = f"--model-path {folder} --model-impl {impl} --dtype float32 --cpu-threads {threads}"
    more = (
        f"--chunked-prefill-size {room} --max-prefill-tokens {room} --max-total-tokens {2 * room}"
    )
    config, given = parse(f"{flags} {more} --skip-tokenizer-init".split(), prog="model_impl")
    return Batch(*resolved(config, given), seed=1)


def measure(runners: Sequence[Batch], shape: Shape, rounds: int) -> list[tuple[float, float]]:
    """(seconds of the prefill, of one decode step) of each runner; the minimum of all rounds."""
    best = [(float("inf"), float("inf"))] * len(runners)
    for _ in range(rounds):
        for at, runner in enumerate(runners):
            prefill_s, decodes_s = runner.run(shape)
            best[at] = min(best[at][0], prefill_s), min(best[at][1], *decodes_s)
    return best


def main() -> None:
    """Print one line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 8), ("hidden", 512), ("prompt", 512), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", default="1,8")
    args = parser.parse_args()
    set_up_logging("bench", "warning")
    if args.threads == 1:
        one_batch.time = SimpleNamespace(perf_counter=time.process_time)
    torch.set_num_threads(args.threads)
    batches = [int(one) for one in args.batches.split(",")]
    room = max(batches) * (args.prompt + NUM_OUTPUT + 16)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args.layers, args.hidden)
        impls = ("radixlm", "transformers")
        runners = [start(Path(folder), impl, args.threads, room) for impl in impls]
        print(f"{'':24} {'ours ms':>9} {'transformers ms':>16} {'ratio':>6}")
        for batch in batches:
            shape = Shape(batch, args.prompt, NUM_OUTPUT)
            ours, theirs = measure(runners, shape, args.rounds)
            for what, a, b in zip((f"prefill {batch} x {args.prompt}", f"decode batch {batch}"),
                                  ours, theirs, strict=True):  # fmt: skip
                print(f"{what:24} {a * 1e3:9.2f} {b * 1e3:16.2f} {b / a:6.2f}", flush=True)


if __name__ == "__main__":
    main()
