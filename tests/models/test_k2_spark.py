"""K2 Horizon, xLLM and Spark 2.5 against their mathematics in plain torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.models.reference_math import (
    Shapes,
    Weights,
    attention,
    check,
    checkpoint,
    rms,
    rotated,
    routed,
    swiglu,
)
from torch import Tensor

from radixlm.arch.hf import describe
from radixlm.base.errors import CheckpointError

DIM, HEADS, KV_HEADS, WIDTH, INNER, VOCAB, LAYERS = 48, 4, 2, 16, 40, 100, 4
BASE: dict[str, Any] = {
    "hidden_size": DIM,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": WIDTH,
    "num_hidden_layers": LAYERS,
    "intermediate_size": INNER,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
NORMS = ("input_layernorm", "post_attention_layernorm")


def _mlp(at: str, inner: int = INNER) -> Shapes:
    rows: Shapes = {f"{at}{one}_proj.weight": (inner, DIM) for one in ("gate", "up")}
    return rows | {f"{at}down_proj.weight": (DIM, inner)}


def _linear(w: Weights, at: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{at}.weight"], w.get(f"{at}.bias"))


def _window(count: int, size: int) -> Tensor:
    places = torch.arange(count)
    return places > places[:, None] - size


@pytest.mark.parametrize("act", ["sigmoid", "silu", ""])
def test_spark_2_5(tmp_path: Path, act: str) -> None:
    ropes = {
        "full_attention": {"rope_theta": 5000.0, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_theta": 300.0},
    }
    config = {**BASE, "architectures": ["Spark2_5ForCausalLM"], "model_type": "spark2_5"}
    config |= {"hidden_act": "gelu", "sliding_window": 5, "rope_parameters": ropes}
    config |= {"attention_bias": True, "mlp_bias": act == "silu"}
    config |= {"headwise_attn_output_gate": bool(act)}
    config |= {"gate_attn_act_mode": act} if act else {}
    shapes: Shapes = {"model.embedding.weight": (VOCAB, DIM), "model.norm.weight": (DIM,)}
    shapes["lm_head.weight"] = (VOCAB, DIM)
    rows = {"q_k_v_proj": (HEADS + 2 * KV_HEADS) * WIDTH} | ({"g_proj": HEADS} if act else {})
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        shapes |= {f"{at}{name}.weight": (DIM,) for name in NORMS} | _mlp(at + "mlp.")
        shapes |= {f"{at}self_attn.{name}.weight": (n, DIM) for name, n in rows.items()}
        shapes |= {f"{at}self_attn.{name}.bias": (n,) for name, n in rows.items()}
        shapes |= {f"{at}self_attn.out_proj.weight": (DIM, HEADS * WIDTH)}
        shapes |= {f"{at}self_attn.out_proj.bias": (DIM,)}
        if act == "silu":
            sizes = {"gate": INNER, "up": INNER, "down": DIM}
            shapes |= {f"{at}mlp.{name}_proj.bias": (n,) for name, n in sizes.items()}
    w = checkpoint(tmp_path, config, shapes)

    def read(at: str, x: Tensor, is_full: bool) -> Tensor:
        parts = _linear(w, at + "q_k_v_proj", x).unflatten(-1, (-1, WIDTH))
        q, k, v = parts.split((HEADS, KV_HEADS, KV_HEADS), 1)
        if is_full:
            q, k = (torch.cat((rotated(t[..., :4], 5000.0), t[..., 4:]), -1) for t in (q, k))
        else:
            q, k = rotated(q, 300.0), rotated(k, 300.0)
        mask = None if is_full else _window(len(x), 5)
        out = attention(q, k, v, WIDTH**-0.5, mask).unflatten(-1, (HEADS, WIDTH))
        if act:
            gate = _linear(w, at + "g_proj", x)[..., None]
            out = out * (F.silu(gate) if act == "silu" else torch.sigmoid(gate))
        return _linear(w, at + "out_proj", out.flatten(1))

    def reference(ids: list[int]) -> Tensor:
        x = w["model.embedding.weight"][ids]
        for i in range(LAYERS):
            at = f"model.layers.{i}."
            h = rms(x, w[at + NORMS[0] + ".weight"])
            x = x + read(at + "self_attn.", h, i == 3)
            h = rms(x, w[at + NORMS[1] + ".weight"])
            opened = F.gelu(_linear(w, at + "mlp.gate_proj", h)) * _linear(w, at + "mlp.up_proj", h)
            x = x + _linear(w, at + "mlp.down_proj", opened)
        return _linear(w, "lm_head", rms(x, w["model.norm.weight"]))

    check(tmp_path, reference)


# the architecture, keys of config.json, channels that rotate
HORIZON: dict[str, tuple[str, dict[str, Any], int]] = {
    "dense": (
        "K2HorizonForCausalLM",
        {"num_experts": 0, "mlp_only_layers": list(range(LAYERS)), "query_key_norm": False},
        WIDTH,
    ),
    "gated": (
        "K2HorizonForCausalLM",
        {"attention_gate_func": "softplus", "num_experts": 6, "num_experts_per_tok": 2}
        | {"mlp_only_layers": [0], "moe_gate_bias": True, "router_score_func": "sigmoid"}
        | {"norm_topk_prob": True, "router_scaling_factor": 2.5, "num_shared_experts": 2}
        | {"moe_intermediate_size": 24, "use_sliding_window": True, "sliding_window": 7},
        8,
    ),
    "xllm": (
        "XllmForCausalLM",
        {"apply_attn_gate": True, "num_experts": 6, "num_experts_per_tok": 3}
        | {"decoder_sparse_step": 2, "norm_topk_prob": False, "moe_intermediate_size": 24}
        | {"attention_bias": True},
        4,
    ),
}


def _horizon_shapes(keys: dict[str, Any], is_normed: bool, gate: str) -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (VOCAB, DIM), "model.norm.weight": (DIM,)}
    shapes["lm_head.weight"] = (VOCAB, DIM)
    rows = {"q": HEADS * WIDTH, "k": KV_HEADS * WIDTH, "v": KV_HEADS * WIDTH}
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        part = at + "self_attn."
        shapes |= {f"{at}{name}.weight": (DIM,) for name in NORMS}
        shapes |= {f"{part}{name}_proj.weight": (n, DIM) for name, n in rows.items()}
        shapes[part + "o_proj.weight"] = (DIM, HEADS * WIDTH)
        if keys.get("attention_bias"):
            shapes |= {f"{part}{name}_proj.bias": (n,) for name, n in {**rows, "o": DIM}.items()}
        if gate:
            shapes[part + "gate_proj.weight"] = (HEADS * WIDTH, DIM)
        if is_normed:
            shapes |= {f"{part}{name}_norm.weight": (rows[name],) for name in "qk"}
        if not _is_sparse(keys, i):
            shapes |= _mlp(at + "mlp.")
            continue
        shapes[at + "mlp.gate.weight"] = (keys["num_experts"], DIM)
        if keys.get("moe_gate_bias"):
            shapes[at + "mlp.gate.bias"] = (keys["num_experts"],)
        for e in range(keys["num_experts"]):
            shapes |= _mlp(f"{at}mlp.experts.{e}.", 24)
        if keys.get("num_shared_experts"):
            shapes |= _mlp(at + "mlp.shared_experts.", 48)
    return shapes


def _is_sparse(keys: dict[str, Any], i: int) -> bool:
    is_listed = i in keys.get("mlp_only_layers", [])
    return not is_listed and not (i + 1) % keys.get("decoder_sparse_step", 1)


def _pairs_rotated(x: Tensor, turned: int) -> Tensor:
    """Of the pairs (i, i + WIDTH / 2) the first ``turned`` / 2."""
    a, b = (half[..., : turned // 2] for half in x.chunk(2, -1))
    a2, b2 = rotated(torch.cat((a, b), -1), 700.0).chunk(2, -1)
    left, right = (half[..., turned // 2 :] for half in x.chunk(2, -1))
    return torch.cat((a2, left, b2, right), -1)


def _experts(w: Weights, at: str, x: Tensor, keys: dict[str, Any]) -> Tensor:
    scores = torch.sigmoid(_linear({f"{at}gate.weight": w[at + "gate.weight"]}, at + "gate", x))
    favored = scores + w.get(at + "gate.bias", torch.zeros(()))
    chosen = favored.topk(keys["num_experts_per_tok"], -1).indices
    weights = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
    out = routed(
        x,
        weights,
        keys["num_experts_per_tok"],
        keys["norm_topk_prob"],
        lambda e, row: swiglu(w, f"{at}experts.{e}.", row),
    )
    out = out * keys.get("router_scaling_factor", 1.0)
    shared = keys.get("num_shared_experts")
    return out + swiglu(w, at + "shared_experts.", x) if shared else out


@pytest.mark.parametrize("case", HORIZON)
def test_k2_horizon(tmp_path: Path, case: str) -> None:
    architecture, keys, turned = HORIZON[case]
    is_published = architecture.startswith("K2")
    gate = keys.get("attention_gate_func") or ("silu" if keys.get("apply_attn_gate") else "")
    is_normed = is_published and keys.get("query_key_norm", True)
    config = {**BASE, "architectures": [architecture], "rope_theta": 700.0, **keys}
    config |= {"model_type": "k2_horizon" if is_published else "xllm"}
    config |= {"rope_head_dim": turned} if turned < WIDTH else {}
    w = checkpoint(tmp_path, config, _horizon_shapes(keys, is_normed, gate))

    def read(at: str, x: Tensor) -> Tensor:
        q, k, v = (_linear(w, f"{at}{one}_proj", x).unflatten(-1, (-1, WIDTH)) for one in "qkv")
        if is_normed:
            pairs = ((q, "q"), (k, "k"))
            q, k = (rms(t, w[f"{at}{n}_norm.weight"].view(-1, WIDTH)) for t, n in pairs)
        q, k = _pairs_rotated(q, turned), _pairs_rotated(k, turned)
        size = keys.get("sliding_window") or len(x)
        out = attention(q, k, v, WIDTH**-0.5, _window(len(x), size))
        if gate:
            raw = _linear(w, at + "gate_proj", x)
            out = out * (F.silu(raw) if gate == "silu" else F.softplus(raw, beta=math.log(2)))
        return _linear(w, at + "o_proj", out)

    def reference(ids: list[int]) -> Tensor:
        x = w["model.embed_tokens.weight"][ids]
        for i in range(LAYERS):
            at = f"model.layers.{i}."
            x = x + read(at + "self_attn.", rms(x, w[at + NORMS[0] + ".weight"]))
            h = rms(x, w[at + NORMS[1] + ".weight"])
            is_sparse = keys["num_experts"] and _is_sparse(keys, i)
            feed = _experts(w, at + "mlp.", h, keys) if is_sparse else swiglu(w, at + "mlp.", h)
            x = x + feed
        return _linear(w, "lm_head", rms(x, w["model.norm.weight"]))

    check(tmp_path, reference)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mova_num_experts", 64),
        ("layernorm_num_groups", 4),
        ("rope_head_dim", 17),
        ("attention_gate_func", "tanh"),
    ],
)
def test_what_is_not_described_is_refused_by_name(key: str, value: object) -> None:
    config = {**BASE, "architectures": ["K2HorizonForCausalLM"], "num_experts": 0, key: value}
    with pytest.raises(CheckpointError, match=key):
        describe(config)
