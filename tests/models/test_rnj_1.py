"""Rnj-1 against its mathematics in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.models.reference_math import (
    attention,
    check,
    checkpoint,
    end_shapes,
    heads,
    rms,
    rotated,
)
from torch import Tensor

from radixlm.arch.hf import describe
from radixlm.base.errors import CheckpointError

DIM, HEADS, WIDTH, INNER, VOCAB, CHUNK = 64, 4, 16, 48, 100, 6
KINDS = ("chunked_attention", "full_attention", "chunked_attention")
NORMS = (
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
CONFIG: dict[str, Any] = {
    "architectures": ["Rnj1ForCausalLM"],
    "model_type": "rnj1",
    "hidden_size": DIM,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": len(KINDS),
    "layer_types": list(KINDS),
    "sliding_window": 2 * CHUNK,
    "query_pre_attn_scalar": 20,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 5.0,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
BY_KIND = {
    "chunked_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


@pytest.mark.parametrize("by_kind", [False, True])
def test_rnj_1(tmp_path: Path, by_kind: bool) -> None:
    rope = {"rope_parameters": BY_KIND} if by_kind else {"rope_theta": 10000.0}
    shapes = end_shapes(VOCAB, DIM)
    for i in range(len(KINDS)):
        at = f"model.layers.{i}."
        shapes |= {f"{at}{name}.weight": (DIM,) for name in NORMS}
        for name, rows in (("q", DIM), ("k", 2 * WIDTH), ("v", 2 * WIDTH), ("o", DIM)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, DIM)
        shapes |= {f"{at}self_attn.{n}_norm.weight": (WIDTH,) for n in "qk"}
        shapes |= {f"{at}mlp.{n}_proj.weight": (INNER, DIM) for n in ("gate", "up")}
        shapes[at + "mlp.down_proj.weight"] = (DIM, INNER)
    w = checkpoint(tmp_path, CONFIG | rope, shapes)

    def normed(x: Tensor, name: str) -> Tensor:
        return rms(x, 1 + w[name + ".weight"])

    def read(i: int, at: str, x: Tensor) -> Tensor:
        theta = 100.0 if by_kind and i != 1 else 10000.0
        q, k, v = heads(w, at, x, WIDTH)
        q, k = (rotated(normed(t, f"{at}{n}_norm"), theta) for n, t in (("q", q), ("k", k)))
        of_token = torch.arange(len(x)) // CHUNK
        near = of_token[:, None] - of_token < 2
        return F.linear(
            attention(q, k, v, 20**-0.5, near if i != 1 else None), w[at + "o_proj.weight"]
        )

    def reference(ids: list[int]) -> Tensor:
        x = w["model.embed_tokens.weight"][ids] * DIM**0.5
        for i in range(len(KINDS)):
            at = f"model.layers.{i}."
            before, after, before2, after2 = (at + name for name in NORMS)
            x = x + normed(read(i, at + "self_attn.", normed(x, before)), after)
            h = normed(x, before2)
            gate, up = (F.linear(h, w[f"{at}mlp.{n}_proj.weight"]) for n in ("gate", "up"))
            opened = F.gelu(gate, approximate="tanh") * up
            x = x + normed(F.linear(opened, w[at + "mlp.down_proj.weight"]), after2)
        logits = F.linear(normed(x, "model.norm"), w["lm_head.weight"])
        return torch.tanh(logits / 5) * 5

    check(tmp_path, reference)


def test_chunked_layers_need_a_rope_of_their_own() -> None:
    ropes = {"full_attention": BY_KIND["full_attention"]}
    with pytest.raises(CheckpointError, match="lacks 'chunked_attention'"):
        describe({**CONFIG, "rope_parameters": ropes})
