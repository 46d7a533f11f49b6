"""Chains and trees of drafts of the bundled model: accepted tokens a round, and tokens a second
over those of an engine without a drafter.

    python bench/trees.py --algorithm EAGLE3 --steps 3 --items 24

All engines are up at the same time and answer the same held-out prompts in turn, one at a time and
greedily. Drafts are verified whatever they cost: the bundled model is so small that none pay.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import radixlm
from radixlm.bench.cli import run
from radixlm.config.verb_parser import VerbParser
from radixlm.engine import drafting
from radixlm.speculative.lengths import DraftLength

ZOO = Path(__file__).parents[1] / "zoo"
TREES = ((1, 0), (2, 6), (2, 8), (4, 8), (4, 12))  # branches, and tokens of a tree


class Always(DraftLength):
    """Drafts in each step."""

    def __init__(self, most: int, *_: Any) -> None:
        super().__init__(most, is_fixed=True, always=True)


def held_out(count: int) -> list[list[int]]:
    """Prompts of the zoo that no training has seen."""
    sys.path.insert(0, str(ZOO))
    from chat import Encoder, render  # noqa: PLC0415
    from data import EVALUATIONS, evaluation  # noqa: PLC0415

    encoder = Encoder(Path(radixlm.__file__).parent / "assets/radix-tiny/tokenizer.json")
    tasks = [task for task in EVALUATIONS if task != "passage-long"]
    items = [evaluation(tasks[i % len(tasks)], 5000 + i) for i in range(count)]
    return [
        encoder.ids(render(i, prompt_only=True, thinking=i.task.endswith("-think"))) for i in items
    ]


def main(argv: Sequence[str]) -> int:
    parser = VerbParser("bench/trees.py", __doc__ or "", usage="python bench/trees.py [options]")
    parser.add_argument("--algorithm", default="EAGLE3", help="EAGLE3 or STANDALONE")
    for name, default in (("--steps", 3), ("--items", 24), ("--rounds", 3), ("--tokens", 64)):
        parser.add_argument(name, type=int, default=default)
    args = parser.parse_args(argv)
    drafting.DraftLength = Always  # type: ignore[misc]
    prompts, sampling = held_out(args.items), {"temperature": 0, "max_new_tokens": args.tokens}
    base: dict[str, Any] = {"cpu_threads": 1, "max_total_tokens": 16384, "log_level": "error"}
    with ExitStack() as stack:
        engines = {(0, 0): stack.enter_context(radixlm.Engine(**base))}
        for branches, tokens in TREES:
            options = {"speculative_algorithm": args.algorithm, "speculative_eagle_topk": branches,
                       "speculative_num_steps": args.steps}  # fmt: skip
            if tokens:
                options["speculative_num_draft_tokens"] = tokens
            engines[branches, tokens] = stack.enter_context(radixlm.Engine(**base, **options))
        rates: dict[tuple[int, int], list[float]] = {key: [] for key in engines}
        answers: dict[tuple[int, int], list[list[int]]] = {}
        for number in range(-1, args.rounds):  # the first one warms up
            for key in list(engines)[:: 1 if number % 2 else -1]:
                began_s, found = time.perf_counter(), []
                for ids in prompts:
                    found.append(engines[key].generate(input_ids=ids, sampling_params=sampling))
                seconds = time.perf_counter() - began_s
                answers[key] = [one["output_ids"] for one in found]
                rates[key] += [sum(map(len, answers[key])) / seconds] * (number >= 0)
        print("topk tokens  tokens/round  tokens/s over plain")
        for key, engine in engines.items():
            state = engine.get_server_info()["internal_states"][0]
            ratios = [a / b for a, b in zip(rates[key], rates[0, 0], strict=True)]
            accepted = state.get("avg_spec_accept_length") or 1.0
            print(f"{key[0]:4} {key[1]:6} {accepted:13.3f} {statistics.median(ratios):20.3f}")
            assert answers[key] == answers[0, 0], "drafts change no token"
    return 0


if __name__ == "__main__":
    sys.exit(run("bench/trees.py", main, sys.argv[1:]))
