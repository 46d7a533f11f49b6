"""Grok 1, which has no class in transformers, against its mathematics written out."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.models.test_decoder import relative_error
from torch import Tensor

DIM, HEADS, KV_HEADS, INNER, EXPERTS, LAYERS, VOCAB = 64, 4, 2, 48, 4, 2, 100
CONFIG = {
    "architectures": ["Grok1ForCausalLM"],
    "hidden_size": DIM,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": INNER,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attn_output_multiplier": 0.25,
    "embedding_multiplier_scale": 5.0,
    "output_multiplier_scale": 0.6,
}
NORMS = ("pre_attn_norm", "post_attn_norm", "pre_moe_norm", "post_moe_norm")


def _checkpoint(folder: Path) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.15

    w = {"model.embed_tokens.weight": random(VOCAB, DIM), "lm_head.weight": random(VOCAB, DIM)}
    w["model.norm.weight"] = 1 + random(DIM)
    kv = DIM * KV_HEADS // HEADS
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        w |= {f"{at}{norm}.weight": 1 + random(DIM) for norm in NORMS}
        for part, rows in (("q", DIM), ("k", kv), ("v", kv), ("o", DIM)):
            w[f"{at}self_attn.{part}_proj.weight"] = random(rows, DIM)
        w[f"{at}block_sparse_moe.gate.weight"] = random(EXPERTS, DIM)
        for expert in range(EXPERTS):
            one = f"{at}block_sparse_moe.experts.{expert}."
            w[one + "w1.weight"], w[one + "w3.weight"] = random(INNER, DIM), random(INNER, DIM)
            w[one + "w2.weight"] = random(DIM, INNER)
    save_file(w, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return w


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def _turned(x_THD: Tensor) -> Tensor:
    half = x_THD.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half) / half)
    angles = (torch.arange(len(x_THD))[:, None] * frequencies)[:, None]
    a, b = x_THD.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def _attention(w: dict[str, Tensor], at: str, x: Tensor) -> Tensor:
    q, k, v = (
        F.linear(x, w[f"{at}self_attn.{part}_proj.weight"]).unflatten(-1, (-1, DIM // HEADS))
        for part in "qkv"
    )
    q, k = _turned(q), _turned(k)
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
    scores = 30 * torch.tanh(torch.einsum("qhd,khd->hqk", q, k) * 0.25 / 30)
    ahead = torch.ones(len(x), len(x)).triu(1).bool()
    shares = scores.masked_fill(ahead, -torch.inf).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", shares, v).flatten(1)
    return F.linear(out, w[f"{at}self_attn.o_proj.weight"])


def _experts(w: dict[str, Tensor], at: str, x: Tensor) -> Tensor:
    logits = 30 * torch.tanh(F.linear(x, w[f"{at}block_sparse_moe.gate.weight"]) / 30)
    weights, chosen = logits.softmax(-1).topk(2, -1)
    y = torch.zeros_like(x)
    for token in range(len(x)):
        for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            one = f"{at}block_sparse_moe.experts.{expert}."
            gate = F.gelu(w[one + "w1.weight"] @ x[token], approximate="tanh")
            y[token] += weight * (w[one + "w2.weight"] @ (gate * (w[one + "w3.weight"] @ x[token])))
    return y


def _logits(w: dict[str, Tensor], ids: list[int]) -> Tensor:
    x = w["model.embed_tokens.weight"][ids] * 5.0
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        norms = [w[f"{at}{name}.weight"] for name in NORMS]
        x = x + _norm(_attention(w, at, _norm(x, norms[0])), norms[1])
        x = x + _norm(_experts(w, at, _norm(x, norms[2])), norms[3])
    return F.linear(_norm(x, w["model.norm.weight"]), w["lm_head.weight"]) * 0.6


def test_logits_equal_the_mathematics(tmp_path: Path) -> None:
    weights = _checkpoint(tmp_path)
    ids = torch.randint(0, VOCAB, (23,), generator=torch.Generator().manual_seed(1)).tolist()
    ours = PagedRunner(load_model(tmp_path)).prefill({0: ids}, num_chunks=3)[0]
    assert relative_error(ours, _logits(weights, ids)) < 1e-5
