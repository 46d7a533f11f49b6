"""What trees of drafts are worth, by rows of a step: tokens a round of the bundled EAGLE-3 head.

A tree has the drafts of highest probability (EAGLE-2, arXiv:2406.16858), each node with the
``--branches`` best tokens behind it; a chain the best token at each place. Greedy, held-out
prompts.

python zoo/trees.py --items 48
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from chat import Encoder
from checkpoint import read
from eagle import DTYPE, Eagle, load_head, target_streams
from model import attend, rms_norm
from speculation import transcripts
from torch import Tensor
from torch.nn import functional as F
from train import attention_bias

ROWS = (2, 3, 4, 6, 8, 12, 16)
MOST = 15  # drafts


@dataclass(eq=False)
class Node:
    """A draft: its tokens since the round's start, its log probability, and of its path the hidden
    state [D] behind it, keys and values [kv heads, depth, E]."""

    tokens: tuple[int, ...]
    log_p: float
    hidden: Tensor
    keys: Tensor
    values: Tensor


Cut = Callable[[Sequence[Node], int], set[tuple[int, ...]]]


class Text:
    """What the head knows of a text: the entries of all its tokens."""

    def __init__(self, model: Eagle, ids: Sequence[int]) -> None:
        ids_1L = torch.tensor([ids])
        streams, _ = target_streams(
            model.target[0], ids_1L, attention_bias(torch.zeros_like(ids_1L))
        )
        self.model = model
        self.hidden_LD = F.linear(streams.to(DTYPE), model.w("fc")).float()[0]
        # the entry at place t is of token t + 1 and of the stream at t
        at, token = torch.arange(len(ids) - 1), ids_1L[:, 1:]
        _, k, v = model.project(self.hidden_LD[None, :-1], token, at)
        self.keys, self.values = k[0], v[0]

    def behind(self, t: int, token: int, nodes: Sequence[Node]) -> tuple[Tensor, Tensor, Tensor]:
        """One step of the head for drafts of one depth behind token t + 1 (``token``; no nodes:
        for it alone): hidden states [B, D], keys and values with this step's
        [B, kv heads, M, E]."""
        depth = len(nodes[0].tokens) if nodes else 0
        last = torch.tensor([[node.tokens[-1]] for node in nodes] or [[token]])
        hidden = torch.stack([node.hidden for node in nodes] or [self.hidden_LD[t]])[:, None]
        q, k, v = self.model.project(hidden, last, torch.tensor([t + depth]))
        if depth:
            k = torch.cat((torch.stack([node.keys for node in nodes]), k), 2)
            v = torch.cat((torch.stack([node.values for node in nodes]), v), 2)
        seen_k, seen_v = (x[:, :t].expand(len(k), -1, -1, -1) for x in (self.keys, self.values))
        heads = attend(
            q, torch.cat((seen_k, k), 2), torch.cat((seen_v, v), 2), torch.zeros(1, 1, 1, 1)
        )
        return self.model.finish(hidden, heads)[:, 0], k, v

    def drafts(self, t: int, token: int, branches: int) -> list[Node]:
        """The ``MOST`` drafts of highest probability behind token t + 1, the surest first: the
        first ones of them are the smaller trees."""
        made, front = list[Node](), list[Node]()
        while True:
            hidden, keys, values = self.behind(t, token, front)
            normed = rms_norm(hidden, self.model.vector["norm"]).to(DTYPE)
            logits = (normed @ self.model.head.to(DTYPE).T).float()
            log_p, best = logits.log_softmax(-1).topk(branches)
            new = [
                Node(
                    (*(front[row].tokens if front else ()), int(best[row, n])),
                    (front[row].log_p if front else 0.0) + float(log_p[row, n]),
                    hidden[row], keys[row], values[row],
                )
                for row in range(len(best))
                for n in range(branches)
            ]  # fmt: skip
            made = sorted(made + new, key=lambda node: -node.log_p)[:MOST]
            front = [node for node in new if node in made]
            if not front or len(front[0].tokens) == MOST:
                return made


def nodes_once(drafts: Sequence[Node], rows: int) -> set[tuple[int, ...]]:
    """Drafts for as many rows, the root's among them, where each is computed once."""
    return {node.tokens for node in drafts[: rows - 1]}


def leaves(drafts: Sequence[Node], rows: int) -> set[tuple[int, ...]]:
    """Drafts for as many rows, where each leaf is a sequence of its own from the root on."""
    paths, taken = set[tuple[int, ...]](), set[tuple[int, ...]]()
    for node in drafts:
        more = (paths - {node.tokens[:-1]}) | {node.tokens}
        if sum(len(path) + 1 for path in more) <= rows:
            paths, taken = more, taken | {node.tokens}
    return taken


def rounds(
    ids: Sequence[int], begin: int, trees: Mapping[int, Sequence[Node]], rows: int, cut: Cut
) -> int:
    """Verifications of the tokens from ``begin`` on. ``trees``: drafts behind each place."""
    t, count = begin - 1, 0
    while t + 1 < len(ids):
        nodes, right = cut(trees[t], rows), 0
        while tuple(ids[t + 2 : t + 3 + right]) in nodes and t + 2 + right < len(ids):
            right += 1
        t, count = t + 1 + right, count + 1
    return count


@torch.inference_mode()
def main() -> None:
    """Print tokens a round, by rows of a verification."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, default=Path("src/radixlm/assets/radix-tiny"))
    parser.add_argument("--head", type=Path, default=Path("zoo/models/radix-tiny-eagle3"))
    parser.add_argument("--items", type=int, default=48)
    parser.add_argument("--branches", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, encoder = Eagle(read(args.base)), Encoder(args.base / "tokenizer.json")
    load_head(model, args.head)
    made = transcripts(model.target[0], encoder, args.items)
    num_tokens, counts = 0, np.zeros((len(ROWS), 3), int)
    for prompt, reply in transcripts(model.target[0], encoder, args.items):
        ids, text = prompt + reply, Text(model, prompt + reply)
        places = range(len(prompt) - 1, len(ids) - 1)
        chains, trees = (
            {t: text.drafts(t, ids[t + 1], branches) for t in places}
            for branches in (1, args.branches)
        )
        num_tokens += len(reply)
        ways = ((chains, nodes_once), (trees, leaves), (trees, nodes_once))
        for row, rows in enumerate(ROWS):
            for column, (made, cut) in enumerate(ways):
                counts[row, column] += rounds(ids, len(prompt), made, rows, cut)
    print("rows  chain  leaves as rows  nodes once")
    for rows, lengths in zip(ROWS, num_tokens / counts, strict=True):
        print(f"{rows:4} {lengths[0]:6.2f} {lengths[1]:15.2f} {lengths[2]:11.2f}")


if __name__ == "__main__":
    main()
