"""Molmo with its published names through the engine, against CLIP, Qwen 2 and OLMo 2 of
transformers and plain torch code."""

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

from radixlm.arch.hf import describe  # noqa: E402
from radixlm.arch.media.layouts import molmo as layout  # noqa: E402
from radixlm.base.errors import CheckpointError  # noqa: E402
from radixlm.multimodal.checkpoint import load_processor  # noqa: E402
from tests.fakes.tiny_checkpoint import randomise  # noqa: E402
from tests.multimodal.test_custom_encoders import Rows, check, noisy, written  # noqa: E402
from tests.multimodal.test_families import make_image  # noqa: E402
from tests.multimodal.tiny import TEXT, tokenizer  # noqa: E402

SIDE, PATCH, MARGIN, WIDTH, HEADS, VOCAB, MORE = 56, 7, 2, 32, 2, 260, 20
COUNT = SIDE // PATCH
WINDOW = COUNT - 2 * MARGIN
MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]
TINY = {
    "side": SIDE, "patch": PATCH, "width": WIDTH, "heads": HEADS, "inner": 48, "layers": (1, 3),
    "eps": 1e-5,
}  # fmt: skip
OF_CLIP = {
    "layer_norm1": "attention_norm", "layer_norm2": "ffn_norm", "mlp.fc1": "feed_forward.w1",
    "mlp.fc2": "feed_forward.w2", "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.out_proj": "attention.wo",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in TINY.items():
        monkeypatch.setitem(layout.ENCODER, key, value)


def clip_tensors(clip: Any) -> dict[str, Tensor]:
    """A CLIP under Molmo's names; its patches have the channels of a pixel side by side."""
    at = "model.vision_backbone.image_vit."
    state = {k.removeprefix("vision_model."): v for k, v in clip.state_dict().items()}
    made = {
        at + "class_embedding": state["embeddings.class_embedding"],
        at + "positional_embedding": state["embeddings.position_embedding.weight"],
        at + "patch_embedding.weight": state["embeddings.patch_embedding.weight"]
        .permute(0, 2, 3, 1)
        .flatten(1),
    }
    for name, value in state.items():
        for old, new in OF_CLIP.items():
            name = name.replace(f".{old}.", f".{new}.")
        if name.startswith("encoder.layers."):
            made[at + name.replace("encoder.layers.", "transformer.resblocks.")] = value
        elif name.startswith("pre_layrnorm."):
            made[at + name.replace("pre_layrnorm", "pre_ln")] = value
    return made


def hand_tensors(dim: int, inner: int) -> dict[str, Tensor]:
    at = "model.vision_backbone."
    shapes: dict[str, tuple[int, ...]] = {"pad_embed": (2, 2 * WIDTH)}
    for one in ("wq", "wk", "wv", "wo"):
        wide = WIDTH if one == "wo" else 2 * WIDTH
        shapes |= {f"image_pooling_2d.{one}.weight": (WIDTH, wide)}
        shapes |= {f"image_pooling_2d.{one}.bias": (WIDTH,)}
    shapes |= {f"image_projector.{one}.weight": (inner, WIDTH) for one in ("w1", "w3")}
    shapes["image_projector.w2.weight"] = (dim, inner)
    return {at + name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}


def text_tensors(model: Any) -> dict[str, Tensor]:
    state, top = model.state_dict(), "model.transformer."
    table = state["model.embed_tokens.weight"]
    made = {
        top + "wte.embedding": table[:VOCAB], top + "wte.new_embedding": table[VOCAB:],
        top + "ln_f.weight": state["model.norm.weight"],
        top + "ff_out.weight": state["lm_head.weight"],
    }  # fmt: skip
    for i in range(TEXT["num_hidden_layers"]):
        at, own = f"model.layers.{i}.", f"{top}blocks.{i}."
        for kind in ("weight", "bias"):
            parts = [state.get(f"{at}self_attn.{p}_proj.{kind}") for p in "qkv"]
            if parts[0] is not None:
                made[f"{own}att_proj.{kind}"] = torch.cat(parts)
        made[own + "attn_out.weight"] = state[at + "self_attn.o_proj.weight"]
        halves = [state[f"{at}mlp.{one}_proj.weight"] for one in ("up", "gate")]
        made[own + "ff_proj.weight"] = torch.cat(halves)
        made[own + "ff_out.weight"] = state[at + "mlp.down_proj.weight"]
        norms = ("input_layernorm", "post_attention_layernorm")
        if at + "input_layernorm.weight" not in state:
            norms = ("post_attention_layernorm", "post_feedforward_layernorm")
        for old, new in zip(norms, ("attn_norm", "ff_norm"), strict=True):
            made[f"{own}{new}.weight"] = state[f"{at}{old}.weight"]
        for one in ("q_norm", "k_norm"):
            if f"{at}self_attn.{one}.weight" in state:
                made[f"{own}{one}.weight"] = state[f"{at}self_attn.{one}.weight"]
    return made


def fitted(image: Any, height: int, width: int) -> tuple[Tensor, Tensor]:
    """[3, height, width] normalized, and where the image is."""
    pixels = torch.tensor(np.asarray(image, np.float32) / 255).permute(2, 0, 1)
    scale = min(height / image.height, width / image.width)
    size = int(image.height * scale + 1e-4), int(image.width * scale + 1e-4)
    small = F.interpolate(pixels[None], size, mode="bilinear", antialias=True)[0]
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    made, shown = torch.zeros(3, height, width), torch.zeros(height, width)
    made[:, top : top + size[0], left : left + size[1]] = small
    shown[top : top + size[0], left : left + size[1]] = 1
    return (made - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None], shown


def tiling(image: Any) -> tuple[int, int]:
    """Rows and columns of at most four crops."""
    unit, margin = WINDOW * PATCH, 2 * MARGIN * PATCH
    grids = [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2), (4, 1)]
    scales = [
        min(unit * y / (image.height - margin), unit * x / (image.width - margin)) for y, x in grids
    ]
    if max(scales) < 1:
        return grids[scales.index(max(scales))]
    return grids[scales.index(min(one for one in scales if one >= 1))]


class Eyes:
    """The encoder, square by square."""

    def __init__(self, clip: Any, parts: dict[str, Tensor]) -> None:
        self.clip = clip
        self.parts = {k.removeprefix("model.vision_backbone."): v for k, v in parts.items()}

    def linear(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.parts[f"{name}.weight"], self.parts.get(f"{name}.bias")
        return F.linear(x, weight, bias)

    def square(self, rows: Tensor) -> Tensor:
        """[4, 2 C] -> [D]."""
        asked = self.linear("image_pooling_2d.wq", rows.mean(0))
        keys, values = (self.linear(f"image_pooling_2d.w{one}", rows) for one in "kv")
        heads = []
        for head in range(HEADS):
            own = slice(16 * head, 16 * head + 16)
            heads.append((keys[:, own] @ asked[own] / 4).softmax(0) @ values[:, own])
        pooled = self.linear("image_pooling_2d.wo", torch.cat(heads))
        gate, up = (self.linear(f"image_projector.{one}", pooled) for one in ("w1", "w3"))
        return self.linear("image_projector.w2", F.silu(gate) * up)

    def crop(self, pixels: Tensor, shares: Tensor) -> Tensor:
        """[3, side, side] and [count, count] -> [count / 2, count / 2, D]."""
        seen = self.clip(pixels[None], output_hidden_states=True).hidden_states
        rows = torch.cat([seen[3], seen[1]], -1)[0, 1:].reshape(COUNT, COUNT, -1).clone()
        for y in range(COUNT):
            for x in range(COUNT):
                if shares[y, x] < 1:
                    rows[y, x] += self.parts["pad_embed"][0 if shares[y, x] == 0 else 1]
        squares = [
            self.square(rows[y : y + 2, x : x + 2].reshape(4, -1))
            for y in range(0, COUNT, 2)
            for x in range(0, COUNT, 2)
        ]
        return torch.stack(squares).reshape(COUNT // 2, COUNT // 2, -1)

    def image(self, image: Any) -> Tensor:
        """The whole image, then each square of its parts from the crop that shows it best."""
        down, across = tiling(image)
        unit, margin = WINDOW * PATCH, 2 * MARGIN * PATCH
        large, shown = fitted(image, down * unit + margin, across * unit + margin)
        pieces, shares = [fitted(image, SIDE, SIDE)[0]], []
        for y in range(0, down * unit, unit):
            for x in range(0, across * unit, unit):
                pieces.append(large[:, y : y + SIDE, x : x + SIDE])
                shares.append(F.avg_pool2d(shown[None, y : y + SIDE, x : x + SIDE], PATCH)[0])
        shares.append(torch.full((COUNT, COUNT), -1.0))  # the masks are one crop behind
        seen = [self.crop(*one) for one in zip(pieces, shares, strict=True)]
        made, half = list(seen[0].flatten(0, 1)), WINDOW // 2
        for r in range(down * half + MARGIN):
            for c in range(across * half + MARGIN):
                y = min(max((r - MARGIN // 2) // half, 0), down - 1)
                x = min(max((c - MARGIN // 2) // half, 0), across - 1)
                made.append(seen[1 + y * across + x][r - y * half, c - x * half])
        return torch.stack(made)


def molmo(folder: Path, after: bool) -> tuple[Any, Rows]:
    """A checkpoint; its text model, and the encoder outputs of images."""
    names = "<one> <two> <|image|> <im_patch> <im_col> <im_start> <im_end>".split()
    tok = tokenizer(*names)
    tok.save_pretrained(folder)
    patch = tok.convert_tokens_to_ids("<im_patch>")
    assert VOCAB <= patch < VOCAB + MORE
    torch.manual_seed(0)
    sizes = {**TEXT, "vocab_size": VOCAB + MORE, "tie_word_embeddings": False}
    kind = "Olmo2" if after else "Qwen2"
    model = getattr(tf, kind + "ForCausalLM")(getattr(tf, kind + "Config")(**sizes)).float().eval()
    model.lm_head = torch.nn.Linear(64, VOCAB, bias=False)
    randomise(model)
    clip = tf.CLIPVisionModel(
        tf.CLIPVisionConfig(
            hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=4, image_size=SIDE,
            num_attention_heads=HEADS, patch_size=PATCH, hidden_act="quick_gelu",
        )
    ).float().eval()  # fmt: skip
    noisy(clip)
    hand = hand_tensors(64, TEXT["intermediate_size"])
    written(folder, text_tensors(model) | clip_tensors(clip) | hand, {
        "architectures": ["MolmoForCausalLM"], "model_type": "molmo", "hidden_size": 64,
        "embedding_size": VOCAB, "vocab_size": VOCAB - 3, "additional_vocab_size": MORE,
        "intermediate_size": 2 * TEXT["intermediate_size"], "layer_norm_eps": 1e-6,
        "layer_norm_type": "rms", "norm_after": after, "attention_layer_norm": after,
        "qkv_bias": not after, "clip_qkv": None, "weight_tying": False, "rope_theta": 10000.0,
        "num_attention_heads": TEXT["num_attention_heads"], "max_position_embeddings": 512,
        "num_key_value_heads": TEXT["num_key_value_heads"],
        "num_hidden_layers": TEXT["num_hidden_layers"],
    })  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps({
        "image_mean": MEAN, "image_std": STD, "max_crops": 4, "overlap_margins": [MARGIN, MARGIN],
        "auto_map": {"AutoImageProcessor": "own.Images"},
    }))  # fmt: skip
    eyes = Eyes(clip, hand)
    own = model.get_input_embeddings().weight[patch].detach()

    def rows(images: list[Any]) -> Tensor:
        """As they are added to the placeholders' own embedding."""
        with torch.no_grad():
            return torch.cat([eyes.image(image) for image in images]) + own

    return model, rows


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_molmo(after: bool, tmp_path: Path) -> None:
    model, rows = molmo(tmp_path, after)
    check(tmp_path, model, "<im_patch>", "<|image|>", rows)


@pytest.mark.filterwarnings("ignore")
def test_images_stand_before_the_text(tmp_path: Path) -> None:
    molmo(tmp_path, after=False)
    reader = load_processor(tmp_path)
    made = reader(text=["see <|image|>it"], images=[make_image(84, 30)])
    text = reader.tokenizer.decode(made["input_ids"][0])
    whole = ("<im_patch>" * 4 + "<im_col>") * 4
    large = ("<im_patch>" * 6 + "<im_col>") * 4
    start = reader.tokenizer.eos_token
    assert text == f"{start}<im_start>{whole}<im_end><im_start>{large}<im_end> see it"
    assert made["image_crops"].tolist() == [3]
    assert sorted(made["image_places"][made["image_places"] >= 0].tolist()) == list(range(16 + 24))
    with pytest.raises(ValueError, match="0 placeholders for 1 images"):
        reader(text=["see it"], images=[make_image(20, 20)])


@pytest.mark.parametrize(
    ("key", "value"),
    [("clip_qkv", 8.0), ("layer_norm_type", "default"), ("weight_tying", True)],
)
@pytest.mark.filterwarnings("ignore")
def test_what_the_published_models_lack_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    molmo(tmp_path, after=False)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(CheckpointError, match=key):
        describe(tmp_path)
