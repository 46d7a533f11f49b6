"""What the hierarchical cache gains and costs, as ratios of times on an engine without it, which is
asked in turn with it.

    PYTHONPATH=src python bench/hicache.py [--model FOLDER] [--pool 1024] [--prompt 512]
        [--rounds 3] [--decode 64] [--disk FOLDER [--restart 8] [--shared 16]]

multi-turn       conversations of three times the KV cache, asked in turn, a few tokens longer in
                 each round: every prefix has been evicted when it is asked for again
nothing repeats  eight times as many prompts, all different
decode           four requests that decode side by side

It takes five seconds with the bundled model and the built extension, much longer without it.
FOLDER needs only a config.json: weights are random then. Each line: seconds without and with
tiers, the throughput with tiers over that without, and the tokens that were found cached.

--restart N instead: N prompts of --prompt tokens, asked of an engine, and of a second one on the
same folder after the first has ended. Each line: the median seconds to the first token, the same
over that of "warm", and the share of the prompts' tokens that was found.

--shared N instead: N requests at once, whose prompts have --prompt tokens in common and 32 of their
own, 32 tokens of answer. The lines are those of --restart, with the seconds until all have ended,
medians of --rounds runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import radixlm

IDLE_S = 2.0
Sample = Callable[[radixlm.Engine], tuple[float, float]]
FRESH = 8  # times as many prompts that are new: the host tier is full, too
TURN = 16  # tokens that each round adds to a conversation
OWN = 32  # tokens of a request that shares its prefix, and of its answer


def tokens(seed: int, count: int, vocab: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(3, vocab, count).tolist()
    return ids


def ask(engine: radixlm.Engine, prompts: Sequence[list[int]], length: int) -> tuple[float, int]:
    """Seconds for all prompts one after the other, and their cached tokens."""
    params = {"max_new_tokens": length, "temperature": 0.0, "ignore_eos": True}
    start_s, cached = time.perf_counter(), 0
    for prompt in prompts:
        answer: Any = engine.generate(input_ids=prompt, sampling_params=params)
        cached += answer["meta_info"]["cached_tokens"]
    return time.perf_counter() - start_s, cached


def start(args: argparse.Namespace, pool: int, **options: Any) -> radixlm.Engine:
    """An engine with room for ``pool`` tokens."""
    return radixlm.Engine(
        model_path=args.model,
        load_format="auto" if list(Path(args.model).glob("*.safetensors")) else "dummy",
        skip_tokenizer_init=True,
        max_total_tokens=pool,
        random_seed=0,
        log_level="error",
        **options,
    )


def ask_in_turn(
    engines: Sequence[radixlm.Engine], prompts: Sequence[list[int]], length: int
) -> list[tuple[float, int]]:
    """``ask`` of each engine; they take turns, so that the machine is the same for all of them."""
    found = [(0.0, 0)] * len(engines)
    for turn, prompt in enumerate(prompts):
        for number in range(len(engines))[:: 1 if turn % 2 else -1]:
            seconds, cached = ask(engines[number], [prompt], length)
            found[number] = found[number][0] + seconds, found[number][1] + cached
    return found


def measure(
    args: argparse.Namespace, vocab: int, engines: Sequence[radixlm.Engine]
) -> dict[str, list[tuple[float, int]]]:
    """Seconds and cached tokens of each workload on each engine."""
    count = 3 * args.pool // args.prompt
    chats = [tokens(i, args.prompt + args.rounds * TURN, vocab) for i in range(count)]
    time.sleep(IDLE_S)  # as servers that wait for their first load
    ask_in_turn(engines, [tokens(999, args.prompt, vocab)], 4)  # warm
    found = {"first round": ask_in_turn(engines, [chat[: args.prompt] for chat in chats], 4)}
    later = [
        chat[: args.prompt + number * TURN]
        for number in range(1, args.rounds + 1)
        for chat in chats
    ]
    found["multi-turn"] = ask_in_turn(engines, later, 4)
    fresh = [tokens(1000 + i, args.prompt, vocab) for i in range(FRESH * count)]
    found["nothing repeats"] = ask_in_turn(engines, fresh, 4)
    params = {"max_new_tokens": args.decode, "temperature": 0.0, "ignore_eos": True}
    four = [tokens(2000 + i, 32, vocab) for i in range(4)]
    found["decode"] = []
    for engine in engines:
        start_s = time.perf_counter()
        engine.generate(input_ids=four, sampling_params=params)
        found["decode"].append((time.perf_counter() - start_s, 0))
    return found


def measure_restart(
    args: argparse.Namespace, vocab: int, sample: Sample, pool: int, **options: Any
) -> dict[str, tuple[float, float]]:
    """``sample`` when the prompts are new; in the KV cache; in RAM, after a flush; on disk, at once
    after a restart, and when the server has brought them back in ``IDLE_S``; then once more."""
    found: dict[str, tuple[float, float]] = {}
    with start(args, pool, **options) as engine:
        time.sleep(IDLE_S)
        ask(engine, [tokens(999, args.prompt, vocab)], 1)
        found["cold"], _ = sample(engine), sample(engine)
        found["warm"] = sample(engine)  # not for the first time
        engine.flush_cache()
        found["host"] = sample(engine)
    with start(args, pool, **options) as engine:
        ask(engine, [tokens(998, args.prompt, vocab)], 1)
        found["disk"] = sample(engine)
    with start(args, pool, **options) as engine:
        time.sleep(IDLE_S)
        ask(engine, [tokens(997, args.prompt, vocab)], 1)
        found["back"], found["then"] = sample(engine), sample(engine)
    return found


def first_tokens(args: argparse.Namespace, vocab: int) -> tuple[Sample, int]:
    """The median of the first token's seconds of each prompt alone, and the share of cached tokens;
    the size of the KV cache."""
    prompts = [tokens(i, args.prompt, vocab) for i in range(args.restart)]

    def sample(engine: radixlm.Engine) -> tuple[float, float]:
        asked = [ask(engine, [prompt], 1) for prompt in prompts]
        cached = sum(cached for _, cached in asked)
        return statistics.median(seconds for seconds, _ in asked), cached / (
            len(asked) * args.prompt
        )

    return sample, 2 * (args.restart + 3) * args.prompt  # half of it may be filled before


def shared_prefix(args: argparse.Namespace, vocab: int) -> tuple[Sample, int]:
    """Seconds of ``--shared`` requests at once, and the share of the prefix that was cached; the
    size of the KV cache. What the requests do not share is new in each sample."""
    prefix, seeds = tokens(0, args.prompt, vocab), itertools.count(5000)
    params = {"max_new_tokens": OWN, "temperature": 0.0, "ignore_eos": True}

    def sample(engine: radixlm.Engine) -> tuple[float, float]:
        prompts = [prefix + tokens(next(seeds), OWN, vocab) for _ in range(args.shared)]
        start_s = time.perf_counter()
        answers: Any = engine.generate(input_ids=prompts, sampling_params=params)
        seconds = time.perf_counter() - start_s
        cached = sum(answer["meta_info"]["cached_tokens"] for answer in answers)
        return seconds, cached / (args.shared * args.prompt)

    return sample, 4 * args.prompt + 8 * args.shared * 2 * OWN


def main() -> None:
    bundled = Path(radixlm.__file__).parent / "assets" / "radix-tiny"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(bundled))
    parser.add_argument("--pool", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--disk", help="folder of segment files; without it RAM only")
    parser.add_argument("--restart", type=int, default=0, metavar="N", help="needs --disk")
    parser.add_argument("--shared", type=int, default=0, metavar="N", help="needs --disk")
    args = parser.parse_args()
    if (args.restart or args.shared) and not args.disk:
        parser.error("--restart and --shared need --disk FOLDER, an empty one")
    vocab = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    tiers: dict[str, Any] = {"enable_hierarchical_cache": True, "hicache_ratio": 6.0}
    if args.disk:
        tiers["hicache_storage_backend"] = "file"
        tiers["hicache_storage_backend_extra_config"] = json.dumps({"directory": args.disk})
    if args.restart or args.shared:
        kind, runs = (shared_prefix, args.rounds) if args.shared else (first_tokens, 1)
        all_times = []
        for _ in range(runs):
            with tempfile.TemporaryDirectory(dir=args.disk) as folder:
                tiers["hicache_storage_backend_extra_config"] = json.dumps({"directory": folder})
                sample, pool = kind(args, vocab)
                all_times.append(measure_restart(args, vocab, sample, pool, **tiers))
        for name in all_times[0]:
            seconds = statistics.median(times[name][0] for times in all_times)
            ratio = statistics.median(times[name][0] / times["warm"][0] for times in all_times)
            share = statistics.median(times[name][1] for times in all_times)
            print(f"{name:5} {1e3 * seconds:8.1f} ms  {ratio:5.2f} x  {share:5.1%} cached")
        return
    room = args.pool + args.prompt  # for one request beside the pool's share
    with start(args, room) as plain, start(args, room, **tiers) as tiered:
        found = measure(args, vocab, [plain, tiered])
    for name, ((seconds, cached), (with_s, with_cached)) in found.items():
        ratio, change = seconds / with_s, f"{cached} -> {with_cached}"
        print(f"{name:16} {seconds:7.2f} s  {with_s:7.2f} s  {ratio:5.2f} x  cached {change}")


if __name__ == "__main__":
    main()
