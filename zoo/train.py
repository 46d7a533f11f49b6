"""Train a decoder on the curriculum: wall-clock schedule, resumable, with a loss plot.

python zoo/train.py --model base --minutes 85 --out runs/zoo
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from pathlib import Path

import torch
from batches import Feed, Rows
from chat import Encoder
from checkpoint import export, read
from data import build_tokenizer
from model import BASE, DRAFT, Tiny
from muon import Muon
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

SHAPES = {"base": BASE, "draft": DRAFT}
PROMPT_SHARE, PROMPT_WEIGHT = 0.1, 0.3
LONG_FROM, LONG_EVERY = 0.35, 8
DECAY_FROM, WARMUP = 0.45, 0.01


def schedule(progress: float) -> float:
    """Learning-rate factor: short warm-up, constant, then linear to zero."""
    if progress < WARMUP:
        return max(progress / WARMUP, 0.02)
    return min(1.0, max((1.0 - progress) / (1.0 - DECAY_FROM), 0.0))


def attention_bias(documents_BL: Tensor) -> Tensor:
    """[B, 1, L, L]: 0 where a token may look, else a large negative number."""
    length = documents_BL.shape[1]
    same = documents_BL[:, None, :, None] == documents_BL[:, None, None, :]
    seen = same & torch.ones(length, length, dtype=torch.bool).tril()
    return torch.zeros(seen.shape).masked_fill_(~seen, -1e9)


def targets(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """(positions, target ids, weights) of the tokens that the loss looks at, flattened."""
    documents = torch.from_numpy(rows.documents)
    written = torch.from_numpy(rows.written)[:, 1:] > 0
    follows = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
    chosen = follows & (written | (torch.rand(written.shape) < PROMPT_SHARE))
    chosen = F.pad(chosen, (0, 1)).flatten().nonzero().squeeze(1)
    ids = torch.from_numpy(rows.ids).long().flatten()[chosen + 1]
    weights = torch.from_numpy(rows.written).flatten()[chosen + 1].float()
    return chosen, ids, weights.clamp(min=PROMPT_WEIGHT)


def logits_at(model: Tiny, ids: Tensor, bias: Tensor, positions: Tensor) -> Tensor:
    """Float32 logits [positions, V]."""
    picked = model(ids, bias).flatten(0, 1)[positions]
    return (picked @ model.embed.to(picked.dtype).T).float()


def loss_of(model: Tiny, rows: Rows, teacher: Tiny | None = None) -> tuple[Tensor, Tensor]:
    """(summed weighted loss, summed weight) of one batch; a teacher's choices replace the data."""
    ids, bias = torch.from_numpy(rows.ids).long(), attention_bias(torch.from_numpy(rows.documents))
    positions, wanted, weights = targets(rows)
    logits = logits_at(model, ids, bias, positions)
    if teacher is None:
        losses = F.cross_entropy(logits, wanted, reduction="none")
    else:
        with torch.no_grad():
            soft = logits_at(teacher, ids, bias, positions).softmax(-1)
        losses = F.cross_entropy(logits, soft, reduction="none")
    return (losses * weights).sum(), weights.sum()


class Run:
    """One training run: model, optimizers and how far it came."""

    def __init__(
        self,
        name: str,
        out: Path,
        minutes: float,
        seed: int,
        teacher: Path | None = None,
        begun: Path | None = None,
        rate: float = 1.0,
    ) -> None:
        self.teacher = read(teacher).requires_grad_(False) if teacher else None
        self.name, self.folder, self.minutes = name, out / name, minutes
        self.folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(seed)
        self.model = read(begun) if begun else Tiny(SHAPES[name])
        self.long_from = 0.0 if begun else LONG_FROM
        self.optimizers = [
            Muon(self.model.matrix.values(), lr=0.02),
            torch.optim.AdamW(
                [self.model.embed, self.model.norm, *self.model.vector.values()],
                lr=3e-3, betas=(0.9, 0.97), weight_decay=0.0, fused=True,
            ),
        ]  # fmt: skip
        self.rates = [rate * group["lr"] for o in self.optimizers for group in o.param_groups]
        self.step, self.spent_s = 0, 0.0
        self.losses: list[tuple[float, float]] = []

    @property
    def path(self) -> Path:
        """Where the resumable state is kept."""
        return self.folder / "state.pt"

    def save(self) -> None:
        """Write the state, atomically."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step, "spent_s": self.spent_s, "losses": self.losses,
        }  # fmt: skip
        partial = self.path.with_suffix(".part")
        torch.save(state, partial)
        partial.rename(self.path)

    def resume(self) -> None:
        """Continue from the state if there is one."""
        if not self.path.exists():
            return
        state = torch.load(self.path)
        self.model.load_state_dict(state["model"])
        for optimizer, held in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(held)
        self.step, self.spent_s = state["step"], state["spent_s"]
        self.losses = state["losses"]

    @property
    def progress(self) -> float:
        """Share of the time that is spent."""
        return self.spent_s / (60 * self.minutes)

    def update(self, feed: Feed) -> float:
        """One optimizer step over one batch of every bucket that is due; the mean loss."""
        buckets = ["short", "short", "middle"]
        if self.progress > self.long_from and self.step % LONG_EVERY == 0:
            buckets.append("long")
        total = weight = 0.0
        for bucket in buckets:
            loss, tokens = loss_of(self.model, feed.rows(bucket), self.teacher)
            loss.backward()
            total, weight = total + loss.item(), weight + tokens.item()
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad /= weight
        factor = schedule(self.progress)
        groups = [group for o in self.optimizers for group in o.param_groups]
        for group, rate in zip(groups, self.rates, strict=True):
            group["lr"] = rate * factor
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return total / weight

    def train(self, feed: Feed) -> None:
        """Train until the minutes are over; save every two minutes."""
        for model in (self.model, self.teacher):
            if model is not None:
                model.compile_parts()
        bar = tqdm(total=round(60 * self.minutes), unit="s", mininterval=10)
        saved = last = time.monotonic()
        mean = 0.0
        while self.progress < 1.0:
            loss = self.update(feed)
            mean = loss if not mean else 0.98 * mean + 0.02 * loss
            now = time.monotonic()
            self.spent_s += now - last
            last = now
            if self.step % 20 == 0:
                self.losses.append((self.spent_s / 60, mean))
                bar.n = round(self.spent_s)
                bar.set_postfix(step=self.step, loss=f"{mean:.4f}")
            if now - saved > 120:
                self.save()
                saved = now
        self.save()


def mix(model: Tiny, other: Tiny, share: float) -> None:
    """Give the model a mean of both models' weights, `share` of it the other's (model soups,
    arXiv:2203.05482)."""
    weights = other.state_dict()
    mine = model.state_dict()
    model.load_state_dict({name: w.lerp(weights[name], share) for name, w in mine.items()})


def plot(run: Run) -> None:
    """Write the loss over time as a picture, where matplotlib is installed."""
    (run.folder / "losses.json").write_text(json.dumps(run.losses))
    try:
        from matplotlib import pyplot  # noqa: PLC0415  (only the picture needs it)
    except ImportError:
        return
    pyplot.figure(figsize=(7, 4))
    pyplot.semilogy([t for t, _ in run.losses], [loss for _, loss in run.losses])
    pyplot.xlabel("minutes")
    pyplot.ylabel("loss")
    pyplot.title(run.name)
    pyplot.savefig(run.folder / "loss.png", dpi=100)


def main() -> None:
    """Train one decoder and export it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(SHAPES), default="base")
    parser.add_argument("--minutes", type=float, default=85)
    parser.add_argument("--out", type=Path, default=Path("runs/zoo"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--teacher", type=Path, help="learn from this model's choices instead")
    parser.add_argument("--begun", type=Path, help="go on from this model, with new optimizers")
    parser.add_argument("--rate", type=float, default=1.0, help="factor of the learning rates")
    parser.add_argument("--export-to", type=Path, help="only export the saved state to this folder")
    parser.add_argument("--mean-with", type=Path, help="export the mean of it and of this model")
    parser.add_argument("--share", type=float, default=0.5, help="of --mean-with, in the mean")
    args = parser.parse_args()
    tokenizer = args.out / "tokenizer.json"
    if args.begun and not tokenizer.exists():
        args.out.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(args.begun / "tokenizer.json", tokenizer)
    if not tokenizer.exists():
        build_tokenizer(tokenizer)
    run = Run(args.model, args.out, args.minutes, args.seed, args.teacher, args.begun, args.rate)
    run.resume()
    if args.export_to:
        if args.mean_with:
            mix(run.model, read(args.mean_with), args.share)
        export(run.model, Encoder(tokenizer), args.export_to)
        return
    feed = Feed(tokenizer, args.seed + 1000 * run.step)
    torch.set_num_threads(args.threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    run.train(feed)
    feed.close()
    plot(run)
    export(run.model, Encoder(tokenizer), run.folder / "export")


if __name__ == "__main__":
    main()
