"""Linear layers and experts on a real GPU, at sizes of real models, against the references.

TRITON_INTERPRET=0 python -m pytest tests/kernels/triton/test_moe_on_gpu.py -m gpu
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from radixlm.arch.spec import Moe
from radixlm.kernels.ops import linear as ops_linear
from radixlm.kernels.ops import moe as ops_moe
from radixlm.kernels.triton import linear
from radixlm.kernels.triton.moe import TritonExperts, pack_experts
from radixlm.kernels.triton.moe_route import route

IS_READY = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_READY, reason="needs a GPU, compiled")]
GPU = torch.device("cuda")
FORMATS = ["", "int8wo", "w8a8", "int4-32", "int4-128", "fp8", "fp8-128"]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    g = torch.Generator(GPU).manual_seed(seed)
    return torch.randn(shape, generator=g, device=GPU).to(dtype)


def near(a: Tensor, b: Tensor, limit: float = 1e-2) -> None:
    error = (a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-20)
    assert error < limit, float(error)


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 65, 300, 2048])
@pytest.mark.parametrize("fmt", FORMATS)
def test_linear_maps(fmt: str, rows: int) -> None:
    weight, bias = random(1536, 2048) / 45, random(1536, dtype=torch.float32)
    x = random(rows, 2048, seed=1)
    packed = linear.pack_linear(weight, bias, fmt)
    near(packed.run(x), ops_linear.pack_linear(weight, bias, fmt).run(x))
    gated = linear.pack_gated(weight, None, fmt, "silu")
    near(gated.run(x), ops_linear.pack_gated(weight, None, fmt, "silu").run(x), 2e-2)
    assert torch.equal(packed.run(x), packed.run(x))


@pytest.mark.parametrize("tokens", [1, 5, 8, 9, 64, 300, 2500])
@pytest.mark.parametrize("fmt", ["", "fp8", "fp8-128", "int8wo", "int4-128"])
def test_experts(fmt: str, tokens: int) -> None:
    experts, top_k, dim, inner = 32, 4, 1024, 768
    up, down = random(experts, 2 * inner, dim) / 32, random(experts, dim, inner, seed=1) / 28
    x, logits = random(tokens, dim, seed=2), random(tokens, experts, seed=3)
    spec = Moe(experts, top_k, inner, "silu", renorm=True)
    chosen = route(logits, None, spec)
    wanted = ops_moe.route(logits, None, spec)
    torch.testing.assert_close(chosen[0], wanted[0], rtol=1e-4, atol=1e-5)
    packed = pack_experts(up, down, None, None, "silu", (fmt, fmt))
    assert isinstance(packed, TritonExperts)
    exact = ops_moe.pack_experts(up, down, None, None, "silu").run(x, *chosen)
    got = packed.run(x, *chosen)
    near(got, exact, {"": 1e-2, "int8wo": 2e-2, "int4-128": 0.25}.get(fmt, 0.08))
    assert torch.equal(packed.run(x, *chosen), got)
    near(packed.run_sorted(x, *chosen), got, 0.05 if fmt else 1e-2)


def test_a_replayed_graph_routes_again() -> None:
    experts, top_k, dim, inner = 16, 2, 512, 256
    up, down = random(experts, 2 * inner, dim) / 22, random(experts, dim, inner, seed=1) / 16
    packed = pack_experts(up, down, None, None, "silu")
    spec = Moe(experts, top_k, inner, "silu")
    x, logits = random(40, dim), random(40, experts)

    def step() -> Tensor:
        return packed.run(x, *route(logits, None, spec))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seed in (5, 6):
        x.copy_(random(40, dim, seed=seed))
        logits.copy_(random(40, experts, seed=seed + 10) * (1 + 50 * (seed == 6)))
        graph.replay()
        assert torch.equal(out, step())
