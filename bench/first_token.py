"""Time to the first token of prompts whose pages arrive, by real servers.

    PYTHONPATH=src python bench/first_token.py kill [--model FOLDER] [--prompts 100]
    PYTHONPATH=src python bench/first_token.py pair [--model FOLDER] [--prompts 5]

kill  prompts of 1,024 tokens of a server with --warm-restart: repeated, and once more after SIGKILL
      of its engine; medians, and the share of the tokens that was found
pair  new prompts of 1,024 tokens of a prefill and a decode server, one thread each: the decode
      server's first token over the time of the prefill server alone and a step

FOLDER may have a config.json alone: weights are random then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from server_process import ServerProcess, free_port

import radixlm
from radixlm.bench.client import HttpClient

LENGTH = 1024
STEPS = 8


def prompt(seed: int, vocab: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(3, vocab, LENGTH).tolist()
    return ids


async def ask(client: HttpClient, ids: list[int], count: int, **fields: Any) -> tuple[float, Any]:
    """Seconds of a whole answer of ``count`` tokens, and its facts."""
    sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, **fields}
    start_s = time.perf_counter()
    answer = (await client.ask("POST", "/generate", body)).json()
    return time.perf_counter() - start_s, answer["meta_info"]


async def measure_kill(args: argparse.Namespace, flags: list[str], vocab: int, home: Path) -> None:
    pool = str(2 * (args.prompts + 2) * LENGTH)
    flags += ["--warm-restart", "--max-total-tokens", pool]
    async with ServerProcess(flags, home / "server.log") as server:
        client = HttpClient(server.base_url)

        async def first_tokens() -> tuple[float, float]:
            asked = [await ask(client, prompt(i, vocab), 1) for i in range(args.prompts)]
            cached = sum(facts["cached_tokens"] for _, facts in asked)
            return statistics.median(s for s, _ in asked), cached / (LENGTH * len(asked))

        await first_tokens()
        await first_tokens()
        warm_s, _ = await first_tokens()
        await asyncio.sleep(2)  # checksums of pages are computed behind the steps
        server.kill(is_whole=False)
        await ask(client, prompt(10**6, vocab), 1)  # waits for the next engine
        after_s, share = await first_tokens()
        client.close()
    ratio = after_s / warm_s
    print(f"warm {1e3 * warm_s:.1f} ms, after kill -9 {1e3 * after_s:.1f} ms: {ratio:.2f} x, "
          f"{share:.1%} cached")  # fmt: skip


async def measure_pair(args: argparse.Namespace, flags: list[str], vocab: int, home: Path) -> None:
    port, mode = free_port(), "--disaggregation-mode"
    flags += ["--max-total-tokens", str(16 * LENGTH), "--cpu-threads", "1"]
    prefill = [*flags, mode, "prefill", "--disaggregation-bootstrap-port", str(port)]
    decode = [*flags, mode, "decode"]
    times: list[list[float]] = []
    async with (
        ServerProcess(prefill, home / "prefill.log") as first,
        ServerProcess(decode, home / "decode.log") as second,
    ):
        clients = [HttpClient(server.base_url) for server in (first, second)]

        async def ask_pair(seed: int, count: int) -> float:
            fields = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": seed}
            pair = (ask(client, prompt(seed, vocab), count, **fields) for client in clients)
            _, (seconds, facts) = await asyncio.gather(*pair)
            assert facts["cached_tokens"] >= LENGTH - 16, "the pages did not come"
            return seconds

        for number in range(-1, args.prompts):  # the first is not counted
            alone_s, _ = await ask(clients[0], prompt(2 * number + 10, vocab), 1)
            first_s = await ask_pair(3 * number + 1000, 1)
            step_s = (await ask_pair(3 * number + 1001, 1 + STEPS) - first_s) / STEPS
            times += [[alone_s, step_s, first_s]] if number >= 0 else []
        for client in clients:
            client.close()
    alone_s, step_s, first_s = map(statistics.median, zip(*times, strict=True))
    print(f"prefill alone {alone_s:.3f} s, a step {step_s:.3f} s, decode's first token "
          f"{first_s:.3f} s: {first_s / (alone_s + step_s):.2f} x their sum")  # fmt: skip


def main() -> None:
    bundled = Path(radixlm.__file__).parent / "assets" / "radix-tiny"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["kill", "pair"])
    parser.add_argument("--model", default=str(bundled))
    parser.add_argument("--prompts", type=int, default=5)
    args = parser.parse_args()
    folder = Path(args.model)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    flags = ["--model-path", args.model]
    if not list(folder.glob("*.safetensors")):
        flags += ["--load-format", "dummy", "--skip-tokenizer-init", "--random-seed", "0"]
    measure = measure_kill if args.what == "kill" else measure_pair
    with tempfile.TemporaryDirectory(prefix="radixlm-bench-") as home:
        asyncio.run(measure(args, flags, vocab, Path(home)))


if __name__ == "__main__":
    main()
