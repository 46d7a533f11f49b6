"""Moondream 2 and 3 with their published names through the engine, against SigLIP of transformers
and plain torch code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("PIL")
tf = pytest.importorskip("transformers")
from PIL import Image  # noqa: E402

from radixlm.base.errors import CheckpointError  # noqa: E402
from radixlm.entrypoints.offline import Engine  # noqa: E402
from radixlm.multimodal.checkpoint import load_processor  # noqa: E402
from tests.models.reference_math import Shapes, Weights  # noqa: E402
from tests.multimodal.test_custom_encoders import Rows, anew, check, noisy, written  # noqa: E402
from tests.multimodal.test_families import encoded, make_image  # noqa: E402
from tests.multimodal.tiny import tokenizer  # noqa: E402

DIM, HEADS, WIDTH, INNER, VOCAB, LAYERS, EXPERTS, OWN = 64, 4, 16, 96, 300, 3, 4, 24
SIDE, PATCH, MARGIN, EYE, EYE_LAYERS = 28, 7, 1, 32, 2
START, ANSWER, PLACE = 0, 1, "<|md_reserved_4|>"
AT = "model.text."


def text_shapes(version: int) -> Shapes:
    shapes: Shapes = {
        AT + "wte": (VOCAB, DIM), AT + "post_ln.weight": (DIM,), AT + "post_ln.bias": (DIM,),
        AT + "lm_head.weight": (VOCAB, DIM), AT + "lm_head.bias": (VOCAB,),
    }  # fmt: skip
    for i in range(LAYERS):
        at = f"{AT}blocks.{i}."
        shapes |= {f"{at}ln.{kind}": (DIM,) for kind in ("weight", "bias")}
        shapes |= {at + "attn.qkv.weight": (3 * DIM, DIM), at + "attn.qkv.bias": (3 * DIM,)}
        shapes |= {at + "attn.proj.weight": (DIM, DIM), at + "attn.proj.bias": (DIM,)}
        if version == 3:
            shapes |= {f"{at}attn.tau.w{one}": (HEADS, 3 * DIM) for one in "qv"}
            shapes[at + "attn.tau.alpha"] = (HEADS,)
        if version == 3 and i:
            shapes |= {at + "mlp.router.weight": (EXPERTS, DIM), at + "mlp.router.bias": (EXPERTS,)}
            shapes |= {at + "mlp.fc1.weight": (EXPERTS, 2 * OWN, DIM)}
            shapes |= {at + "mlp.fc2.weight": (EXPERTS, DIM, OWN)}
        else:
            shapes |= {at + "mlp.fc1.weight": (INNER, DIM), at + "mlp.fc1.bias": (INNER,)}
            shapes |= {at + "mlp.fc2.weight": (DIM, INNER), at + "mlp.fc2.bias": (DIM,)}
    return shapes


class Text:
    """The text model; the first ``prefix`` tokens see one another."""

    def __init__(self, w: Weights, theta: float) -> None:
        self.w, self.theta, self.prefix = w, theta, 0

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def normed(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (DIM,), self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def turned(self, x: Tensor) -> Tensor:
        """The first half of a head's channels, [T, H, C], turned in halves."""
        quarter = WIDTH // 4
        speeds = self.theta ** -(torch.arange(quarter) / quarter)
        angles = (torch.arange(len(x))[:, None] * speeds)[:, None]
        a, b, rest = x.split([quarter, quarter, WIDTH // 2], -1)
        c, s = angles.cos(), angles.sin()
        return torch.cat([a * c - b * s, b * c + a * s, rest], -1)

    def attend(self, at: str, x: Tensor) -> Tensor:
        count, qkv = len(x), self.linear(at + "qkv", x)
        q, k, v = (one.unflatten(-1, (HEADS, WIDTH)) for one in qkv.chunk(3, -1))
        if at + "tau.wq" in self.w:
            places = torch.arange(1, count + 1).log()[:, None]
            by_place = 1 + (places * self.w[at + "tau.alpha"]).sigmoid() - 0.5
            q, v = (
                t * (torch.tanh(F.gelu(qkv) @ self.w[f"{at}tau.w{n}"].T) + by_place)[..., None]
                for t, n in ((q, "q"), (v, "v"))
            )
        seen = torch.ones(count, count).tril().bool()
        seen[: self.prefix, : self.prefix] = True
        scores = torch.einsum("qhc,khc->hqk", self.turned(q), self.turned(k)) / WIDTH**0.5
        shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return self.linear(at + "proj", torch.einsum("hqk,khc->qhc", shares, v).flatten(1))

    def feed(self, at: str, x: Tensor) -> Tensor:
        if at + "router.weight" not in self.w:
            opened = F.gelu(self.linear(at + "fc1", x), approximate="tanh")
            return self.linear(at + "fc2", opened)
        best, chosen = self.linear(at + "router", x).topk(2, -1)
        made = []
        for row, shares, experts in zip(x, best.softmax(-1), chosen.tolist(), strict=True):
            parts = []
            for e in experts:
                h, g = (self.w[at + "fc1.weight"][e] @ row).chunk(2)
                parts.append(self.w[at + "fc2.weight"][e] @ (F.gelu(h) * (g + 1)))
            made.append(sum(s * one for s, one in zip(shares, parts, strict=True)))
        return torch.stack(made)

    def logits(self, embeds: Tensor) -> Tensor:
        """[1, T, D] -> [1, V], of the last token. The token of an answer is never said."""
        x = embeds[0]
        for i in range(LAYERS):
            at = f"{AT}blocks.{i}."
            h = self.normed(at + "ln", x)
            x = x + self.attend(at + "attn.", h) + self.feed(at + "mlp.", h)
        found = self.linear(AT + "lm_head", self.normed(AT + "post_ln", x[-1:]))
        found[:, ANSWER] = -torch.inf
        return found

    def get_input_embeddings(self) -> Any:
        return lambda ids: self.w[AT + "wte"][ids]

    def generate(self, inputs_embeds: Tensor, max_new_tokens: int, **ignored: Any) -> Any:
        return anew(self.logits, self.get_input_embeddings(), inputs_embeds, max_new_tokens)


def tiling(image: Any) -> tuple[int, int]:
    """Rows and columns of at most six crops, of 14 pixels each."""
    high, wide = image.height - 14, image.width - 14
    if min(high, wide) <= 14:
        return 1, 1
    least = -(-high // 14), -(-wide // 14)
    if least[0] * least[1] > 6:
        shrink = (6 / (least[0] * least[1])) ** 0.5
        return max(1, int(least[0] * shrink)), max(1, int(least[1] * shrink))
    rows = max(int((6 * high / wide) ** 0.5), least[0])
    columns = max(int((6 * wide / high) ** 0.5), least[1])
    if rows * columns > 6:
        return (rows, 6 // rows) if columns > rows else (6 // columns, columns)
    return rows, columns


def pixels(image: Any) -> Tensor:
    return torch.tensor(np.asarray(image, np.float32) / 127.5 - 1).permute(2, 0, 1)


def moondream(folder: Path, version: int) -> tuple[Text, Rows]:
    """A checkpoint; its text model, and the encoder outputs of images."""
    tok = tokenizer(PLACE)
    vocab = {"<|start|>": START, "<|answer|>": ANSWER}
    state = json.loads(tok.backend_tokenizer.to_str())
    named = {one: at + 2 for one, at in state["model"]["vocab"].items()}
    state["model"]["vocab"] = vocab | named
    for one in state["added_tokens"]:
        one["id"] += 2
    (folder / "tokenizer.json").write_text(json.dumps(state))
    torch.manual_seed(0)
    w = {name: torch.randn(shape) * 0.2 for name, shape in text_shapes(version).items()}
    eye = tf.SiglipVisionModel(tf.SiglipVisionConfig(
        hidden_size=EYE, intermediate_size=48, num_hidden_layers=EYE_LAYERS, image_size=SIDE,
        num_attention_heads=2, patch_size=PATCH, layer_norm_eps=1e-5, vision_use_head=False,
    )).float().eval()  # fmt: skip
    noisy(eye)
    parts = {k.removeprefix("vision_model."): v for k, v in eye.state_dict().items()}
    at = "model.vision."
    tensors = {
        at + "patch_emb.weight": parts["embeddings.patch_embedding.weight"].flatten(1),
        at + "patch_emb.bias": parts["embeddings.patch_embedding.bias"],
        at + "pos_emb": parts["embeddings.position_embedding.weight"][None],
        **{f"{at}post_ln.{kind}": parts[f"post_layernorm.{kind}"] for kind in ("weight", "bias")},
    }
    for i in range(EYE_LAYERS):
        for kind in ("weight", "bias"):
            old, new = f"encoder.layers.{i}.", f"{at}blocks.{i}."
            joined = [parts[f"{old}self_attn.{one}_proj.{kind}"] for one in "qkv"]
            tensors[f"{new}attn.qkv.{kind}"] = torch.cat(joined)
            tensors[f"{new}attn.proj.{kind}"] = parts[f"{old}self_attn.out_proj.{kind}"]
            for n in (1, 2):
                tensors[f"{new}ln{n}.{kind}"] = parts[f"{old}layer_norm{n}.{kind}"]
                tensors[f"{new}mlp.fc{n}.{kind}"] = parts[f"{old}mlp.fc{n}.{kind}"]
    sizes: Shapes = {"fc1.weight": (40, 2 * EYE), "fc1.bias": (40,), "fc2.weight": (DIM, 40)}
    hand = {name: torch.randn(one) * 0.2 for name, one in (sizes | {"fc2.bias": (DIM,)}).items()}
    tensors |= {f"{at}proj_mlp.{name}": one for name, one in hand.items()}
    tensors["model.region.coord_encoder.weight"] = torch.zeros(2, 2)
    text: dict[str, Any] = {
        "dim": DIM, "ff_dim": INNER, "n_layers": LAYERS, "vocab_size": VOCAB, "n_heads": HEADS,
        "n_kv_heads": HEADS, "max_context": 512,
    }  # fmt: skip
    if version == 3:
        text["moe"] = {
            "num_experts": EXPERTS, "start_layer": 1, "experts_per_token": 2,
            "expert_inner_dim": OWN,
        }  # fmt: skip
    written(folder, w | tensors, {
        "architectures": ["HfMoondream"], "model_type": f"moondream{'3' if version == 3 else '1'}",
        "config": {
            "text": text, "tokenizer": {"bos_id": START, "eos_id": START, "answer_id": ANSWER},
            "vision": {
                "enc_dim": EYE, "enc_patch_size": PATCH, "enc_n_layers": EYE_LAYERS,
                "enc_ff_dim": 48, "enc_n_heads": 2, "crop_size": SIDE, "max_crops": 6,
                "overlap_margin": MARGIN, "proj_inner_dim": 40,
            },
        },
    })  # fmt: skip
    model = Text(w, 1_500_000.0 if version == 3 else 10_000.0)

    def seen(one: Any) -> Tensor:
        """[4, 4, C]."""
        return eye(pixels(one)[None]).last_hidden_state.reshape(4, 4, EYE)

    def rows(images: list[Any]) -> Tensor:
        (image,) = images
        model.prefix = 1 + 16
        high, wide = tiling(image)
        large = image.resize((14 * wide + 14, 14 * high + 14), Image.Resampling.LANCZOS)
        grid = torch.zeros(2 * high + 2, 2 * wide + 2, EYE)
        with torch.no_grad():
            for y in range(2 * high + 2):  # each place from the crop that shows it in its middle
                for x in range(2 * wide + 2):
                    row, column = (
                        min(max((y - 1) // 2, 0), high - 1),
                        min(max((x - 1) // 2, 0), wide - 1),
                    )
                    corner = 14 * column, 14 * row
                    crop = large.crop((*corner, corner[0] + SIDE, corner[1] + SIDE))
                    grid[y, x] = seen(crop)[y - 2 * row, x - 2 * column]
            small = F.adaptive_avg_pool2d(grid.permute(2, 0, 1), 4).permute(1, 2, 0)
            whole = seen(image.resize((SIDE, SIDE), Image.Resampling.LANCZOS))
            both = torch.cat([whole, small], -1).reshape(16, -1)
            opened = F.gelu(
                F.linear(both, hand["fc1.weight"], hand["fc1.bias"]), approximate="tanh"
            )
            return F.linear(opened, hand["fc2.weight"], hand["fc2.bias"])

    return model, rows


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.filterwarnings("ignore")
def test_moondream(version: int, tmp_path: Path) -> None:
    model, rows = moondream(tmp_path, version)
    check(tmp_path, model, PLACE, "<image>which things are to be seen in it", rows, ([0], [1], [2]))


@pytest.mark.filterwarnings("ignore")
def test_the_start_token_before_one_image_is_not_another_ones(tmp_path: Path) -> None:
    """Its keys depend on the image. Texts without an image see only what is before."""
    model, rows = moondream(tmp_path, 3)
    engine = Engine(
        model_path=str(tmp_path), dtype="float32", max_total_tokens=2048, page_size=1,
        chunked_prefill_size=48,
    )  # fmt: skip
    try:
        sampling = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
        ids = load_processor(tmp_path).tokenizer("what?")["input_ids"]
        embed = model.get_input_embeddings()
        for size in ((40, 30), (33, 70), None):
            data, given = None, embed(torch.tensor([[START, *ids]]))
            prompt: dict[str, Any] = {"input_ids": [START, *ids]}
            model.prefix = 0
            if size is not None:
                image = make_image(*size)
                places = rows([image])[None]
                given = torch.cat([given[:, :1], places, given[:, 1:]], 1)
                prompt, data = {"prompt": "<image>what?"}, [encoded(image)]
            made = engine.generate(
                **prompt, sampling_params=sampling, image_data=data, return_logprob=True
            )["meta_info"]["output_token_logprobs"]
            want = model.generate(inputs_embeds=given, max_new_tokens=6).sequences[0].tolist()
            assert [one[1] for one in made] == want
    finally:
        engine.shutdown()


@pytest.mark.filterwarnings("ignore")
def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    moondream(tmp_path, 3)
    tokenizer("<image>").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"no token '<\|md_reserved_4\|>'"):
        load_processor(tmp_path)
