"""GLM-4V of 2024 with its published names through the engine, against a model of the same text
layers in transformers and plain torch code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("PIL")
tf = pytest.importorskip("transformers")

from tests.arch.test_custom import CASES, QKV  # noqa: E402
from tests.fakes.tiny_checkpoint import randomise  # noqa: E402
from tests.multimodal.test_custom_encoders import anew, check, written  # noqa: E402
from tests.multimodal.test_published_as_code import saved  # noqa: E402
from tests.multimodal.tiny import TEXT, tokenizer  # noqa: E402

WIDTH, HEADS, SIDE, PATCH, DIM, INNER, SCALE = 32, 2, 28, 7, 64, 96, 4.0
MEAN = [0.48145466, 0.4578275, 0.40821073]
STD = [0.26862954, 0.26130258, 0.27577711]
MARKS = ("<|begin_of_image|>", "<|end_of_image|>")
VISION = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_heads": HEADS,
    "in_channels": 3, "patch_size": PATCH, "image_size": SIDE, "layer_norm_eps": 1e-6,
    "scaling_factor": SCALE, "num_positions": 17, "hidden_act": "gelu", "dropout_prob": 0.0,
}  # fmt: skip


def encoder_tensors() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embedding.proj.weight": (WIDTH, 3, PATCH, PATCH),
        "patch_embedding.proj.bias": (WIDTH,),
        "patch_embedding.cls_embedding": (1, WIDTH),
        "patch_embedding.position_embedding.weight": (17, WIDTH),
        "conv.weight": (DIM, WIDTH, 2, 2),
        "conv.bias": (DIM,),
        "linear_proj.linear_proj.weight": (DIM, DIM),
        "linear_proj.norm1.weight": (DIM,),
        "linear_proj.norm1.bias": (DIM,),
        "linear_proj.gate_proj.weight": (INNER, DIM),
        "linear_proj.dense_h_to_4h.weight": (INNER, DIM),
        "linear_proj.dense_4h_to_h.weight": (DIM, INNER),
        "boi": (1, 1, DIM),
        "eoi": (1, 1, DIM),
    }
    matrices = {
        "attention.query_key_value": (3 * WIDTH, WIDTH), "attention.dense": (WIDTH, WIDTH),
        "mlp.fc1": (48, WIDTH), "mlp.fc2": (WIDTH, 48),
    }  # fmt: skip
    for i in range(2):
        own = f"transformer.layers.{i}."
        for name, shape in matrices.items():
            shapes |= {f"{own}{name}.weight": shape, f"{own}{name}.bias": shape[:1]}
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes |= {f"{own}{name}.weight": (WIDTH,), f"{own}{name}.bias": (WIDTH,)}
    return {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}


def rows_of(w: dict[str, Tensor], image: Any) -> Tensor:
    """[6, DIM]: four squares of patches between two marks."""
    pixels = torch.tensor(np.asarray(image.resize((SIDE, SIDE), 3), np.float32)) / 255
    pixels = ((pixels - torch.tensor(MEAN)) / torch.tensor(STD)).permute(2, 0, 1)[None]

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, w[name + ".weight"], w.get(name + ".bias"))

    def normed(name: str, x: Tensor, eps: float = 1e-6) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w[name + ".weight"], w[name + ".bias"], eps)

    at = "patch_embedding."
    patches = F.conv2d(pixels, w[at + "proj.weight"], w[at + "proj.bias"], PATCH)[0].flatten(1).T
    x = torch.cat([w[at + "cls_embedding"], patches]) + w[at + "position_embedding.weight"]
    for i in range(2):
        at = f"transformer.layers.{i}."
        q, k, v = linear(at + "attention.query_key_value", x).chunk(3, -1)
        read = []
        for head in range(HEADS):
            own = slice(16 * head, 16 * head + 16)
            read.append((q[:, own] @ k[:, own].T / 4).softmax(-1) @ v[:, own])
        x = x + normed(at + "input_layernorm", linear(at + "attention.dense", torch.cat(read, -1)))
        fed = linear(at + "mlp.fc2", F.gelu(linear(at + "mlp.fc1", x)))
        x = x + normed(at + "post_attention_layernorm", fed)
    grid = F.conv2d(x[1:].T.reshape(1, WIDTH, 4, 4), w["conv.weight"], w["conv.bias"], 2)
    h = linear("linear_proj.linear_proj", grid[0].flatten(1).T)
    h = F.gelu(normed("linear_proj.norm1", h, 1e-5))
    h = F.silu(linear("linear_proj.gate_proj", h)) * linear("linear_proj.dense_h_to_4h", h)
    h = linear("linear_proj.dense_4h_to_h", h)
    return torch.cat([w["boi"][0], h, w["eoi"][0]]) / SCALE


class Placed:
    """A text model whose image rows behind "look " have one position but for the first and the last
    of them."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def get_input_embeddings(self) -> Any:
        return self._model.get_input_embeddings()

    def generate(self, inputs_embeds: Tensor, max_new_tokens: int, **ignored: Any) -> Any:
        def logits(embeds: Tensor) -> Tensor:
            places = [*range(6), 6, 6, 6, 6, *range(7, embeds.shape[1])][: embeds.shape[1]]
            with torch.no_grad():
                out = self._model(inputs_embeds=embeds, position_ids=torch.tensor([places]))
            return out.logits[:, -1]

        return anew(logits, self.get_input_embeddings(), inputs_embeds, max_new_tokens)


@pytest.mark.parametrize("architecture", ["ChatGLMModel", "GLM4VForCausalLM"])
@pytest.mark.filterwarnings("ignore")
def test_glm4v(architecture: str, tmp_path: Path) -> None:
    tokenizer(*MARKS, "<|endoftext|>").save_pretrained(tmp_path)
    torch.manual_seed(0)
    case = CASES["ChatGLMModel"]
    held = {**TEXT, "head_dim": 24, "pad_token_id": None, **case.changes}
    model = tf.GlmForCausalLM(tf.GlmConfig(**held, attention_bias=True)).float().eval()
    randomise(model)
    tensors = saved(model, tmp_path / "text")
    for name in [name for name in tensors if QKV[0] in name]:
        parts = [tensors.pop(name.replace(QKV[0], one)) for one in QKV]
        tensors[name.replace(QKV[0], "self_attention.query_key_value")] = torch.cat(parts)
    for old, new in case.rename:
        tensors = {re.sub(old, new, name): value for name, value in tensors.items()}
    seen = encoder_tensors()
    tensors |= {f"transformer.vision.{name}": value for name, value in seen.items()}
    written(tmp_path, tensors, {
        **case.config, "padded_vocab_size": 400, "num_layers": 2, "seq_length": 2048,
        "architectures": [architecture], "model_type": "chatglm", "vision_config": VISION,
        "tie_word_embeddings": False,
    })  # fmt: skip
    mark = f"{MARKS[0]}<|endoftext|>{MARKS[1]}"
    check(
        tmp_path, Placed(model), MARKS[0], mark,
        lambda images: torch.cat([rows_of(seen, one) for one in images]), ([0], [1]),
    )  # fmt: skip
