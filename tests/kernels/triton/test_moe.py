"""Experts against the reference: every method, every kind of weights, and unbalanced choices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from radixlm.kernels.ops import moe as reference
from radixlm.kernels.ops.fp8 import is_fp8
from radixlm.kernels.triton.moe import TritonExperts, pack_experts

FORMATS = ["int8wo", "w8a8", "int4-32", "w4a8-64", "int4-128", "fp8", "fp8-128"]
EXPERTS, DIM, INNER = 5, 128, 96


def weights(
    dtype: torch.dtype, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    torch.manual_seed(11)
    up = (torch.randn(EXPERTS, 2 * INNER, DIM) / 8).to(dtype)
    down = (torch.randn(EXPERTS, DIM, INNER) / 8).to(dtype)
    if not has_bias:
        return up, down, None, None
    return up, down, torch.randn(EXPERTS, 2 * INNER), torch.randn(EXPERTS, DIM)


def choices(tokens: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Weights and ids; expert 3 gets no token."""
    ids = torch.stack([torch.randperm(EXPERTS - 1)[:top_k] for _ in range(tokens)])
    return torch.rand(tokens, top_k), ids + (ids >= 3)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


@pytest.mark.parametrize(
    ("tokens", "top_k", "has_bias"), [(1, 4, False), (3, 2, True), (9, 3, True), (50, 1, False)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_reference(dtype: torch.dtype, tokens: int, top_k: int, has_bias: bool) -> None:
    act = "swiglu_oai" if has_bias else "silu"
    params = weights(dtype, has_bias)
    x = torch.randn(tokens, DIM).to(dtype)
    chosen = choices(tokens, top_k)
    want = reference.pack_experts(*(None if p is None else p.float() for p in params), act)
    got = pack_experts(*params, act).run(x, *chosen)
    assert got.dtype == dtype and got.shape == x.shape
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    assert error(got, want.run(x.float(), *chosen)) < bound


@pytest.mark.parametrize(
    ("fmt", "tokens"),
    [*((fmt, 2) for fmt in FORMATS), *((fmt, 20) for fmt in ("w8a8", "w4a8-64", "fp8", "fp8-128"))],
)
def test_quantized_experts(fmt: str, tokens: int) -> None:
    up, down, *_ = weights(torch.float32, False)
    x = torch.randn(tokens, DIM)
    chosen = choices(tokens, 2)
    fmts = (fmt, "int4-32" if "4" in fmt else fmt)  # 96 inputs allow no larger groups
    exact = reference.pack_experts(up, down, None, None, "silu").run(x, *chosen)
    got = pack_experts(up, down, None, None, "silu", fmts).run(x, *chosen)
    bound = 0.08 if is_fp8(fmt) else 0.25 if "4" in fmt else 0.03
    assert 1e-4 < error(got, exact) < bound  # of two roundings


def test_all_tokens_on_one_expert_and_an_expert_twice() -> None:
    experts = pack_experts(*weights(torch.float32, False), "silu")
    want = reference.pack_experts(*weights(torch.float32, False), "silu")
    for tokens in (3, 20):
        x = torch.randn(tokens, DIM)
        same = torch.full((tokens, 2), 4)
        assert error(experts.run(x, *(c := (torch.rand(tokens, 2), same))), want.run(x, *c)) < 1e-5
    assert experts.run(x[:0], torch.rand(0, 2), same[:0]).shape == (0, DIM)


@pytest.mark.parametrize("tokens", [3, 20])
def test_choices_of_no_expert_are_left_out(tokens: int) -> None:
    """As if their weight was 0; memory that nothing was written to is not read."""
    params = weights(torch.float32, True)
    experts = pack_experts(*params, "swiglu_oai")
    weights_TK, ids_TK = choices(tokens, 3)
    is_out_TK = torch.rand(tokens, 3) < 0.5
    is_out_TK[0], is_out_TK[1] = True, False
    x = torch.randn(tokens, DIM)
    want = experts.run(x, weights_TK.masked_fill(is_out_TK, 0.0), ids_TK)
    got = experts.run_some(x, weights_TK, ids_TK.masked_fill(is_out_TK, -1))
    assert torch.equal(got, want) and not got[0].any()
    assert experts.run_some(x[:, :], weights_TK, torch.full_like(ids_TK, -1)).abs().sum() == 0


def test_torchs_grouped_product_gives_the_same() -> None:
    params = weights(torch.bfloat16, False)
    experts = pack_experts(*params, "gelu")
    assert isinstance(experts, TritonExperts)
    x = torch.randn(30, DIM).bfloat16()
    chosen = choices(30, 3)
    want = reference.pack_experts(*(None if p is None else p.float() for p in params), "gelu")
    got = experts.run_grouped_mm(x, *chosen)
    assert error(got, want.run(x.float(), *chosen)) < 1e-2


def _is_same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Bit for bit; numpy's products, which the interpreter uses, may round by a row's place."""
    return torch.equal(got, want) if torch.cuda.is_available() else error(got, want) < 1e-3


def test_a_token_does_not_depend_on_the_batch() -> None:
    experts = pack_experts(*weights(torch.float16, True), "silu")
    x, chosen = torch.randn(12, DIM).half(), choices(12, 2)
    together = experts.run(x, *chosen)
    order = torch.randperm(12)
    assert _is_same(experts.run(x[order], *(c[order] for c in chosen)), together[order])
    few = experts.run(x[:3], *(c[:3] for c in chosen))
    alone = experts.run(x[2:3], *(c[2:3] for c in chosen))
    assert _is_same(alone, few[2:])
    assert error(few, together[:3]) < 1e-3


def test_unknown_activations_use_the_reference() -> None:
    params = weights(torch.float64, False)
    assert isinstance(pack_experts(*params, "silu"), reference.ReferenceExperts)
