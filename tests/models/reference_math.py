"""Plain torch code for the mathematics of families without a class in transformers.

Legend: T tokens, D channels, H heads, C channels of a head, E experts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.models.test_decoder import relative_error
from torch import Tensor

from radixlm.kernels import cpu

Weights = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]


def checkpoint(folder: Path, config: dict[str, Any], shapes: Shapes, seed: int = 0) -> Weights:
    """Save random tensors of these shapes (vectors near one for norms) and the config."""
    generator = torch.Generator().manual_seed(seed)
    w = {}
    for name, shape in shapes.items():
        w[name] = torch.randn(*shape, generator=generator) * 0.15
        if "norm" in name and name.endswith("weight"):
            w[name] += 1
    save_file(w, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return w


def end_shapes(vocab: int, dim: int, has_head: bool = True) -> Shapes:
    """Token table, last norm and head."""
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, dim), "model.norm.weight": (dim,)}
    return shapes | ({"lm_head.weight": (vocab, dim)} if has_head else {})


def block_shapes(at: str, dim: int, inner: int) -> Shapes:
    """Two norms and a gated MLP, as Llama's layers have them beside their attention."""
    shapes: Shapes = {f"{at}{n}_layernorm.weight": (dim,) for n in ("input", "post_attention")}
    shapes |= {f"{at}mlp.{one}_proj.weight": (inner, dim) for one in ("gate", "up")}
    return shapes | {f"{at}mlp.down_proj.weight": (dim, inner)}


def rms(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotated(x_THC: Tensor, theta: float = 10000.0, stretch: float = 1.0) -> Tensor:
    """Rotary embedding of all channels, in halves."""
    half = x_THC.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half) / half) / stretch
    angles = (torch.arange(len(x_THC))[:, None] * frequencies)[:, None]
    a, b = x_THC.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def attention(
    q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, scale: float, mask: Tensor | None = None
) -> Tensor:
    """Causal attention, [T, H * C]; `mask` bool [T, T] or [H, T, T] allows pairs."""
    repeat = q_THC.shape[1] // k_TKC.shape[1]
    k, v = (t.repeat_interleave(repeat, 1) for t in (k_TKC, v_TKC))
    scores = torch.einsum("qhd,khd->hqk", q_THC, k) * scale
    seen = torch.ones(len(q_THC), len(q_THC)).tril().bool()
    seen = seen if mask is None else seen & mask
    shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", shares, v).flatten(1)


def swiglu(w: Weights, at: str, x: Tensor, down: str = "down_proj") -> Tensor:
    gate, up = (F.linear(x, w[f"{at}{one}_proj.weight"]) for one in ("gate", "up"))
    return F.linear(F.silu(gate) * up, w[f"{at}{down}.weight"])


def heads(w: Weights, at: str, x: Tensor, channels: int) -> list[Tensor]:
    """q, k, v of the layer's projections: [T, heads, C] each."""
    return [F.linear(x, w[f"{at}{p}_proj.weight"]).unflatten(-1, (-1, channels)) for p in "qkv"]


def routed(
    x: Tensor, weights_TE: Tensor, top_k: int, renorm: bool, expert: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """The weighted sum of the `top_k` best experts, token by token."""
    best, chosen = weights_TE.topk(top_k, -1)
    if renorm:
        best = best / best.sum(-1, keepdim=True)
    rows = [
        sum(b * expert(e, x[t]) for b, e in zip(best[t], chosen[t].tolist(), strict=True))
        for t in range(len(x))
    ]
    return torch.stack(rows)


def check(folder: Path, reference: Callable[[list[int]], Tensor], length: int = 41) -> None:
    """At once, in chunks, token by token and in a batch over shuffled pages; all equal the
    reference."""
    ids = torch.randint(0, 100, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    wanted = reference(ids)
    model = load_model(folder)
    backends = [("torch_native", 4)] + [("cpu", 16)] * cpu.available
    for backend, page_size in backends:
        runner = PagedRunner(model, backend, page_size)
        ours = runner.prefill({0: ids[:-3], 1: ids[:17]}, num_chunks=3)
        for place in range(-3, 0):
            ours[0] = torch.cat((ours[0], runner.step({0: [ids[place]]})[0]))
        for sequence, theirs in ((0, wanted), (1, wanted[:17])):
            assert torch.equal(ours[sequence].isinf(), theirs.isinf())
            finite = (t.masked_fill(t.isinf(), 0.0) for t in (ours[sequence], theirs))
            assert relative_error(*finite) < 1e-5
