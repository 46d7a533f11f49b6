"""Step 1 against its mathematics in plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.models.reference_math import (
    block_shapes,
    check,
    checkpoint,
    end_shapes,
    heads,
    rms,
    swiglu,
)
from torch import Tensor

DIM, WIDTH, INNER, VOCAB = 96, 16, 48, 100
SLOPES = (0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125)  # of six heads


@pytest.mark.parametrize("has_head", [True, False])
def test_step_1(tmp_path: Path, has_head: bool) -> None:
    config = {"architectures": ["Step1ForCausalLM"], "model_type": "step1", "rms_norm_eps": 1e-5}
    config |= {"hidden_size": DIM, "num_attention_heads": len(SLOPES), "num_attention_groups": 2}
    config |= {"intermediate_size": INNER, "num_hidden_layers": 2, "vocab_size": VOCAB}
    config |= {"max_seq_len": 128}
    shapes = end_shapes(VOCAB, DIM, has_head)
    for i in range(2):
        at = f"model.layers.{i}."
        shapes |= block_shapes(at, DIM, INNER)
        for name, rows in (("q", DIM), ("k", 2 * WIDTH), ("v", 2 * WIDTH), ("o", DIM)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, DIM)
    w = checkpoint(tmp_path, config, shapes)

    def read(at: str, x: Tensor) -> Tensor:
        q, k, v = heads(w, at, x, WIDTH)
        k, v = (one.repeat_interleave(3, 1) for one in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * WIDTH**-0.5
        places = torch.arange(len(x))
        distances = places[:, None] - places
        scores -= torch.tensor(SLOPES)[:, None, None] * distances.clamp(min=0).sqrt()
        shares = scores.masked_fill(distances < 0, -torch.inf).softmax(-1)
        joined = torch.einsum("hqk,khd->qhd", shares, v).flatten(1)
        return F.linear(joined, w[at + "o_proj.weight"])

    def reference(ids: list[int]) -> Tensor:
        x = w["model.embed_tokens.weight"][ids]
        for i in range(2):
            at = f"model.layers.{i}."
            x = x + read(at + "self_attn.", rms(x, w[at + "input_layernorm.weight"]))
            x = x + swiglu(w, at + "mlp.", rms(x, w[at + "post_attention_layernorm.weight"]))
        head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
        return F.linear(rms(x, w["model.norm.weight"]), head)

    check(tmp_path, reference)
