"""The embedding model: the first layers of the bundled one, mean-pooled.

python zoo/pooled.py --minutes 5
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from random import Random

import tasks
import torch
import words
from chat import Encoder
from checkpoint import config, export_tokenizer, named_weights, publish, read, save
from model import Tiny
from muon import Muon
from passages import FACTS, value
from tools import TOOLS, draw
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm
from train import attention_bias

LAYERS = 2
TEMPERATURE = 0.05
NUM_PAIRS = 64


def paraphrase(rng: Random) -> tuple[str, str]:
    """Two texts that say or ask the same in different words."""
    kind = rng.randrange(4)
    if kind == 0:
        forms = rng.choice((tasks.ADD_FORMS, tasks.SUBTRACT_FORMS))
        a, b = rng.randrange(1000), rng.randrange(1000)
        one, two = rng.sample(forms, 2)
        return one.format(a=a, b=b), two.format(a=a, b=b)
    if kind == 1:
        tool = rng.choice(TOOLS)
        full = [r for r in tool.requests if all("{" + s + "}" in r for s in tool.parameters)]
        slots = {slot: draw(rng, held) for slot, (_, _, held) in tool.parameters.items()}
        one, two = rng.sample(full, 2)
        return one.format(**slots), two.format(**slots)
    fact = rng.choice(list(FACTS))
    _, says, asks = FACTS[fact]
    one, two = rng.sample(says if kind == 2 else asks, 2)
    name, held = rng.choice(words.NAMES), value(rng, fact)
    return one.format(s=name, v=held), two.format(s=name, v=held)


class Pooled(nn.Module):
    """The first layers of a decoder; a vector for each text."""

    def __init__(self, base: Tiny) -> None:
        super().__init__()
        sizes = {name: getattr(base.shape, name) for name in base.shape.__slots__}
        self.body = Tiny(type(base.shape)(**{**sizes, "layers": LAYERS}))
        with torch.no_grad():
            self.body.embed.copy_(base.embed)
            self.body.norm.copy_(base.norm)
            for own, other in ((self.body.matrix, base.matrix), (self.body.vector, base.vector)):
                for name, held in own.items():
                    held.copy_(other[name][:LAYERS])

    def forward(self, texts: list[list[int]]) -> Tensor:
        """[B, D] unit vectors."""
        ids, real, lengths = padded(texts)
        hidden = self.body(ids, attention_bias(torch.where(real, 0, -1))).float()
        mean = (hidden * real[:, :, None]).sum(1) / lengths[:, None]
        return F.normalize(mean, dim=-1)


def padded(texts: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """(ids [B, L] padded on the right, which of them are real [B, L], lengths [B])."""
    width = max(map(len, texts))
    lengths = torch.tensor([len(text) for text in texts])
    ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    return ids, torch.arange(width) < lengths[:, None], lengths


def loss_of_pairs(model: Pooled, left: list[list[int]], right: list[list[int]]) -> Tensor:
    """Contrastive loss of paraphrases."""
    scores = model(left) @ model(right).T / TEMPERATURE
    same = torch.arange(len(left))
    return (F.cross_entropy(scores, same) + F.cross_entropy(scores.T, same)) / 2


def pairs(encoder: Encoder, rng: Random, num: int) -> tuple[list[list[int]], ...]:
    """Token ids of `num` paraphrases: left and right."""
    made = [paraphrase(rng) for _ in range(num)]
    return [encoder.ids(a) for a, _ in made], [encoder.ids(b) for _, b in made]


@torch.inference_mode()
def score(model: Pooled, encoder: Encoder, num: int = 200) -> float:
    """Percentage of held-out texts whose nearest is the paraphrase."""
    left, right = pairs(encoder, Random("held-out"), num)
    nearest = (model(left) @ model(right).T).argmax(0)
    return 100 * (nearest == torch.arange(num)).float().mean().item()


def train(model: Pooled, encoder: Encoder, minutes: float) -> None:
    """Train for so many minutes."""
    body = model.body
    slow = [body.embed, body.norm, *body.vector.values()]
    optimizers = [Muon(body.matrix.values(), lr=0.006), torch.optim.AdamW(slow, lr=1e-3)]
    rates = [o.param_groups[0]["lr"] for o in optimizers]
    rng, begin = Random(1), time.monotonic()
    bar = tqdm(total=round(60 * minutes), unit="s", mininterval=10)
    while (progress := (time.monotonic() - begin) / 60 / minutes) < 1:
        loss = loss_of_pairs(model, *pairs(encoder, rng, NUM_PAIRS))
        loss.backward()
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * min(
                1.0, 20 * progress + 0.05, 1.6 * (1 - progress)
            )
            optimizer.step()
            optimizer.zero_grad()
        bar.n = round(time.monotonic() - begin)
        bar.set_postfix(loss=f"{loss.item():.4f}")


def export_pooled(model: Pooled, encoder: Encoder, folder: Path) -> None:
    """A Qwen3Model with mean pooling."""
    partial = folder.with_name(folder.name + ".part")
    export_tokenizer(encoder, partial)
    weights = {name.removeprefix("model."): w for name, w in named_weights(model.body).items()}
    settings = config(model.body.shape, encoder.end, encoder.ids("<|endoftext|>")[0])
    settings["architectures"] = ["Qwen3Model"]
    _write_pooling(partial, model.body.shape.hidden)
    (partial / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    save({name: w.bfloat16() for name, w in weights.items()}, partial / "model.safetensors")
    publish(partial, folder)


def _write_pooling(folder: Path, width: int) -> None:
    """The two files by which sentence-transformers knows that the mean is meant."""
    pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True,
               "pooling_mode_cls_token": False, "pooling_mode_lasttoken": False}  # fmt: skip
    base = "sentence_transformers.models"
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{base}.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{base}.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{base}.Normalize"},
    ]
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling, indent=2) + "\n")
    (folder / "modules.json").write_text(json.dumps(modules, indent=2) + "\n")


def main() -> None:
    """Train, score and export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--base", type=Path, default=Path("src/radixlm/assets/radix-tiny"))
    parser.add_argument("--out", type=Path, default=Path("zoo/models"))
    args = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    encoder = Encoder(args.base / "tokenizer.json")
    model = Pooled(read(args.base))
    train(model, encoder, args.minutes)
    export_pooled(model, encoder, args.out / "radix-tiny-embed")
    print(f"embed: {score(model, encoder):.1f} % of 200 held-out pairs right")


if __name__ == "__main__":
    main()
