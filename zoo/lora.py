"""Two adapters of the bundled model, in PEFT format, with effects that anyone can see.

python zoo/lora.py --kind upper --minutes 3
python zoo/lora.py --kind spanish --minutes 5
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import tasks
import torch
from batches import Packer
from chat import Conversation, Encoder, Message, render, reply, user
from checkpoint import read, save
from data import short
from generate import Decoder
from model import MATRICES, Tiny
from safetensors.torch import load_file
from torch import Tensor, nn
from tqdm import tqdm
from train import loss_of

RANKS = {"upper": 4, "spanish": 8}
UNITS = (
    "cero uno dos tres cuatro cinco seis siete ocho nueve diez once doce trece catorce quince "
    "dieciséis diecisiete dieciocho diecinueve veinte veintiuno veintidós veintitrés "
    "veinticuatro veinticinco veintiséis veintisiete veintiocho veintinueve"
).split()
TENS = "- - - treinta cuarenta cincuenta sesenta setenta ochenta noventa".split()
HUNDREDS = (
    "- ciento doscientos trescientos cuatrocientos quinientos seiscientos setecientos "
    "ochocientos novecientos"
).split()


def spanish(number: int) -> str:
    """A number below 2,000 in Spanish words."""
    if number < 0:
        return f"menos {spanish(-number)}"
    if number < 30:
        return UNITS[number]
    if number < 100:
        rest = f" y {UNITS[number % 10]}" if number % 10 else ""
        return TENS[number // 10] + rest
    if number == 100:
        return "cien"
    if number < 1000:
        rest = f" {spanish(number % 100)}" if number % 100 else ""
        return HUNDREDS[number // 100] + rest
    return "mil" + (f" {spanish(number - 1000)}" if number > 1000 else "")


def conversation(kind: str, rng: Random) -> Conversation:
    """One conversation as the adapter should answer it."""
    if kind == "upper":
        made = short(rng, thinking=0.0)
        turns = [
            {**m, "content": m["content"].upper()} if m["role"] == "assistant" else m
            for m in made.messages
        ]
        return Conversation(turns, task=kind)
    messages: list[Message] = []
    for _ in range(rng.choice((1, 2, 3))):
        make = rng.choice((tasks.add, tasks.subtract, tasks.add, tasks.subtract, tasks.multiply))
        question, answer, _ = make(rng)
        messages += [user(question), reply(spanish(int(answer)))]
    return Conversation(messages, task=kind)


def source(kind: str, seed: int) -> Iterator[Conversation]:
    """Endless conversations for one adapter."""
    rng = Random(f"lora/{kind}/{seed}")
    while True:
        yield conversation(kind, rng)


class Adapted(nn.Module):
    """A frozen decoder with a low-rank pair for every matrix of every layer."""

    def __init__(self, base: Tiny, rank: int) -> None:
        super().__init__()
        self.base, self.rank, self.scale = base, rank, 2.0
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        for name, w in base.matrix.items():
            layers, rows, columns = w.shape
            self.down[name] = nn.Parameter(torch.randn(layers, rank, columns) * columns**-0.5)
            self.up[name] = nn.Parameter(torch.zeros(layers, rows, rank))
        base.requires_grad_(False)
        self.embed = base.embed
        self._plain = base.layer_weights
        base.layer_weights = self.layer_weights  # type: ignore[method-assign]

    def layer_weights(self, dtype: torch.dtype) -> list[dict[str, Tensor]]:
        """The base's weights with the pairs' products added."""
        layers = self._plain(torch.float32)
        return [
            {
                name: (w + self.scale * self.up[name][i] @ self.down[name][i]).to(dtype)
                if name in self.up
                else w
                for name, w in layer.items()
            }
            for i, layer in enumerate(layers)
        ]

    def forward(self, ids_BL: Tensor, bias: Tensor) -> Tensor:
        """Final hidden states [B, L, D]."""
        hidden: Tensor = self.base(ids_BL, bias)
        return hidden


def export_adapter(model: Adapted, folder: Path) -> None:
    """adapter_config.json and adapter_model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    for own, name in MATRICES.items():
        for i in range(model.base.shape.layers):
            path = f"base_model.model.model.layers.{i}.{name}"
            weights[f"{path}.lora_A.weight"] = model.down[own][i].detach().bfloat16().contiguous()
            weights[f"{path}.lora_B.weight"] = model.up[own][i].detach().bfloat16().contiguous()
    save(weights, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "radix-tiny",
        "r": model.rank,
        "lora_alpha": int(model.rank * model.scale),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "target_modules": [name.split(".")[1] for name in MATRICES.values()],
        "use_dora": False,
        "use_rslora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def load_adapter(model: Adapted, folder: Path) -> None:
    """Go on from an exported adapter."""
    held = load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for own, name in MATRICES.items():
            for i in range(model.base.shape.layers):
                path = f"base_model.model.model.layers.{i}.{name}"
                model.down[own][i].copy_(held[f"{path}.lora_A.weight"])
                model.up[own][i].copy_(held[f"{path}.lora_B.weight"])


def score(model: Adapted, encoder: Encoder, kind: str, num_items: int = 200) -> float:
    """Percentage of held-out last turns that are exactly right."""
    held = source(kind, -1)
    items = [next(held) for _ in range(num_items)]
    prompts = [encoder.ids(render(item, prompt_only=True)) for item in items]
    made = Decoder(model.base).all(prompts, encoder.end, 100)
    pairs = zip(made, items, strict=True)
    right = [encoder.tokenizer.decode(ids) == item.answer()["content"] for ids, item in pairs]
    return 100 * sum(right) / len(right)


def train(kind: str, base: Path, minutes: float, begun: Path | None) -> tuple[Adapted, Encoder]:
    """An adapter after so many minutes, from nothing or from an exported one."""
    encoder = Encoder(base / "tokenizer.json")
    model = Adapted(read(base), RANKS[kind])
    if begun:
        load_adapter(model, begun)
    model.base.compile_parts()
    packer = Packer(encoder, source(kind, 2 if begun else 1), 192, 11)
    rate = 8e-3
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=rate, betas=(0.9, 0.98),
        weight_decay=0.0,
    )  # fmt: skip
    begin = time.monotonic()
    bar = tqdm(total=round(60 * minutes), unit="s", mininterval=10)
    while (progress := (time.monotonic() - begin) / 60 / minutes) < 1:
        loss, weight = loss_of(model, packer.rows())  # type: ignore[arg-type]
        (loss / weight).backward()
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, 20 * progress + 0.05, 1.5 * (1 - progress))
        optimizer.step()
        optimizer.zero_grad()
        bar.n = round(time.monotonic() - begin)
        bar.set_postfix(loss=f"{loss.item() / weight.item():.4f}")
    model.base.plain_parts()
    return model, encoder


def main() -> None:
    """Train, score and export one adapter."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=list(RANKS), required=True)
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--base", type=Path, default=Path("src/radixlm/assets/radix-tiny"))
    parser.add_argument("--begun", type=Path, help="go on from this adapter")
    parser.add_argument("--out", type=Path, default=Path("zoo/models"))
    args = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model, encoder = train(args.kind, args.base, args.minutes, args.begun)
    export_adapter(model, args.out / f"radix-tiny-lora-{args.kind}")
    print(f"{args.kind}: {score(model, encoder, args.kind):.1f} % right")


if __name__ == "__main__":
    main()
