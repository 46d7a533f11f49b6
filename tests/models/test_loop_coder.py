"""Models whose layers run again, IQuest LoopCoder and Nanbeige, against plain torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.fakes.tiny_checkpoint import write_tokenizer
from tests.models.reference_math import (
    Shapes,
    attention,
    block_shapes,
    check,
    checkpoint,
    end_shapes,
    heads,
    rms,
    rotated,
    swiglu,
)
from tests.models.test_pooling import engine
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
    shapes = end_shapes(VOCAB, DIM)
    for i in range(LAYERS):
        at, gate = f"model.layers.{i}.", f"model.gate_projections.{i}."
        shapes |= block_shapes(at, DIM, INNER)
        for name, rows in (("q", DIM), ("k", 2 * WIDTH), ("v", 2 * WIDTH), ("o", DIM)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, DIM)
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


def _nanbeige(
    folder: Path, head: str, rows: int, **changes: object
) -> Callable[[list[int]], Tensor]:
    """Save a tiny Nanbeige with a ``head`` of so many rows; returns its computation."""
    config: dict[str, object] = {"model_type": "nanbeige", "num_loops": 2}
    config |= {"hidden_size": DIM, "num_attention_heads": 6, "num_key_value_heads": 2}
    config |= {"intermediate_size": INNER, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    config |= {"head_dim": WIDTH, "max_position_embeddings": 128, "rope_theta": 10000.0}
    config |= {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "loop_loss_weights": []}
    shapes: Shapes = {"model.embed_tokens.weight": (VOCAB, DIM), "model.norm.weight": (DIM,)}
    shapes[head] = (rows, DIM)
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        shapes |= block_shapes(at, DIM, INNER)
        for name, count in (("q", 6), ("k", 2), ("v", 2)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (count * WIDTH, DIM)
        shapes[at + "self_attn.o_proj.weight"] = (DIM, 6 * WIDTH)
    w = checkpoint(folder, config | changes, shapes)

    def reference(ids: list[int]) -> Tensor:
        x = w["model.embed_tokens.weight"][ids]
        for run in range(2):
            for i in range(LAYERS):
                at = f"model.layers.{i}."
                h = rms(x, w[at + "input_layernorm.weight"])
                q, k, v = heads(w, at + "self_attn.", h, WIDTH)
                read = attention(rotated(q), rotated(k), v, WIDTH**-0.5)
                x = x + F.linear(read, w[at + "self_attn.o_proj.weight"])
                h = rms(x, w[at + "post_attention_layernorm.weight"])
                x = x + swiglu(w, at + "mlp.", h)
            if run == 1 or not changes.get("skip_loop_final_norm"):
                x = rms(x, w["model.norm.weight"])
        return F.linear(x, w[head])

    return reference


@pytest.mark.parametrize("skips_norm", [False, True])
def test_nanbeige(tmp_path: Path, skips_norm: bool) -> None:
    changes = {"architectures": ["NanbeigeForCausalLM"], "skip_loop_final_norm": skips_norm}
    check(tmp_path, _nanbeige(tmp_path, "lm_head.weight", VOCAB, **changes))


def test_nanbeige_as_a_classifier(tmp_path: Path) -> None:
    name = "NanbeigeForSequenceClassification"
    reference = _nanbeige(tmp_path, "score.weight", 3, architectures=[name], num_labels=3)
    write_tokenizer(tmp_path)
    text = list(range(3, 50))
    with engine(tmp_path) as served:
        got = served.encode(input_ids=text)["embedding"]
    assert got == pytest.approx(reference(text)[-1].tolist(), abs=1e-4)
