"""Motif against its mathematics in plain torch."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.models.reference_math import (
    Weights,
    attention,
    block_shapes,
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

DIM, WIDTH, INNER, VOCAB, KV_HEADS = 96, 16, 48, 100, 4
LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


class Motif:
    """`ratio` heads share one that is subtracted from them."""

    def __init__(self, weights: Weights, ratio: int) -> None:
        self.w, self.ratio = weights, ratio

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.w[name + ".weight"], self.w.get(name + ".bias"))

    def _read(self, i: int, at: str, x: Tensor) -> Tensor:
        w, ratio = self.w, self.ratio
        q, k, v = heads(w, at, x, WIDTH)
        q = rotated(q).unflatten(1, (-1, ratio + 1))
        k = rotated(k).unflatten(1, (-1, 2))
        v = v.reshape(len(x), -1, 2 * WIDTH)
        signal = attention(q[:, :, :ratio].flatten(1, 2), k[:, :, 0], v, WIDTH**-0.5)
        noise = attention(q[:, :, ratio], k[:, :, 1], v, WIDTH**-0.5)
        first = 0.8 - 0.6 * math.exp(-0.3 * (i - 1))
        q1, k1, q2, k2 = (w[at + name] for name in LAMBDAS)
        share = torch.exp(q1 @ k1) - torch.exp(q2 @ k2) + first
        of_heads = noise.unflatten(1, (-1, 2 * WIDTH)).repeat_interleave(ratio, 1)
        left = signal.unflatten(1, (-1, 2 * WIDTH)) - share * of_heads
        out = rms(left, w[at + "subln.weight"], 1e-3) * (1 - first)
        return self._linear(out.flatten(1), at + "o_proj")

    def _opened(self, at: str, x: Tensor) -> Tensor:
        weights, bias = self.w[at + "weight"], self.w[at + "bias"]
        powers = (x**3, x**2, x)
        return (
            sum(a * rms(p, torch.ones(1), 1e-6) for a, p in zip(weights, powers, strict=True))
            + bias
        )

    def __call__(self, ids: list[int]) -> Tensor:
        x = self.w["model.embed_tokens.weight"][ids]
        for i in range(3):
            at = f"model.layers.{i}."
            before, after = (
                self.w[f"{at}{n}_layernorm.weight"] for n in ("input", "post_attention")
            )
            x = x + self._read(i, at + "self_attn.", rms(x, before))
            h = rms(x, after)
            gate, up = (self._linear(h, f"{at}mlp.{n}_proj") for n in ("gate", "up"))
            x = x + self._linear(self._opened(at + "mlp.act_fn.", gate) * up, at + "mlp.down_proj")
        return self._linear(rms(x, self.w["model.norm.weight"]), "lm_head")


@pytest.mark.parametrize("noise_heads", [None, 2])
def test_motif(tmp_path: Path, noise_heads: int | None) -> None:
    count = 8 if noise_heads is None else 6
    ratio = 1 if noise_heads is None else 2
    config = {"architectures": ["MotifForCausalLM"], "model_type": "motif", "rms_norm_eps": 1e-5}
    config |= {"hidden_size": DIM, "num_attention_heads": count, "num_key_value_heads": KV_HEADS}
    config |= {"intermediate_size": INNER, "num_hidden_layers": 3, "vocab_size": VOCAB}
    config |= {"head_dim": WIDTH, "max_position_embeddings": 128, "rope_theta": 10000.0}
    config |= {"hidden_act": "poly_norm", "attn_rms_norm_eps": 1e-3}
    config |= {"tie_word_embeddings": False, "num_noise_heads": noise_heads}
    shapes = end_shapes(VOCAB, DIM)
    joined = 2 * WIDTH * (count - (noise_heads or count // 2))
    for i in range(3):
        at = f"model.layers.{i}."
        shapes |= block_shapes(at, DIM, INNER)
        for name, heads_of in (("q", count), ("k", KV_HEADS), ("v", KV_HEADS)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (heads_of * WIDTH, DIM)
        shapes[at + "self_attn.o_proj.weight"] = (DIM, joined)
        shapes |= {f"{at}self_attn.{name}": (WIDTH,) for name in LAMBDAS}
        shapes[at + "self_attn.subln.weight"] = (2 * WIDTH,)
        shapes |= {f"{at}mlp.act_fn.weight": (3,), f"{at}mlp.act_fn.bias": (1,)}
    check(tmp_path, Motif(checkpoint(tmp_path, config, shapes), ratio))


@pytest.mark.parametrize(
    ("heads_of", "kv_heads", "noise"), [(6, 3, 3), (6, 3, 2), (6, 6, 2), (6, 4, 4)]
)
def test_heads_that_do_not_pair_are_refused(heads_of: int, kv_heads: int, noise: int) -> None:
    config = {"architectures": ["MotifForCausalLM"], "num_attention_heads": heads_of}
    config |= {"hidden_size": DIM, "num_key_value_heads": kv_heads, "num_noise_heads": noise}
    config |= {"intermediate_size": INNER, "num_hidden_layers": 1, "vocab_size": VOCAB}
    with pytest.raises(CheckpointError, match="does not fit"):
        describe(config)
