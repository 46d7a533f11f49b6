"""Decode speed with an EAGLE-3 head over that without, where a chosen share of drafts is right.

    python bench/oracle.py --alpha 0.7 --batch 1 [server options: --quantization int4wo-32 ...]

Target and head have random weights: the shape of Qwen3-0.6B and a head of one layer with 32,000
tokens, as published ones have. Both compute every step; then the target's draws become the tokens
of a given answer, and each draft the answer's token with the chance ``--alpha``, else another one.
So the head costs what it costs. In turn, without and with drafts.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ngram import Scripted, positive

from radixlm.base.record import replace
from radixlm.bench.cli import run
from radixlm.bench.one_batch import Shape, with_room
from radixlm.config.parser import parse
from radixlm.config.verb_parser import VerbParser
from radixlm.engine.model_info import resolved

TARGET = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}  # fmt: skip
HEAD = TARGET | {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
    "target_hidden_size": 1024, "draft_vocab_size": 32000, "tie_word_embeddings": False,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [2, 14, 25], "use_aux_hidden_state": True,
    },
}  # fmt: skip


class Oracle(Scripted):
    """A batch whose drafts are right as often as is asked."""

    alpha = 0.7

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        runner: Any = self.replica.scheduler.executor
        drafter, states = runner.end.drafter, runner.tables.states
        inner = drafter.propose

        def propose(tail: Any, lens_R: Any) -> Any:
            found = inner(tail, lens_R)
            num_drafts = found.tokens_RK.shape[1]
            tokens_RK = torch.empty_like(found.tokens_RK)
            rows = zip(tail.slots_R.tolist(), tail.positions_R.tolist(), strict=True)
            for row, (slot, position) in enumerate(rows):
                number = int(states[slot].rid.split("-")[1])
                prompt, answer = self.pairs[number]
                at = np.arange(position + 1, position + 1 + num_drafts)
                right = np.minimum(at - len(prompt), len(answer) - 1)
                draws = [np.random.default_rng((number, int(one))).random() for one in at]
                is_wrong = np.array(draws) >= self.alpha
                tokens_RK[row] = torch.from_numpy(answer[right] ^ is_wrong)
            survival_RK = self.alpha ** torch.arange(1.0, num_drafts + 1).expand_as(tokens_RK)
            return replace(found, tokens_RK=tokens_RK, survival_RK=survival_RK)

        drafter.propose = propose


def main(argv: Sequence[str]) -> int:
    parser = VerbParser("bench/oracle.py", __doc__ or "", usage="python bench/oracle.py [options]")
    parser.add_argument("--alpha", type=float, default=0.7, help="share of drafts that are right")
    for name, default in (("--batch", 1), ("--answer", 64), ("--rounds", 3)):
        parser.add_argument(name, type=int, default=default)
    args, rest = parser.parse_known_args(argv)
    positive([args.batch, args.answer, args.rounds], "--batch, --answer and --rounds")
    with tempfile.TemporaryDirectory() as scratch:
        folders = []
        for name, made in (("target", TARGET), ("head", HEAD)):
            folders.append(Path(scratch, name))
            folders[-1].mkdir()
            (folders[-1] / "config.json").write_text(json.dumps(made))
        words = ["--model-path", str(folders[0]), "--speculative-algorithm", "EAGLE3",
                 "--speculative-draft-model-path", str(folders[1]), "--load-format", "dummy",
                 "--skip-tokenizer-init", *rest]  # fmt: skip
        config, given = parse(words, prog="bench/oracle.py")
        shapes = [Shape(args.batch, 256, args.answer)]
        config, info = resolved(*with_room(config, given, shapes))
        bench, ratios = Oracle(config, info, 1), list[float]()
    bench.alpha = args.alpha
    rng = np.random.default_rng(7)
    for number in range(-1, args.rounds):  # the first one warms up
        ids = rng.integers(3, HEAD["draft_vocab_size"], (args.batch, 64 + args.answer), np.int32)
        batch = [(one[:64], one[64:]) for one in ids]
        order = (False, True) if number % 2 else (True, False)
        found = {drafts: bench.decode(batch, drafts) for drafts in order}
        ratios.append(found[False][0] / found[True][0])
        print(f"{ratios[-1]:.3f}, steps {found[False][1]} -> {found[True][1]}", flush=True)
    plain_ms = 1e3 * found[False][0] / found[False][1]
    median = statistics.median(ratios[1:])
    print(f"batch {args.batch}: median {median:.3f}; a plain step {plain_ms:.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(run("bench/oracle.py", main, sys.argv[1:]))
