"""The Triton backend on a real GPU, at sizes of real models, against torch_native there.

TRITON_INTERPRET=0 python -m pytest tests/attention/test_triton_on_gpu.py -m gpu
"""

from __future__ import annotations

import os

import pytest
import torch
from tests.attention.paged_step import make_batch, new_rows, open_backend, run_step
from tests.fakes.attention_case import Case

from radixlm.base.record import replace
from radixlm.kernels.dispatch import bind
from radixlm.step.batch import AttentionSite

IS_READY = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_READY, reason="needs a GPU, compiled")]
GPU = torch.device("cuda")
SITE = AttentionSite(layer=0, group=0, heads=32, kv_heads=8, head_dim=128, v_dim=128, scale=0.088)
LATENT = replace(SITE, heads=128, kv_heads=1, head_dim=576, v_dim=512, latent=True, scale=0.07)
SITES = {
    "plain": SITE,
    "64 channels": replace(SITE, head_dim=64, v_dim=64),
    "96 channels": replace(SITE, head_dim=96, v_dim=96),
    "192 channels": replace(SITE, head_dim=192, v_dim=192),
    "256 channels": replace(SITE, heads=8, kv_heads=4, head_dim=256, v_dim=256),
    "one for 7": replace(SITE, heads=28, kv_heads=4),
    "one head each": replace(SITE, kv_heads=32),
    "gemma2": replace(SITE, window=300, softcap=50.0),
    "gpt-oss": replace(SITE, window=128, sinks=torch.randn(32)),
    "alibi": replace(SITE, slopes=torch.rand(32)),
    "chunk": replace(SITE, chunk=256),
    "deepseek": LATENT,
}
STEPS = {
    "decode": [(1, 0), (1, 16), (1, 999), (1, 4096)],
    "guesses": [(4, 1000), (4, 17)],
    "mixed": [(300, 0), (1, 999), (70, 500)],
    "prompt": [(1000, 0)],
}


def near(ours: torch.Tensor, theirs: torch.Tensor, limit: float) -> None:
    error = (ours.float() - theirs.float()).norm() / theirs.float().norm()
    assert float(error) < limit


def on_gpu(site: AttentionSite) -> AttentionSite:
    tensors = {n: getattr(site, n) for n in ("sinks", "slopes")}
    return replace(site, **{n: x if x is None else x.to(GPU) for n, x in tensors.items()})


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", SITES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_equals_torch_native(name: str, step: str, dtype: torch.dtype) -> None:
    site = on_gpu(SITES[name])
    case = Case.random(site, STEPS[step], 16, 1, cache_dtype=dtype)
    ours = run_step("triton", case, site, dtype, device=GPU)
    theirs = run_step("torch_native", case, site, torch.float32, device=GPU)
    near(ours, theirs, 2e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("name", ["plain", "deepseek"])
@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str)
def test_caches_of_8_bits(cache: torch.dtype, name: str) -> None:
    for step in ("decode", "mixed"):
        case = Case.random(SITES[name], STEPS[step], 16, 1, cache_dtype=cache)
        # both store the same: a number rounded twice may be the neighbour of one rounded once
        case = replace(
            case, **{x: [row.bfloat16().float() for row in getattr(case, x)] for x in "qkv"}
        )
        ours = run_step("triton", case, SITES[name], torch.bfloat16, device=GPU)
        theirs = run_step("torch_native", case, SITES[name], torch.float32, device=GPU)
        near(ours, theirs, 1e-2)


def test_a_graph_follows_the_lengths() -> None:
    """Captured with one set of lengths, replayed with others."""
    case = Case.random(SITE, [(1, 2000), (1, 100), (1, 30)], 16, 1, cache_dtype=torch.bfloat16)
    backend, table = open_backend("triton", case, SITE, GPU)
    batch = make_batch(case, table, backend)
    rows = new_rows(case, SITE, torch.bfloat16, GPU)
    backend.begin(batch)
    backend.run(*rows, SITE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.begin(batch)
        out = backend.run(*rows, SITE)
    reader = replace(SITE, stores=False)
    for lengths in ([2001, 101, 31], [40, 101, 31], [1500, 0, 1]):
        batch.kv_len_S.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        replayed = out.clone()
        backend.begin(batch)
        assert torch.equal(replayed, backend.run(rows[0], None, None, reader))


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_one_fused_launch_stores_the_same_as_two(cache: torch.dtype) -> None:
    case, angle = Case.random(SITE, STEPS["mixed"], 16, 1, cache_dtype=cache), torch.rand(371, 64)
    turn = torch.cat((angle.cos(), angle.sin()), -1).to(GPU)
    outs = []
    for stored_at_once in (None, ()):
        backend, table = open_backend("triton", case, SITE, GPU, bind("cuda"))
        if stored_at_once is not None:
            backend._stored = stored_at_once
        batch = make_batch(case, table, backend)
        backend.begin(batch)
        assert batch.fused_attn is backend
        rows = new_rows(case, SITE, torch.bfloat16, GPU)
        outs.append(backend.prepare_and_run(*rows, SITE, None, turn, False))
    assert torch.equal(*outs)
