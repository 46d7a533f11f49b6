"""Jet-Nemotron against its mathematics in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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

DIM, WIDTH, KEYS, VALUES, HEADS, RANK, TAPS = 64, 16, 12, 16, 3, 12, 3
KINDS = ["jet", "swa", "attn", "jet"]
CONFIG: dict[str, Any] = {
    "architectures": ["JetNemotronForCausalLM"],
    "model_type": "jet_nemotron",
    "hidden_size": DIM,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "layer_types": KINDS,
    "efficient_attention_config": {
        "jet": {
            "mode": "chunk",
            "conv_size": TAPS,
            "dconv_generator_reduction": 4,
            "expand_v": 1.3333333334,
            "head_dim": KEYS,
            "num_heads": HEADS,
            "norm_eps": "1e-5",
        },
        "swa": {"window_size": 5},
    },
}


def _layer(kind: str) -> Shapes:
    rows = {"q": DIM, "k": 2 * WIDTH, "v": 2 * WIDTH}
    if kind != "jet":
        shapes: Shapes = {f"{one}_proj.weight": (n, DIM) for one, n in rows.items()}
        shapes |= {f"{one}_proj.bias": (n,) for one, n in rows.items()}
        return shapes | {"o_proj.weight": (DIM, DIM)}
    keys, values = HEADS * KEYS, HEADS * VALUES
    rows = {"q": keys, "k": keys, "v": values, "g": values, "a": HEADS, "b": HEADS}
    generator = "dynamic_conv1d.kernel_generator."
    return {
        **{f"{one}_proj.weight": (n, DIM) for one, n in rows.items()},
        "o_proj.weight": (DIM, values),
        "A_log": (HEADS,),
        "dt_bias": (HEADS,),
        "o_norm.weight": (VALUES,),
        generator + "w1.weight": (RANK, DIM),
        generator + "w2.weight": (values * TAPS, RANK),
        generator + "w2.bias": (values * TAPS,),
    }


def _attend(w: Weights, at: str, x: Tensor, span: int) -> Tensor:
    qkv = (F.linear(x, w[f"{at}{p}_proj.weight"], w[f"{at}{p}_proj.bias"]) for p in "qkv")
    q, k, v = (one.unflatten(-1, (-1, WIDTH)) for one in qkv)
    places = torch.arange(len(x))
    mask = places[:, None] - places < span if span else None
    read = attention(rotated(q), rotated(k), v, WIDTH**-0.5, mask)
    return F.linear(read, w[at + "o_proj.weight"])


def _values(w: Weights, at: str, x: Tensor) -> Tensor:
    """Each channel's own sum of the last tokens."""
    made, generator = F.linear(x, w[at + "v_proj.weight"]), at + "dynamic_conv1d.kernel_generator."
    opened = F.silu(F.linear(x, w[generator + "w1.weight"]))
    taps = F.linear(opened, w[generator + "w2.weight"], w[generator + "w2.bias"])
    taps, padded = taps.unflatten(-1, (-1, TAPS)), F.pad(made, (0, 0, TAPS - 1, 0))
    rows = [sum(taps[t, :, n] * padded[t + n] for n in range(TAPS)) for t in range(len(x))]
    return F.silu(torch.stack(rows)).unflatten(-1, (HEADS, VALUES))


def _jet(w: Weights, at: str, x: Tensor) -> Tensor:
    """The state token by token."""
    q, k = (F.silu(one) for one in heads(w, at, x, KEYS)[:2])
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    v, beta = _values(w, at, x), F.linear(x, w[at + "b_proj.weight"]).sigmoid()
    step = F.softplus(F.linear(x, w[at + "a_proj.weight"]) + w[at + "dt_bias"])
    kept = torch.exp(-w[at + "A_log"].exp() * step)
    state, rows = torch.zeros(HEADS, KEYS, VALUES), []
    for t in range(len(x)):
        state = state * kept[t][:, None, None]
        wrong = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * wrong)
        rows.append(torch.einsum("hkv,hk->hv", state, q[t] * KEYS**-0.5))
    gate = F.linear(x, w[at + "g_proj.weight"]).unflatten(-1, (HEADS, VALUES))
    out = rms(torch.stack(rows), w[at + "o_norm.weight"]) * F.silu(gate)
    return F.linear(out.flatten(1), w[at + "o_proj.weight"])


def test_jet_nemotron(tmp_path: Path) -> None:
    shapes = end_shapes(100, DIM, has_head=False)
    for i, kind in enumerate(KINDS):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{name}": shape for name, shape in _layer(kind).items()}
        shapes |= block_shapes(at, DIM, 48)
    w = checkpoint(tmp_path, CONFIG, shapes)

    def reference(ids: list[int]) -> Tensor:
        x = w["model.embed_tokens.weight"][ids]
        for i, kind in enumerate(KINDS):
            at = f"model.layers.{i}."
            h, inside = rms(x, w[at + "input_layernorm.weight"]), at + "self_attn."
            attends = kind != "jet"
            span = 5 if kind == "swa" else 0
            x = x + (_attend(w, inside, h, span) if attends else _jet(w, inside, h))
            x = x + swiglu(w, at + "mlp.", rms(x, w[at + "post_attention_layernorm.weight"]))
        return F.linear(rms(x, w["model.norm.weight"]), w["model.embed_tokens.weight"])

    check(tmp_path, reference)
