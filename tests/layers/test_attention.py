"""The attention layer: inputs of the backend, and the gate on its output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from radixlm.arch.spec import Attention
from radixlm.base.record import replace
from radixlm.kernels.dispatch import bind
from radixlm.layers.attention import AttentionLayer
from radixlm.layers.context import LayerContext

CPU = torch.device("cpu")
SPEC = Attention(heads=2, kv_heads=1, head_dim=4, rope=None, gate="head", scale=0.5, window=3)


class Recorder:
    """A backend that returns twos."""

    def run(self, q: Tensor, k: Tensor, v: Tensor | None, site: Any) -> Tensor:
        self.q, self.k, self.v, self.site = q, k, v, site
        return torch.full((q.shape[0], site.heads * site.v_dim), 2.0)


class Batch:
    """The batch fields that the layer reads."""

    def __init__(self) -> None:
        self.attn = Recorder()
        self.fused_attn = None


def make(spec: Attention) -> tuple[AttentionLayer, Tensor, Tensor]:
    context = LayerContext(bind("cpu", {"all": "reference"}), CPU, torch.float32)
    layer = AttentionLayer(spec, 6, context, -1, (1, 7))
    generator = torch.Generator().manual_seed(0)
    weights = []
    for linear in (layer.qkv, layer.o):
        param = linear.own_params()["weight"]
        param.value = torch.randn(param.shape, generator=generator)
        weights.append(param.value)
        linear.finish()
    layer.finish()
    return layer, weights[0], weights[1]


def test_gate_rows_follow_each_head_and_multiply_its_output() -> None:
    layer, qkv, o = make(SPEC)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    batch: Any = Batch()
    out = layer.run(x, batch, [])
    rows = x @ qkv.T
    torch.testing.assert_close(batch.attn.q[:, 0], rows[:, 0:4])
    torch.testing.assert_close(batch.attn.q[:, 1], rows[:, 8:12])
    torch.testing.assert_close(batch.attn.k[:, 0], rows[:, 16:20])
    torch.testing.assert_close(batch.attn.v[:, 0], rows[:, 20:24])
    gate = torch.cat((rows[:, 4:8], rows[:, 12:16]), 1)
    torch.testing.assert_close(out, (2.0 * torch.sigmoid(gate)) @ o.T)


def test_the_site_follows_the_record() -> None:
    layer, _, _ = make(replace(SPEC, gate=""))
    site = layer.site
    assert (site.group, site.layer, site.scale, site.window) == (1, 7, 0.5, 3)
    assert (site.heads, site.kv_heads, site.head_dim, site.v_dim) == (2, 1, 4, 4)
    assert site.sinks is None and not site.latent
