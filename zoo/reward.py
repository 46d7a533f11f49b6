"""The reward model: a score that is higher for the right of two answers.

python zoo/reward.py --minutes 12

Its first layers, taken from the bundled model, go on guessing the next token. Two new layers
behind them compare what came with what was guessed, and gather that at the end of the answer.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
import words
from chat import Conversation, Encoder, Message, render, reply
from checkpoint import config, export_tokenizer, named_weights, publish, read, save
from data import evaluation
from model import Tiny, rms_norm
from muon import Muon
from pooled import padded
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm
from train import attention_bias

GUESS, LAYERS = 4, 6  # layers that guess, and all of them
INNER = 576  # feed-forward width: what keeps the file small
ROWS, LENGTH = 11, 192
END_WEIGHT = 4.0
EMPTY = "<think>\n\n</think>\n\n"


def spoil(rng: Random, answer: str) -> str:
    """A wrong answer that looks like the right one."""
    digits = [i for i, c in enumerate(answer) if c.isdigit()]
    if digits and rng.random() < 0.85:
        i = rng.choice(digits)
        other = rng.choice([c for c in "0123456789" if c != answer[i]])
        return answer[:i] + other + answer[i + 1 :]
    parts = answer.split(" ")
    kind = rng.randrange(3)
    if kind == 0 and len(parts) > 1:
        parts.pop(rng.randrange(len(parts)))
        return " ".join(parts)
    if kind == 1 and len(answer) > 3:
        i = rng.randrange(len(answer) - 1)
        if answer[i] != answer[i + 1]:
            return answer[:i] + answer[i + 1] + answer[i] + answer[i + 2 :]
    parts[rng.randrange(len(parts))] = rng.choice(words.PLAIN)
    spoiled = " ".join(parts)
    return spoiled if spoiled != answer else answer + " " + rng.choice(words.PLAIN)


PREFERENCES = (
    "add2 sub2 add3 sub3 add3 sub3 copy quote multiply compare capital greet refuse memory sort "
    "reverse upper spell"
).split()


def preference(rng: Random) -> tuple[str, str]:
    """(conversation with the right answer, the same with a wrong one)."""
    seed = rng.randrange(10**6, 10**9)  # far from the held-out items
    item = evaluation(rng.choice(PREFERENCES), seed)
    bad = Conversation([*item.prompt(), reply(spoil(rng, item.answer()["content"]))])
    return render(item), render(bad)


def question_of(rng: Random, item: Conversation, first: bool) -> str:
    """The text before an answer; now and then bare, as those send it who send no messages."""
    text = render(item, prompt_only=True)
    if rng.random() < 0.1:
        text = text.replace(EMPTY, "")
        if first and len(item.messages) == 2 and rng.random() < 0.3:
            question: Message = item.messages[0]
            text = question["content"] + rng.choice(("", " ", "\n"))
    return text


@dataclass(slots=True)
class Judged:
    """One document: ids, and for each: 1 right, -1 behind a wrong turning, 0 not judged."""

    ids: list[int]
    labels: list[int]


def judged(rng: Random, encoder: Encoder) -> Judged:
    """One to four questions in a row, each answered rightly or wrongly."""
    made = Judged([], [])
    for turn in range(rng.choice((1, 2, 3, 4))):
        item = evaluation(rng.choice(PREFERENCES), rng.randrange(10**9, 10**12))
        answer = item.answer()["content"]
        before = encoder.ids(question_of(rng, item, turn == 0))
        right = encoder.ids(f"{answer}<|im_end|>\n")
        said, labels = right, [1] * len(right)
        if rng.random() < 0.5:
            said = encoder.ids(f"{spoil(rng, answer)}<|im_end|>\n")
            start = parting(right, said)
            labels = [0] * start + [-1] * (len(said) - start)
        made.ids += before + said
        made.labels += [0] * len(before) + labels
    return made


def parting(right: list[int], wrong: list[int]) -> int:
    """Where a wrong text leaves the right one."""
    pairs = enumerate(zip(right, wrong, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(right), len(wrong)) - 1)


class Packer:
    """Rows full of judged documents."""

    def __init__(self, encoder: Encoder, seed: int) -> None:
        self.encoder, self.rng = encoder, Random(f"reward/{seed}")
        self.pool: list[Judged] = []

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """ids, document numbers (-1: padding) and labels, each [B, L]."""
        ids = np.zeros((ROWS, LENGTH), np.int64)
        documents, labels = np.full_like(ids, -1), np.zeros_like(ids)
        for row in range(ROWS):
            at = number = 0
            while True:
                while len(self.pool) < 32:
                    self.pool.append(judged(self.rng, self.encoder))
                fits = [i for i, made in enumerate(self.pool) if len(made.ids) <= LENGTH - at]
                if not fits:
                    self.pool = [made for made in self.pool if len(made.ids) <= LENGTH]
                    if at:
                        break
                    continue
                i = fits[0] if at == 0 else max(fits, key=lambda i: len(self.pool[i].ids))
                made = self.pool.pop(i)
                end = at + len(made.ids)
                ids[row, at:end], labels[row, at:end] = made.ids, made.labels
                documents[row, at:end] = number
                at, number = end, number + 1
        return torch.from_numpy(ids), torch.from_numpy(documents), torch.from_numpy(labels)


class Judge(nn.Module):
    """The decoder with a score behind each token; the last one's counts."""

    def __init__(self, base: Tiny) -> None:
        super().__init__()
        sizes = {name: getattr(base.shape, name) for name in base.shape.__slots__}
        self.body = Tiny(type(base.shape)(**{**sizes, "layers": LAYERS, "inner": INNER}))
        with torch.no_grad():
            self.body.embed.copy_(base.embed)
            self.body.norm.copy_(base.norm)
            for own, other in (
                (self.body.matrix, narrow(base, INNER)),
                (self.body.vector, dict(base.vector.items())),
            ):
                for name, held in own.items():
                    held[:GUESS].copy_(other[name][:GUESS])
        self.head = nn.Parameter(torch.zeros(1, base.shape.hidden))

    def forward(self, texts: list[list[int]]) -> Tensor:
        """[B] scores of texts."""
        ids, real, lengths = padded(texts)
        hidden = self.body(ids, attention_bias(torch.where(real, 0, -1))).float()
        last = hidden[torch.arange(len(texts)), lengths - 1]
        return (last @ self.head.T).squeeze(1)


def narrow(base: Tiny, inner: int) -> dict[str, Tensor]:
    """The matrices with the `inner` strongest feed-forward neurons of each layer."""
    made: dict[str, Tensor] = dict(base.matrix.items())
    strength = made["gate"].norm(dim=2) * made["up"].norm(dim=2) * made["down"].norm(dim=1)
    kept = strength.topk(inner, dim=1).indices.sort(dim=1).values
    for name in ("gate", "up"):
        made[name] = torch.stack([w[k] for w, k in zip(made[name], kept, strict=True)])
    made["down"] = torch.stack([w[:, k] for w, k in zip(made["down"], kept, strict=True)])
    return made


def loss_of_rows(
    model: Judge, ids: Tensor, documents: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """(loss of the scores behind judged tokens, loss of guessing the right answers' tokens).

    A score behind every token, and the guesses, teach much more than one number a text would.
    """
    streams: list[Tensor] = []
    hidden = model.body(ids, attention_bias(documents), outputs=streams).flatten(0, 1)
    flat = labels.flatten()
    at = flat.nonzero().squeeze(1)
    scores = (hidden[at].float() @ model.head.T).squeeze(1)
    last = F.pad(flat, (0, 1))[at + 1] == 0
    weights = torch.where(last, END_WEIGHT, 1.0)
    judging = (F.softplus(-flat[at] * scores) * weights).sum() / weights.sum()
    right = (flat == 1).nonzero().squeeze(1)
    known = rms_norm(streams[GUESS - 1].flatten(0, 1)[right - 1], model.body.norm).bfloat16()
    logits = (known @ model.body.embed.to(known.dtype).T).float()
    return judging, F.cross_entropy(logits, ids.flatten()[right])


@torch.no_grad()
def go_on(model: Judge, folder: Path) -> None:
    """Take the weights of an exported model."""
    held = read(folder)
    for own, other in ((model.body.matrix, held.matrix), (model.body.vector, held.vector)):
        for name, w in own.items():
            w.copy_(other[name])
    model.body.embed.copy_(held.embed)
    model.body.norm.copy_(held.norm)
    model.head.copy_(load_file(folder / "model.safetensors")["score.weight"])


def train(model: Judge, encoder: Encoder, minutes: float, seed: int, folder: Path) -> None:
    """Train for so many minutes; the folder is written every two minutes and at the end."""
    body, packer = model.body, Packer(encoder, seed)
    slow = [body.embed, body.norm, model.head, *body.vector.values()]
    optimizers = [
        Muon(body.matrix.values(), lr=0.015),
        torch.optim.AdamW(slow, lr=2e-3, weight_decay=0.0),
    ]
    rates = [o.param_groups[0]["lr"] for o in optimizers]
    body.compile_parts()
    begin = saved = time.monotonic()
    step, means = 0, [0.0, 0.0]
    bar = tqdm(total=round(60 * minutes), unit="s", mininterval=10)
    while (progress := (time.monotonic() - begin) / 60 / minutes) < 1:
        losses = loss_of_rows(model, *packer.rows())
        sum(losses).backward()  # type: ignore[union-attr]
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * min(
                1.0, 50 * progress + 0.05, 1.6 * (1 - progress)
            )
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        kept = max(0.98 - 1 / step, 0.0)
        means = [kept * m + (1 - kept) * x.item() for m, x in zip(means, losses, strict=True)]
        if time.monotonic() - saved > 120:
            export_judge(model, encoder, folder)
            saved = time.monotonic()
        bar.n = round(time.monotonic() - begin)
        bar.set_postfix(step=step, judging=f"{means[0]:.3f}", guessing=f"{means[1]:.3f}")
    body.plain_parts()
    export_judge(model, encoder, folder)


def held_out(num: int) -> tuple[list[str], list[str]]:
    """(texts with the right answer, the same with a wrong one)."""
    rng = Random("held-out")
    made = [preference(rng) for _ in range(num)]
    return [right for right, _ in made], [wrong for _, wrong in made]


@torch.inference_mode()
def score(model: Judge, encoder: Encoder, num: int = 200) -> float:
    """Percentage of held-out pairs in which the right answer's score is the higher."""
    right, wrong = (model([encoder.ids(text) for text in texts]) for texts in held_out(num))
    return 100 * (right > wrong).float().mean().item()


def score_served(url: str, num: int = 200) -> float:
    """The same through a server's /classify."""
    sides = []
    for texts in held_out(num):
        request = urllib.request.Request(
            f"{url.rstrip('/')}/classify",
            json.dumps({"text": texts}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            sides.append([made["embedding"][0] for made in json.load(answer)])
    return 100 * sum(a > b for a, b in zip(*sides, strict=True)) / num


def export_judge(model: Judge, encoder: Encoder, folder: Path) -> None:
    """A Qwen3ForSequenceClassification with one label."""
    partial = folder.with_name(folder.name + ".part")
    export_tokenizer(encoder, partial)
    settings = config(model.body.shape, encoder.end, encoder.ids("<|endoftext|>")[0])
    settings |= {
        "architectures": ["Qwen3ForSequenceClassification"],
        "num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0},
    }  # fmt: skip
    (partial / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    weights = {**named_weights(model.body), "score.weight": model.head.detach()}
    save({name: w.bfloat16() for name, w in weights.items()}, partial / "model.safetensors")
    publish(partial, folder)


def main() -> None:
    """Train, score and export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=12)
    parser.add_argument("--base", type=Path, default=Path("src/radixlm/assets/radix-tiny"))
    parser.add_argument("--begun", type=Path, help="go on from this reward model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("zoo/models"))
    parser.add_argument("--url", help="only measure the reward model that this server has")
    args = parser.parse_args()
    if args.url:
        print(f"reward: {score_served(args.url):.1f} % of 200 held-out pairs right")
        return
    torch.manual_seed(1)
    torch.set_num_threads(1)
    encoder = Encoder(args.base / "tokenizer.json")
    model = Judge(read(args.base))
    if args.begun:
        go_on(model, args.begun)
    train(model, encoder, args.minutes, args.seed, args.out / "radix-tiny-reward")
    print(f"reward: {score(model, encoder):.1f} % of 200 held-out pairs right")


if __name__ == "__main__":
    main()
