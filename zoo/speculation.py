"""How many tokens of a draft model the bundled model accepts (greedy), on held-out prompts.

python zoo/speculation.py --draft zoo/models/radix-tiny-draft
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from chat import Encoder, render
from checkpoint import read
from data import EVALUATIONS, evaluation
from generate import Decoder
from model import Tiny
from train import attention_bias

STEPS = 3


def transcripts(
    target: Tiny, encoder: Encoder, num_items: int
) -> list[tuple[list[int], list[int]]]:
    """(prompt, greedy reply with its end token) of held-out items, spread over the tasks."""
    tasks = [task for task in EVALUATIONS if task != "passage-long"]
    items = [evaluation(tasks[i % len(tasks)], 5000 + i) for i in range(num_items)]
    prompts = [
        encoder.ids(render(i, prompt_only=True, thinking=i.task.endswith("-think"))) for i in items
    ]
    replies = Decoder(target).all(prompts, encoder.end, 160)
    return [(p, [*r, encoder.end]) for p, r in zip(prompts, replies, strict=True)]


def accept_length(hits: list[list[list[bool]]]) -> float:
    """Mean tokens a verification yields.

    `hits[reply][t][s]`: draft token s of a chain that starts behind token t is the target's.
    """
    tokens = rounds = 0
    for reply in hits:
        t = 0
        while t < len(reply):
            row = reply[t]
            right = next((s for s, hit in enumerate(row) if not hit), len(row))
            tokens, rounds, t = tokens + right + 1, rounds + 1, t + right + 1
    return tokens / max(rounds, 1)


@torch.inference_mode()
def agreement(target: Tiny, draft: Tiny, encoder: Encoder, num_items: int) -> tuple[float, float]:
    """(share of the target's tokens that the draft guesses, accept length with three steps)."""
    hits, right, total = [], 0, 0
    for prompt, made in transcripts(target, encoder, num_items):
        ids = torch.tensor([prompt + made])
        hidden = draft(ids, attention_bias(torch.zeros_like(ids)))
        guesses = (hidden @ draft.embed.to(hidden.dtype).T).argmax(-1)[0, len(prompt) - 1 : -1]
        same = [bool(hit) for hit in guesses == ids[0, len(prompt) :]]
        right, total = right + sum(same), total + len(same)
        hits.append([same[t : t + STEPS] for t in range(len(same))])
    return right / total, accept_length(hits)


def main() -> None:
    """Print the share of accepted tokens and the accept length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, default=Path("src/radixlm/assets/radix-tiny"))
    parser.add_argument("--draft", type=Path, default=Path("zoo/models/radix-tiny-draft"))
    parser.add_argument("--items", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    encoder = Encoder(args.base / "tokenizer.json")
    share, length = agreement(read(args.base), read(args.draft), encoder, args.items)
    print(f"accepted {100 * share:.1f} %, accept length with {STEPS} steps {length:.2f}")


if __name__ == "__main__":
    main()
