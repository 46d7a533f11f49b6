"""MiniCPM-SALA against its mathematics in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.models.reference_math import (
    Shapes,
    Weights,
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
from torch import Tensor

from radixlm.arch.hf import describe
from radixlm.base.errors import CheckpointError

DIM, WIDTH, HEADS, LINEAR_HEADS, LINEAR_WIDTH = 64, 16, 4, 3, 12
KINDS = ["minicpm4", "lightning-attn", "lightning-attn", "minicpm4"]
CONFIG: dict[str, Any] = {
    "architectures": ["MiniCPMSALAForCausalLM"],
    "model_type": "minicpm_sala",
    "hidden_size": DIM,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": WIDTH,
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 16,
    "mixer_types": KINDS,
    "attn_use_rope": False,
    "attn_use_output_gate": True,
    "lightning_nh": LINEAR_HEADS,
    "lightning_nkv": LINEAR_HEADS,
    "lightning_head_dim": LINEAR_WIDTH,
    "lightning_scale": "1/sqrt(d)",
    "lightning_use_rope": True,
    "qk_norm": True,
    "use_output_gate": True,
    "use_output_norm": True,
}


def _layer(kind: str) -> Shapes:
    inner = LINEAR_HEADS * LINEAR_WIDTH
    rows = {"q": inner, "k": inner, "v": inner, "z": inner}
    if kind == "minicpm4":
        shapes: Shapes = {"q_proj.weight": (DIM, DIM), "o_gate.weight": (DIM, DIM)}
        shapes |= {f"{one}_proj.weight": (2 * WIDTH, DIM) for one in "kv"}
        return shapes | {"o_proj.weight": (DIM, DIM)}
    return {
        **{f"{one}_proj.weight": (n, DIM) for one, n in rows.items()},
        "q_norm.weight": (LINEAR_WIDTH,),
        "k_norm.weight": (LINEAR_WIDTH,),
        "o_norm.weight": (inner,),
        "o_proj.weight": (DIM, inner),
    }


def _shapes() -> Shapes:
    shapes = end_shapes(100, DIM)
    for i, kind in enumerate(KINDS):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{name}": shape for name, shape in _layer(kind).items()}
        shapes |= block_shapes(at, DIM, 48)
    return shapes


def _attend(w: Weights, at: str, x: Tensor) -> Tensor:
    read = attention(*heads(w, at, x, WIDTH), WIDTH**-0.5)
    return F.linear(
        read * torch.sigmoid(F.linear(x, w[at + "o_gate.weight"])), w[at + "o_proj.weight"]
    )


def _lightning(w: Weights, at: str, x: Tensor) -> Tensor:
    """The sum over earlier tokens, each with its decay, written out."""
    q, k, v = heads(w, at, x, LINEAR_WIDTH)
    q, k = (rotated(rms(t, w[f"{at}{n}_norm.weight"])) for t, n in ((q, "q"), (k, "k")))
    slopes = torch.tensor([2**-4, 2**-8, 2**-2])  # of two heads, then the first of four
    ages = torch.arange(len(x))[:, None] - torch.arange(len(x))
    kept = torch.exp(-slopes[:, None, None] * ages).tril()
    scores = torch.einsum("qhd,khd->hqk", q, k) * LINEAR_WIDTH**-0.5 * kept
    read = torch.einsum("hqk,khd->qhd", scores, v).flatten(1)
    gate = torch.sigmoid(F.linear(x, w[at + "z_proj.weight"]))
    return F.linear(rms(read, w[at + "o_norm.weight"]) * gate, w[at + "o_proj.weight"])


def test_layers_of_both_kinds(tmp_path: Path) -> None:
    w = checkpoint(tmp_path, CONFIG, _shapes())

    def reference(ids: list[int]) -> Tensor:
        x, branch = w["model.embed_tokens.weight"][torch.tensor(ids)] * 12, 1.4 / 4**0.5
        for i, kind in enumerate(KINDS):
            at = f"model.layers.{i}."
            h = rms(x, w[at + "input_layernorm.weight"])
            mix = _attend if kind == "minicpm4" else _lightning
            x = x + mix(w, at + "self_attn.", h) * branch
            h = rms(x, w[at + "post_attention_layernorm.weight"])
            x = x + swiglu(w, at + "mlp.", h) * branch
        out = rms(x, w["model.norm.weight"]) / (DIM / 16)
        return F.linear(out, w["lm_head.weight"])

    check(tmp_path, reference)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mixer_types", ["minicpm4"]),
        ("mixer_types", ["mamba"] * 4),
        ("lightning_nkv", 1),
        ("lightning_scale", "1/d"),
        ("use_output_norm", False),
    ],
)
def test_what_no_record_describes_is_refused(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=f"'{key}'"):
        describe(CONFIG | {key: value})
