"""radix-tiny-vl: the bundled decoder behind a small vision transformer, in the LLaVA layout.

python zoo/vision.py --minutes 40

The tower first learns alone what stands in which cell and which digits are written (two fifths of
the time), then tower, projector and decoder learn to answer. Every eighth step is one of plain
text, so that the decoder forgets nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import images
import numpy as np
import torch
from batches import bucket_packer
from chat import Encoder, render
from checkpoint import config, export_tokenizer, named_weights, publish, read
from model import Tiny, rms_norm
from muon import Muon
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm
from train import attention_bias, loss_of
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

PATCH, WIDTH, DEPTH, HEADS = 12, 128, 4, 4
NUM_PATCHES = (images.SIZE // PATCH) ** 2
MEAN, STD = (0.7, 0.7, 0.7), (0.3, 0.3, 0.3)
IMAGE = "<|image_pad|>"
TOWER_BATCH, BATCH, TEXT_EVERY = 48, 16, 8
CELL_CLASSES = (len(images.SHAPES) + 1, len(images.COLOURS) + 1)


def tower_config() -> CLIPVisionConfig:
    """A ViT of 64 patches."""
    return CLIPVisionConfig(
        hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=DEPTH,
        num_attention_heads=HEADS, image_size=images.SIZE, patch_size=PATCH,
        hidden_act="quick_gelu", projection_dim=WIDTH,
    )  # fmt: skip


def pixels(pictures: list[images.Picture]) -> Tensor:
    """Normalised pixels [B, 3, 96, 96], as the image processor makes them."""
    stacked = np.stack([picture.pixels for picture in pictures]).astype(np.float32) / 255
    return torch.from_numpy((stacked - MEAN) / np.array(STD)).float().permute(0, 3, 1, 2)


class Probe(nn.Module):
    """Reads cells and digits from the patches: the tower's own lessons. Thrown away after."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(13, WIDTH) * 0.2)
        self.attend = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.cells = nn.Linear(WIDTH, sum(CELL_CLASSES))
        self.digits = nn.Linear(WIDTH, 11)

    def loss(self, patches: Tensor, pictures: list[images.Picture]) -> Tensor:
        """Mean error over cells and digits; patches [B, 64, W]."""
        queries = self.queries.expand(len(pictures), -1, -1)
        read_out = queries + self.attend(queries, patches, patches, need_weights=False)[0]
        shape, colour = self.cells(read_out[:, :9]).split(CELL_CLASSES, -1)
        wanted = torch.tensor([_cells(picture) for picture in pictures])
        digits = torch.tensor([_digits(picture) for picture in pictures])
        return (
            F.cross_entropy(shape.flatten(0, 1), wanted[:, :, 0].flatten())
            + F.cross_entropy(colour.flatten(0, 1), wanted[:, :, 1].flatten())
            + 2 * F.cross_entropy(self.digits(read_out[:, 9:]).flatten(0, 1), digits.flatten())
        )


def _cells(picture: images.Picture) -> list[tuple[int, int]]:
    colours = list(images.COLOURS)
    held = {
        place: (1 + images.SHAPES.index(shape), 1 + colours.index(colour))
        for place, (shape, colour) in picture.cells.items()
    }
    return [held.get(place, (0, 0)) for place in range(9)]


def _digits(picture: images.Picture) -> list[int]:
    return [1 + int(picture.number[i]) if i < len(picture.number) else 0 for i in range(4)]


class Seeing(nn.Module):
    """Tower, projector and decoder."""

    def __init__(self, decoder: Tiny) -> None:
        super().__init__()
        self.tower, self.decoder = CLIPVisionModel(tower_config()), decoder
        self.first = nn.Linear(WIDTH, decoder.shape.hidden)
        self.second = nn.Linear(decoder.shape.hidden, decoder.shape.hidden)
        nn.init.normal_(self.second.weight, std=0.2 * decoder.shape.hidden**-0.5)

    def patches(self, pictures: list[images.Picture]) -> Tensor:
        """[B, 64, W]: the tower's last layer without the class token."""
        with torch.autocast("cpu", torch.bfloat16):
            return self.tower(pixels(pictures)).last_hidden_state[:, 1:].float()

    def hidden(self, ids_BL: Tensor, is_image_BL: Tensor, patches: Tensor) -> Tensor:
        """Final normed hidden states [B, L, D]; a row holds 64 image tokens or none."""
        seen = self.second(F.gelu(self.first(patches)))
        x = F.embedding(ids_BL, self.decoder.embed)
        x = x.masked_scatter(is_image_BL[:, :, None], seen.to(x.dtype))
        length, dtype = ids_BL.shape[1], torch.bfloat16
        cos, sin = self.decoder.cos[:length], self.decoder.sin[:length]
        bias = attention_bias(torch.zeros_like(ids_BL))
        for weights in self.decoder.layer_weights(dtype):
            x = self.decoder.layer(x, weights, bias, cos, sin, dtype)
        return rms_norm(x, self.decoder.norm).to(dtype)


def expand(ids: list[int], mask: list[int], image: int) -> tuple[list[int], list[int]]:
    """Write the one image token as 64."""
    at = ids.index(image)
    rest = NUM_PATCHES - 1
    return ids[:at] + [image] * rest + ids[at:], mask[:at] + [0] * rest + mask[at:]


def rows(made: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """Ids and loss weights, padded on the right to a multiple of 32."""
    width = -(-max(len(ids) for ids, _ in made) // 32) * 32
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in made])
    mask = torch.tensor([mask + [0] * (width - len(mask)) for _, mask in made])
    return ids, mask


def picture_loss(model: Seeing, encoder: Encoder, rng: Random) -> Tensor:
    """Mean error over the answers of a batch of pictures."""
    image = encoder.ids(IMAGE)[0]
    pictures = [images.draw(rng) for _ in range(BATCH)]
    made = [encoder.document(images.dialogue(rng, picture)) for picture in pictures]
    ids, mask = rows([expand(*one, image) for one in made])
    hidden = model.hidden(ids, ids == image, model.patches(pictures))
    chosen = (mask[:, 1:] > 0).nonzero(as_tuple=True)
    logits = (hidden[:, :-1][chosen] @ model.decoder.embed.bfloat16().T).float()
    weights = mask[:, 1:][chosen].float()
    losses = F.cross_entropy(logits, ids[:, 1:][chosen], reduction="none")
    return (losses * weights).sum() / weights.sum()


def teach(minutes: float, optimizers: list[Any], step: Any, name: str) -> None:
    """Call `step(n)` for a loss until the minutes are over; rates rise, then fall to zero."""
    rates = [group["lr"] for o in optimizers for group in o.param_groups]
    begin, n = time.monotonic(), 0
    bar = tqdm(total=round(60 * minutes), unit="s", mininterval=10, desc=name)
    while (progress := (time.monotonic() - begin) / 60 / minutes) < 1:
        loss = step(n)
        loss.backward()
        factor = min(1.0, 20 * progress + 0.05, 1.6 * (1 - progress))
        groups = [group for o in optimizers for group in o.param_groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * factor
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        n += 1
        bar.n = round(time.monotonic() - begin)
        bar.set_postfix(loss=f"{loss.item():.4f}", step=n)


def read_seeing(folder: Path) -> Seeing:
    """The model of an exported folder, to train it further."""
    held = load_file(folder / "model.safetensors")
    text = {
        name.removeprefix("language_model."): weight.clone()
        for name, weight in held.items()
        if name.startswith("language_model.model.")
    }
    with TemporaryDirectory() as made:
        base = Path(made)
        settings = json.loads((folder / "config.json").read_bytes())["text_config"]
        settings["rope_theta"] = settings["rope_parameters"]["rope_theta"]
        (base / "config.json").write_text(json.dumps(settings))
        save_file(text, base / "model.safetensors")
        model = Seeing(read(base))
    for part, prefix in (
        (model.tower, "vision_tower."),
        (model.first, "multi_modal_projector.linear_1."),
        (model.second, "multi_modal_projector.linear_2."),
    ):
        own = {n.removeprefix(prefix): w for n, w in held.items() if n.startswith(prefix)}
        part.load_state_dict({name: weight.float() for name, weight in own.items()})
    return model


def train(model: Seeing, encoder: Encoder, minutes: float, tower_share: float, seed: int) -> None:
    """The tower alone for its share of the time, then everything."""
    rng, probe = Random(seed), Probe()

    def look(_: int) -> Tensor:
        pictures = [images.draw(rng) for _ in range(TOWER_BATCH)]
        return probe.loss(model.patches(pictures), pictures)

    alone = torch.optim.AdamW([*model.tower.parameters(), *probe.parameters()], lr=1.5e-3)
    if tower_share:
        teach(tower_share * minutes, [alone], look, "tower")
    text = bucket_packer(encoder, "short", 10 + seed)
    decoder = model.decoder
    new = [*model.first.parameters(), *model.second.parameters()]
    slow = [decoder.embed, decoder.norm, *decoder.vector.values()]
    optimizers = [
        Muon(decoder.matrix.values(), lr=0.004),
        torch.optim.AdamW(
            [{"params": new, "lr": 2e-3}, {"params": list(model.tower.parameters()), "lr": 5e-4},
             {"params": slow, "lr": 4e-4}]
        ),
    ]  # fmt: skip

    def answer(n: int) -> Tensor:
        if n % TEXT_EVERY == TEXT_EVERY - 1:
            summed, weight = loss_of(decoder, text.rows())
            return summed / weight
        return picture_loss(model, encoder, rng)

    teach((1 - tower_share) * minutes, optimizers, answer, "all")


@torch.inference_mode()
def score(model: Seeing, encoder: Encoder, task: str, num: int = 200) -> float:
    """Percentage of held-out items answered exactly, greedy."""
    image, right = encoder.ids(IMAGE)[0], 0
    for start in range(0, num, 40):
        items = [images.evaluation(task, seed) for seed in range(start, min(start + 40, num))]
        patches = model.patches([picture for picture, _ in items])
        for (_, item), seen in zip(items, patches, strict=True):
            ids, _ = expand(encoder.ids(render(item, prompt_only=True)), [], image)
            made: list[int] = []
            while len(made) < 12 and encoder.end not in made:
                row = torch.tensor([ids + made])
                last = model.hidden(row, row == image, seen[None])[0, -1]
                made.append(int((last @ model.decoder.embed.bfloat16().T).argmax()))
            text = encoder.tokenizer.decode(made, skip_special_tokens=True)
            right += text.strip() == item.answer()["content"]
    return 100 * right / num


def llava_config(decoder: Tiny, encoder: Encoder) -> LlavaConfig:
    """config.json of the LLaVA class around a Qwen3 decoder."""
    pad = encoder.ids("<|endoftext|>")[0]
    text = config(decoder.shape, encoder.end, pad)
    made = LlavaConfig(
        vision_config=tower_config().to_dict(), text_config=text,
        image_token_index=encoder.ids(IMAGE)[0], projector_hidden_act="gelu",
        vision_feature_layer=-1, vision_feature_select_strategy="default",
        image_seq_length=NUM_PATCHES, tie_word_embeddings=True,
    )  # fmt: skip
    made.architectures = ["LlavaForConditionalGeneration"]
    made.eos_token_id, made.pad_token_id = encoder.end, pad
    return made


def to_transformers(model: Seeing, encoder: Encoder) -> LlavaForConditionalGeneration:
    """The same model as the Hugging Face class."""
    whole = LlavaForConditionalGeneration(llava_config(model.decoder, encoder))
    language = {
        name.removeprefix("model."): held for name, held in named_weights(model.decoder).items()
    }
    whole.model.language_model.load_state_dict(language)
    whole.model.vision_tower.load_state_dict(model.tower.state_dict())
    whole.model.multi_modal_projector.linear_1.load_state_dict(model.first.state_dict())
    whole.model.multi_modal_projector.linear_2.load_state_dict(model.second.state_dict())
    whole.tie_weights()
    return whole


def export(model: Seeing, encoder: Encoder, folder: Path) -> None:
    """The whole folder: weights in bfloat16, tokenizer, template, processor."""
    partial = folder.with_name(folder.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    to_transformers(model, encoder).to(torch.bfloat16).save_pretrained(partial)
    processor = LlavaProcessor(
        CLIPImageProcessor(
            size={"height": images.SIZE, "width": images.SIZE},
            crop_size={"height": images.SIZE, "width": images.SIZE},
            image_mean=MEAN, image_std=STD,
        ),
        PreTrainedTokenizerFast(tokenizer_object=encoder.tokenizer),
        patch_size=PATCH, vision_feature_select_strategy="default", image_token=IMAGE,
        num_additional_image_tokens=1,
    )  # fmt: skip
    processor.save_pretrained(partial)
    export_tokenizer(encoder, partial)
    for path in partial.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    publish(partial, folder)


def main() -> None:
    """Train, score and export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=40)
    parser.add_argument("--base", type=Path, default=Path("src/radixlm/assets/radix-tiny"))
    parser.add_argument("--further", type=Path, help="go on with the model of this folder")
    parser.add_argument("--tower-share", type=float, default=0.4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--items", type=int, default=200, help="held-out pictures a task")
    parser.add_argument("--out", type=Path, default=Path("zoo/models"))
    args = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    encoder = Encoder(args.base / "tokenizer.json")
    model = read_seeing(args.further) if args.further else Seeing(read(args.base))
    train(model, encoder, args.minutes, args.tower_share, args.seed)
    export(model, encoder, args.out / "radix-tiny-vl")
    for task in images.EVALUATIONS:
        print(f"| {task} | {score(model, encoder, task, args.items):.1f} |", flush=True)


if __name__ == "__main__":
    main()
