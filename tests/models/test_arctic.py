"""Arctic against its mathematics in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from tests.models.reference_math import (
    Shapes,
    Weights,
    attention,
    check,
    checkpoint,
    heads,
    rms,
    rotated,
    routed,
)
from torch import Tensor

DIM, WIDTH, INNER, VOCAB, EXPERTS, LAYERS = 64, 16, 48, 100, 5, 4
BASE: dict[str, Any] = {
    "architectures": ["ArcticForCausalLM"],
    "model_type": "arctic",
    "hidden_size": DIM,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": LAYERS,
    "intermediate_size": INNER,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def _mlp(at: str, inner: int) -> Shapes:
    shapes: Shapes = {f"{at}w1.weight": (inner, DIM), f"{at}w3.weight": (inner, DIM)}
    return shapes | {f"{at}w2.weight": (DIM, inner)}


def _layer(i: int, every: int, has_both: bool) -> Shapes:
    at, kv = f"model.layers.{i}.", 2 * WIDTH
    shapes: Shapes = {f"{at}{n}_layernorm.weight": (DIM,) for n in ("input", "post_attention")}
    for name, rows in (("q", DIM), ("k", kv), ("v", kv), ("o", DIM)):
        shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, DIM)
    moe = at + "block_sparse_moe."
    if (i + 1) % every:
        return shapes | _mlp(moe + "mlp.", INNER)
    shapes[moe + "gate.weight"] = (EXPERTS, DIM)
    for e in range(EXPERTS):
        shapes |= _mlp(f"{moe}experts.{e}.", INNER)
    if has_both:
        shapes |= _mlp(at + "residual_mlp.", DIM)
        shapes[at + "residual_layernorm.weight"] = (DIM,)
    return shapes


def _fed(w: Weights, at: str, x: Tensor) -> Tensor:
    gate, up = (F.linear(x, w[f"{at}{n}.weight"]) for n in ("w1", "w3"))
    return F.linear(F.silu(gate) * up, w[f"{at}w2.weight"])


class Arctic:
    def __init__(self, weights: Weights, every: int, has_both: bool) -> None:
        self.w, self.every, self.has_both = weights, every, has_both

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return rms(x, self.w[name + ".weight"])

    def _attended(self, at: str, x: Tensor) -> Tensor:
        q, k, v = heads(self.w, at, x, WIDTH)
        read = attention(rotated(q), rotated(k), v, WIDTH**-0.5)
        return F.linear(read, self.w[at + "o_proj.weight"])

    def _routed(self, at: str, x: Tensor) -> Tensor:
        shares = F.linear(x, self.w[at + "gate.weight"]).softmax(-1)
        return routed(x, shares, 2, True, lambda e, t: _fed(self.w, f"{at}experts.{e}.", t))

    def _layer(self, i: int, x: Tensor) -> Tensor:
        at = f"model.layers.{i}."
        moe, norm = at + "block_sparse_moe.", at + "post_attention_layernorm"
        y = x + self._attended(at + "self_attn.", self._normed(x, at + "input_layernorm"))
        if (i + 1) % self.every:
            return y + _fed(self.w, moe + "mlp.", self._normed(y, norm))
        if not self.has_both:
            return y + self._routed(moe, self._normed(y, norm))
        beside = _fed(self.w, at + "residual_mlp.", self._normed(y, at + "residual_layernorm"))
        return y + beside + self._routed(moe, self._normed(x, norm))

    def __call__(self, ids: list[int]) -> Tensor:
        x = self.w["model.embed_tokens.weight"][ids]
        for i in range(LAYERS):
            x = self._layer(i, x)
        return F.linear(self._normed(x, "model.norm"), self.w["lm_head.weight"])


@pytest.mark.parametrize(("every", "has_both"), [(1, True), (2, True), (2, False)])
def test_arctic(tmp_path: Path, every: int, has_both: bool) -> None:
    shapes: Shapes = {"model.embed_tokens.weight": (VOCAB, DIM), "model.norm.weight": (DIM,)}
    shapes["lm_head.weight"] = (VOCAB, DIM)
    for i in range(LAYERS):
        shapes |= _layer(i, every, has_both)
    config = {**BASE, "moe_layer_frequency": every, "parallel_attn_mlp_res": has_both}
    check(tmp_path, Arctic(checkpoint(tmp_path, config, shapes), every, has_both))
