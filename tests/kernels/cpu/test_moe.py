"""Experts against a loop in fp64, and inside a program against the router of kernels/ops."""

import pytest
import torch
from torch import Tensor

from radixlm.arch.spec import Moe
from radixlm.kernels.cpu import linear, moe
from radixlm.kernels.cpu.extension import native
from radixlm.kernels.ops.moe import route
from radixlm.layers.program import struct

EXPERTS, DIM, INNER = 8, 48, 40


def make(fmt: str = "fp32", has_bias: bool = False):
    g = torch.Generator().manual_seed(0)
    up = torch.randn(EXPERTS, 2 * INNER, DIM, generator=g) * 0.2
    down = torch.randn(EXPERTS, DIM, INNER, generator=g) * 0.2
    up_bias = torch.randn(EXPERTS, 2 * INNER, generator=g) if has_bias else [None] * EXPERTS
    down_bias = torch.randn(EXPERTS, DIM, generator=g) if has_bias else [None] * EXPERTS
    packed = moe.Experts(
        [linear.pack(u, b, fmt, is_paired=True) for u, b in zip(up, up_bias, strict=True)],
        [linear.pack(d, b, fmt) for d, b in zip(down, down_bias, strict=True)],
        "silu",
    )
    return packed, up.double(), down.double(), up_bias, down_bias


def choice(tokens: int, top_k: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, DIM, generator=g)
    ids = torch.stack([torch.randperm(EXPERTS, generator=g)[:top_k] for _ in range(tokens)])
    return x, torch.rand(tokens, top_k, generator=g), ids


def in_a_loop(made, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """The output of the experts of `make`, one by one, in fp64."""
    _, up, down, up_bias, down_bias = made
    total = torch.zeros(len(x), DIM, dtype=torch.float64)
    for t in range(len(x)):
        for j in range(ids.shape[1]):
            e = int(ids[t, j])
            h = up[e] @ x[t].double() + (0 if up_bias[e] is None else up_bias[e].double())
            gate, value = h.chunk(2)
            y = down[e] @ (torch.nn.functional.silu(gate) * value)
            y = y + (0 if down_bias[e] is None else down_bias[e].double())
            total[t] += weights[t, j].double() * y
    return total


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 2), (3, 1), (40, 3), (300, 2)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_experts_match_a_loop(tokens: int, top_k: int, has_bias: bool) -> None:
    made = make(has_bias=has_bias)
    x, weights, ids = choice(tokens, top_k)
    want = in_a_loop(made, x, weights, ids)
    got = made[0].run(x, weights, ids, num_threads=2)
    assert float((got - want).abs().max() / want.abs().max()) < 1e-5


@pytest.mark.parametrize("tokens", [1, 40])
def test_a_token_may_pick_an_expert_twice(tokens: int) -> None:
    """Such an expert has more rows than there are tokens; the sanitizer checks its workspace."""
    made = make()
    x, weights, _ = choice(tokens, 3)
    ids = torch.tensor([5, 5, 2]).expand(tokens, 3).contiguous()
    want = in_a_loop(made, x, weights, ids)
    got = made[0].run(x, weights, ids, num_threads=2)
    assert float((got - want).abs().max() / want.abs().max()) < 1e-5


@pytest.mark.parametrize("fmt", ["bf16", "fp16", "w8a8"])
@pytest.mark.parametrize("tokens", [2, 90])
def test_sixteen_bits_and_less_are_near(fmt: str, tokens: int) -> None:
    x, weights, ids = choice(tokens, 2)
    exact, rounded = make()[0].run(x, weights, ids), make(fmt)[0].run(x, weights, ids)
    bound = {"bf16": 1e-2, "fp16": 1e-3, "w8a8": 4e-2}[fmt]
    assert 0 < float((rounded - exact).abs().max() / exact.abs().max()) < bound


@pytest.mark.parametrize("fmt", ["bf16", "w8a8"])
def test_a_token_does_not_depend_on_the_others(fmt: str) -> None:
    packed = make(fmt)[0]
    x, weights, ids = choice(60, 3)
    together = packed.run(x, weights, ids, num_threads=2)
    for t in (0, 17, 59):
        alone = packed.run(x[t : t + 1], weights[t : t + 1], ids[t : t + 1], num_threads=1)
        assert torch.equal(alone[0], together[t])


SPECS = [
    Moe(EXPERTS, 2, INNER, "silu"),
    Moe(EXPERTS, 3, INNER, "silu", renorm=True, scale=2.5),
    Moe(EXPERTS, 2, INNER, "silu", score="softmax_topk"),
    Moe(EXPERTS, 2, INNER, "silu", score="sigmoid", correction=True, groups=(4, 2), renorm=True),
    Moe(EXPERTS, 2, INNER, "silu", score="sigmoid", groups=(4, 2), group_score="max"),
    Moe(EXPERTS, 2, INNER, "silu", score="sparsemixer", jitter=0.3),
]


def in_a_program(spec: Moe, table: Tensor, router: Tensor, correction: Tensor | None, ids: Tensor,
                 threads: int) -> Tensor:  # fmt: skip
    """x + experts(x) / 2 of rows x of the table."""
    packed, *_ = make()
    head = linear.pack(torch.eye(DIM), None, "fp32")
    packed_router = linear.pack(router, None, "fp32")
    p = native().Program()
    x, logits = p.buffer(DIM), p.buffer(EXPERTS)
    args = struct("EmbedArgs", table=table.data_ptr(), dtype=0, vocab=50, dim=DIM, scale=1.0)
    p.embed(y=x, tied=None, args=args, replaced=True)
    p.linear(x=x, y=logits, w=packed_router.handle)
    groups, groups_kept = spec.groups
    routing = struct(
        "Route", experts=EXPERTS, top_k=spec.top_k, renorm=spec.renorm, scale=spec.scale,
        score=getattr(native().RouterScore, spec.score.upper()), groups=groups,
        groups_kept=groups_kept, group_top2=spec.group_score == "top2", jitter=spec.jitter,
        correction=0 if correction is None else correction.data_ptr(),
    )  # fmt: skip
    p.moe(
        x=x, logits=logits, y=x, experts=packed.handle, route=routing, scale=0.5, adds=True,
        zero_experts=0, zero_experts_are_identity=True, scales_input=False, selected=False,
        part=None,
    )  # fmt: skip
    p.logits(x=x, w=head.handle, scale=1.0, softcap=0.0)
    count = len(ids)
    out, starts = torch.empty(count, DIM), torch.tensor([0, count], dtype=torch.int32)
    p.run(
        struct(
            "Step", tokens=count, ids=ids.data_ptr(), positions=ids.data_ptr(), num_seqs=1,
            query_start=starts.data_ptr(), kv_len=starts[1:].data_ptr(), num_rows=count,
            logits=out.data_ptr(), ld_logits=DIM, threads=threads,
        )
    )  # fmt: skip
    return out


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_program_routes_like_the_reference(spec: Moe, threads: int) -> None:
    g = torch.Generator().manual_seed(4)
    table, router = torch.randn(50, DIM, generator=g), torch.randn(EXPERTS, DIM, generator=g)
    correction = torch.rand(EXPERTS, generator=g) if spec.correction else None
    ids = torch.randint(0, 50, (33,), generator=g).int()
    out = in_a_program(spec, table, router, correction, ids, threads)
    hidden = table[ids.long()]
    weights, chosen = route(hidden @ router.T, correction, spec)
    want = hidden + 0.5 * make()[0].run(hidden, weights, chosen)
    assert float((out - want).abs().max() / want.abs().max()) < 1e-5


@pytest.mark.parametrize("spec", SPECS)
def test_tokens_that_are_nan_do_not_overflow_an_expert(spec: Moe) -> None:
    """Their experts differ, as any token's: none has more rows than there are tokens."""
    g = torch.Generator().manual_seed(5)
    table, router = torch.randn(50, DIM, generator=g), torch.randn(EXPERTS, DIM, generator=g)
    correction = torch.rand(EXPERTS, generator=g) if spec.correction else None
    ids = torch.arange(600, dtype=torch.int32) % 50
    want = in_a_program(spec, table, router, correction, ids, threads=2)
    table[:45] = torch.nan
    got = in_a_program(spec, table, router, correction, ids, threads=2)
    is_nan = (ids < 45).bool()
    assert bool(got[is_nan].isnan().all()) and torch.equal(got[~is_nan], want[~is_nan])
