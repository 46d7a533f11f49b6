"""Elementwise kernels and sampling on a real GPU, at sizes of real models, against the
references.

TRITON_INTERPRET=0 python -m pytest tests/kernels/triton/test_elementwise_on_gpu.py -m gpu
"""

from __future__ import annotations

import os

import pytest
import torch

from radixlm.kernels.ops import activation as ops_activation
from radixlm.kernels.ops import norm as ops_norm
from radixlm.kernels.ops import rope as ops_rope
from radixlm.kernels.ops.kv import to_kv
from radixlm.kernels.triton import activation, kv, norm, ops, rope, sample
from radixlm.sampling import cuda, noise
from radixlm.sampling.sampler import Sampler, threshold
from radixlm.sampling.table import SamplingTable
from radixlm.wire.sampling_params import SamplingParams

IS_READY = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_READY, reason="needs a GPU, compiled")]
GPU = torch.device("cuda")
VOCAB = 151936
BATCHES = [1, 3, 64]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    g = torch.Generator(GPU).manual_seed(seed)
    return torch.randn(shape, generator=g, device=GPU).to(dtype)


def near(a: torch.Tensor, b: torch.Tensor, limit: float = 1e-2) -> None:
    """The relative norm of the difference."""
    error = (a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-20)
    assert error < limit, float(error)


@pytest.mark.parametrize("tokens", [*BATCHES, 4097])
@pytest.mark.parametrize("dim", [128, 1024, 4096])
def test_norms(tokens: int, dim: int) -> None:
    x, delta, weight = random(tokens, dim), random(tokens, dim, seed=1), random(dim).float()
    near(ops.rms_norm(x, weight, 1e-6), ops_norm.rms_norm(x, weight, 1e-6))
    twin = x.clone()
    near(ops.add_rms_norm(x, delta, weight, 1e-6), ops_norm.add_rms_norm(twin, delta, weight, 1e-6))
    assert torch.equal(x, twin)
    assert norm.takes(x, weight)


@pytest.mark.parametrize("tokens", [*BATCHES, 1000])
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_q_k_norms_and_the_kv_store(tokens: int, cache: torch.dtype) -> None:
    if cache == torch.float8_e4m3fn and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs sm_89")
    heads, kv_heads, dim = 16, 8, 128
    q, k, v = random(tokens, (heads + 2 * kv_heads) * dim).split(
        [heads * dim, kv_heads * dim, kv_heads * dim], -1
    )
    q, k, v = q.view(-1, heads, dim), k.view(-1, kv_heads, dim), v.view(-1, kv_heads, dim)
    qk_norm = ops_rope.QkNorm("head", False, 1e-6, random(dim).float(), random(dim).float())
    cos_sin = random(tokens, dim, dtype=torch.float32)
    twins = q.clone(), k.clone()
    pools = [torch.zeros(tokens + 9, kv_heads, dim, device=GPU).to(cache) for _ in "kv"]
    slots = torch.randperm(tokens + 9, device=GPU)[:tokens]
    rope.prepare(q, k, qk_norm, cos_sin, False, rope.Store(v, *pools, slots))
    ops_rope.prepare_qk(*twins, qk_norm, cos_sin, False)
    near(q, twins[0])
    near(k, twins[1])
    for pool, rows in zip(pools, (k, v), strict=True):
        # as numbers: the sign of a zero is not kept by float8_e5m2
        assert torch.equal(pool.float()[slots], to_kv(rows, cache).float())


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai"])
def test_gates(act: str) -> None:
    x = random(65, 2 * 3072)
    near(activation.activate_gated(x, act), ops_activation.activate_gated(x, act))
    x = random(3, VOCAB, dtype=torch.float32) * 40
    near(activation.softcap(x, 30.0), ops_activation.softcap(x, 30.0), 2e-6)


@pytest.mark.parametrize("rows", BATCHES)
def test_sampled_tokens_equal_those_of_torch(rows: int) -> None:
    kinds = [
        {"temperature": 0.0},
        {},
        {"top_k": 50, "top_p": 0.9},
        {"top_p": 0.7, "temperature": 1.4},
        {"min_p": 0.05},
        {"frequency_penalty": 1.0, "repetition_penalty": 1.3, "logit_bias": {7: 3.0}},
        {"min_new_tokens": 9, "top_k": 2},
    ]
    samplers = []
    for _ in range(2):
        table = SamplingTable(rows, VOCAB, GPU, random_seed=1)
        for slot in range(rows):
            params = SamplingParams(**({"sampling_seed": slot} | kinds[slot % len(kinds)]))
            table.set(slot, params, [1, 2, 3], [7, 7], eos_ids=[5])
        samplers.append(Sampler(table, detect_bad=True))
    assert samplers[1]._gpu is not None
    samplers[0]._gpu = None
    equal = 0
    for step in range(4):
        logits = random(rows, VOCAB, dtype=torch.float32, seed=step) * 3
        wanted, got = (
            s.sample(logits.clone(), range(rows), torch.full((rows,), 5 + step)) for s in samplers
        )
        equal += int((wanted.tokens_R == got.tokens_R).sum())
    assert equal >= 4 * rows - max(1, rows // 16)  # rounding may decide between two tokens


def test_supports_at_full_size() -> None:
    """Every sampled token lies in the set that sorting gives."""
    logits = random(1, VOCAB, dtype=torch.float32).repeat(512, 1) * 2.5
    floats = torch.tensor([1.0, 0.8, 0.0], device=GPU).repeat(512, 1)
    top_k = torch.full((512,), 200, device=GPU)
    lowest = threshold(logits.softmax(-1), floats, top_k)
    params = sample.pack_params(floats, top_k, torch.arange(512, device=GPU), top_k * 0)
    tokens, bad = sample.draw(logits, params, torch.zeros(512, dtype=torch.int32, device=GPU))
    probs = logits.softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert bool((probs >= lowest * (1 - 1e-5)).all()) and not bool(bad.any())
    assert len(tokens.unique()) > 20


def test_frequencies_of_a_hundred_thousand_samples() -> None:
    probs = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.03, 0.01], device=GPU)
    count = 100_000
    floats = torch.tensor([1.0, 1.0, 0.0], device=GPU).repeat(count, 1)
    top_k = torch.full((count,), 7, device=GPU)
    params = sample.pack_params(floats, top_k, top_k * 0 + 3, top_k * 0)
    positions = torch.arange(count, dtype=torch.int32, device=GPU)
    tokens, _ = sample.draw(probs.log().repeat(count, 1), params, positions)
    seen = torch.bincount(tokens, minlength=7)
    assert float(((seen - count * probs) ** 2 / (count * probs)).sum()) < 22.5  # 0.1 % beyond
    keys = noise.draw_keys(top_k * 0 + 3, positions.long())
    ids = torch.arange(7, dtype=torch.int32, device=GPU)[None]
    scores = noise.gumbel_noise(keys, ids) + probs.log()
    assert int((scores.argmax(-1) != tokens).sum()) <= 3


def test_a_graph_replays_sampling_with_new_numbers() -> None:
    logits = random(8, VOCAB, dtype=torch.float32)
    floats = torch.tensor([1.0, 0.9, 0.0], device=GPU).repeat(8, 1)
    top_k = torch.full((8,), 40, device=GPU)
    params = sample.pack_params(floats, top_k, torch.arange(8, device=GPU), top_k * 0)
    positions = torch.zeros(8, dtype=torch.int32, device=GPU)
    sample.draw(logits, params, positions)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        tokens, _ = sample.draw(logits, params, positions)
    for seed in range(3):
        logits.copy_(random(8, VOCAB, dtype=torch.float32, seed=seed))
        positions.fill_(seed)
        graph.replay()
        kept = tokens.clone()
        assert torch.equal(kept, sample.draw(logits, params, positions)[0])


def test_log_probabilities() -> None:
    logits = random(5, VOCAB, dtype=torch.float32) * 3
    tokens = torch.randint(VOCAB, (5, 40), device=GPU)
    found = cuda.SamplerKernels().logprob.logprobs_at(logits, tokens)
    wanted = logits.double().log_softmax(-1).gather(1, tokens)
    assert float((found - wanted).abs().max()) < 2e-5


def test_pages() -> None:
    pool = random(28, 64, 16, 8, 128)
    expected = pool.clone()
    expected[:, [3, 60]] = pool[:, [60, 5]]
    kv.copy_pages(pool, [60, 5], [3, 60])
    assert torch.equal(pool, expected)
