"""IQuest LoopCoder against its mathematics in plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.models.reference_math import (
    Shapes,
    attention,
    check,
    checkpoint,
    heads,
    rms,
    rotated,
    swiglu,
)
from torch import Tensor

DIM, HEADS, WIDTH, INNER, VOCAB, WINDOW, LAYERS = 64, 4, 16, 48, 100, 5, 2


@pytest.mark.parametrize("runs", [2, 3])
def test_loop_coder(tmp_path: Path, runs: int) -> None:
    config = {"architectures": ["IQuestLoopCoderForCausalLM"], "model_type": "iquestloopcoder"}
    config |= {"hidden_size": DIM, "num_attention_heads": HEADS, "num_key_value_heads": 2}
    config |= {"intermediate_size": INNER, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    config |= {"head_dim": WIDTH, "max_position_embeddings": 128, "rope_theta": 10000.0}
    config |= {"rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    config |= {"loop_num": runs, "loop_window_size": WINDOW}
    shapes: Shapes = {"model.embed_tokens.weight": (VOCAB, DIM), "model.norm.weight": (DIM,)}
    shapes["lm_head.weight"] = (VOCAB, DIM)
    for i in range(LAYERS):
        at, gate = f"model.layers.{i}.", f"model.gate_projections.{i}."
        shapes |= {f"{at}{n}_layernorm.weight": (DIM,) for n in ("input", "post_attention")}
        for name, rows in (("q", DIM), ("k", 2 * WIDTH), ("v", 2 * WIDTH), ("o", DIM)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, DIM)
        shapes |= {f"{at}mlp.{n}_proj.weight": (INNER, DIM) for n in ("gate", "up")}
        shapes[at + "mlp.down_proj.weight"] = (DIM, INNER)
        shapes |= {gate + "weight": (HEADS, WIDTH), gate + "bias": (HEADS,)}
    w = checkpoint(tmp_path, config, shapes)

    def read(i: int, x: Tensor, of_first: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
        q, k, v = heads(w, f"model.layers.{i}.self_attn.", x, WIDTH)
        q, k = rotated(q), rotated(k)
        if i not in of_first:
            of_first[i] = k, v
            return attention(q, k, v, WIDTH**-0.5)
        places = torch.arange(len(x))
        far = attention(q, *of_first[i], WIDTH**-0.5)
        near = attention(q, k, v, WIDTH**-0.5, places[:, None] - places < WINDOW)
        gate = f"model.gate_projections.{i}."
        opened = torch.sigmoid(torch.einsum("thc,hc->th", q, w[gate + "weight"]) + w[gate + "bias"])
        share = opened.repeat_interleave(WIDTH, 1)
        return share * far + (1 - share) * near

    def reference(ids: list[int]) -> Tensor:
        x, of_first = w["model.embed_tokens.weight"][ids], {}
        for i in [*range(LAYERS)] * runs:
            at = f"model.layers.{i}."
            mixed = read(i, rms(x, w[at + "input_layernorm.weight"]), of_first)
            x = x + F.linear(mixed, w[at + "self_attn.o_proj.weight"])
            x = x + swiglu(w, at + "mlp.", rms(x, w[at + "post_attention_layernorm.weight"]))
        return F.linear(rms(x, w["model.norm.weight"]), w["lm_head.weight"])

    check(tmp_path, reference)
