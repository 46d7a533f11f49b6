"""`radixlm bench long-context`: what a prompt costs by its length, one at a time: its first token,
cold and when its pages are cached, each further token, and memory. Other options are those of the
server; how well a model finds things in a long text is `radixlm eval needle`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from radixlm.base.errors import ConfigError
from radixlm.base.units import format_bytes
from radixlm.bench import report
from radixlm.bench.offline import engine_options
from radixlm.bench.options import engine_parser, positive
from radixlm.config.verb_parser import VerbParser
from radixlm.entrypoints.offline import Engine

_WARM_UP = 64  # tokens of a prompt before the first that counts


def build_parser() -> VerbParser:
    """The flags of this verb."""
    about = "What prompts cost by their length, one at a time."
    parser = engine_parser("long-context", about, "[--lengths N ...]")
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--lengths",
        "--input-len",
        type=int,
        nargs="+",
        default=[1024, 2048],
        metavar="N",
        help="tokens",
    )
    group.add_argument("--output-len", type=int, default=32, metavar="N", help="tokens generated")
    group.add_argument("--seed", type=int, default=1, metavar="N", help="of the prompts")
    group = parser.add_argument_group("results")
    group.add_argument("--output-file", metavar="FILE", help="append a line of JSON for each")
    group.add_argument("--json", action="store_true", help="print JSON lines instead of a table")
    return parser


def main(argv: Sequence[str]) -> int:
    """0 after all lengths were measured."""
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    positive(args.lengths, "--lengths")
    positive([args.output_len - 1], "--output-len minus 1")
    report.check_writable(args.output_file)
    options = engine_options(rest, parser)
    results = measure(options, sorted(args.lengths), args.output_len, args.seed)
    if args.output_file:
        report.append_jsonl(args.output_file, results)
    if args.json:
        print("\n".join(json.dumps(one) for one in results))
    else:
        print("\n".join(_table(results)))
    return 0


def measure(
    options: dict[str, Any], lengths: Sequence[int], output_len: int, seed: int
) -> list[dict[str, Any]]:
    """A result for each length; times in seconds, memory in bytes. ConfigError for a length that
    the KV cache or the model does not hold."""
    generator = np.random.default_rng(seed)
    results = []
    with Engine(**options) as engine:
        info = engine.get_server_info()
        most = min(info["max_req_input_len"], info["max_total_num_tokens"]) - output_len
        if lengths[-1] > most:
            raise ConfigError(
                f"--lengths {lengths[-1]}: {most} tokens fit beside {output_len} of output; "
                "--max-total-tokens N and --context-length N make more room"
            )
        vocab = engine.info.decoder.vocab
        _timed(engine, _drawn(generator, min(_WARM_UP, most), vocab), output_len)
        for length in tqdm(lengths, desc="prompts", disable=None):
            prompt = _drawn(generator, length, vocab)
            first_s, rest_s = _timed(engine, prompt, output_len)
            cached_s, _ = _timed(engine, prompt, 1)
            memory = engine.get_server_info()["internal_states"][0]["memory_usage"]
            results.append(
                {
                    "length": length,
                    "first_token_s": first_s,
                    "prefill_tokens_per_s": length / first_s,
                    "token_s": rest_s / (output_len - 1),
                    "cached_first_token_s": cached_s,
                    "rss_bytes": memory["rss_bytes"],
                    "kv_resident_bytes": memory.get("kvcache_resident_bytes"),
                }
            )
    return results


def _drawn(generator: np.random.Generator, count: int, vocab: int) -> list[int]:
    """Token ids that are hardly special ones."""
    ids: list[int] = generator.integers(vocab // 8, vocab // 2, count).tolist()
    return ids


def _timed(engine: Engine, prompt: list[int], output_len: int) -> tuple[float, float]:
    """Seconds until the first token, and from there to the last."""
    params = {"max_new_tokens": output_len, "temperature": 0.0, "ignore_eos": True}
    began_s, first_s = time.perf_counter(), 0.0
    for _ in engine.generate(input_ids=prompt, sampling_params=params, stream=True):
        first_s = first_s or time.perf_counter()
    return first_s - began_s, time.perf_counter() - first_s


def _table(results: Sequence[dict[str, Any]]) -> list[str]:
    head = f"{'tokens':>8} {'first token':>12} {'tokens/s':>9} {'each further':>13} {'cached':>9}"
    lines = [f"{head} {'process':>10} {'KV cache':>10}"]
    for one in results:
        kv = one["kv_resident_bytes"]
        lines.append(
            f"{one['length']:>8} {one['first_token_s']:>10.3f} s "
            f"{one['prefill_tokens_per_s']:>9.0f} {1e3 * one['token_s']:>10.2f} ms "
            f"{one['cached_first_token_s']:>7.3f} s "
            f"{format_bytes(one['rss_bytes']):>10} {format_bytes(kv) if kv else '':>10}"
        )
    return lines
