"""Integer weights of a checkpoint on Triton kernels: the products use exactly those numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.fakes.integer_checkpoint import Layout, write_integers
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import cached_tiny
from torch import Tensor

from radixlm.kernels.dispatch import bind
from radixlm.kernels.ops.activation import activate_gated
from radixlm.kernels.ops.moe import pack_experts as reference_experts
from radixlm.kernels.ops.quantized import QuantScales
from radixlm.kernels.triton import gemm_tile as kinds
from radixlm.kernels.triton.linear import QuantizedLinear, pack_gated, pack_linear
from radixlm.kernels.triton.moe import TritonExperts, pack_experts
from radixlm.quant.checkpoint import checkpoint_quant
from radixlm.quant.load_time import make_scheme

ROWS = (3, 65)  # products of few rows, and dequantized weights
FMTS = ["w4a8-32", "w4a8-64", "w4a8-128", "int8wo", "w8a8"]


def given(
    shape: tuple[int, ...], fmt: str, is_shifted: bool, is_whole: bool = True
) -> tuple[Tensor, QuantScales, Tensor]:
    """(values, scales, the represented numbers). Zero points are integers if `is_whole`, otherwise
    any number; some groups hold a single value."""
    torch.manual_seed(len(shape) + is_shifted)
    group = int(fmt.partition("-")[2] or 0)
    if not group:
        values, scale = torch.randint(-128, 128, shape).to(torch.int8), torch.rand(shape[:-1])
        return values, (scale / 128, None), values * scale[..., None] / 128
    values = torch.randint(0, 16, shape).to(torch.uint8)
    scale = torch.rand(*shape[:-1], shape[-1] // group) / 8
    zero = torch.randint(0, 16, scale.shape) if is_shifted else 8
    offset = -zero * scale
    if not is_whole:
        offset = torch.randn(scale.shape) / 2
        scale[torch.rand(scale.shape) < 0.2] = 0.0
    wide = values.unflatten(-1, (-1, group)) * scale[..., None] + offset[..., None]
    return values, (scale, offset), wide.flatten(-2)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


@pytest.mark.parametrize(
    ("fmt", "is_shifted"),
    [*((fmt, False) for fmt in FMTS), *((fmt, True) for fmt in FMTS if fmt.startswith("w4"))],
)
def test_linear_maps(fmt: str, is_shifted: bool) -> None:
    values, grid, wide = given((64, 128), fmt, is_shifted)
    bias, act = torch.randn(64), "silu"
    plain, gated = pack_linear(values, bias, fmt, grid), pack_gated(values, bias, fmt, act, grid)
    assert isinstance(plain, QuantizedLinear) and isinstance(gated, QuantizedLinear)
    assert (plain.packed.kind == gated.packed.kind == kinds.INT4_SHIFTED) == is_shifted
    bound = 0.02 if fmt == "w8a8" else 1e-5
    for rows in ROWS:
        x = torch.randn(rows, 128)
        want = x @ wide.T + bias
        assert error(plain.run(x), want) < bound
        assert error(gated.run(x), activate_gated(want, act)) < 2 * bound
    assert plain.run(x.bfloat16()).dtype == torch.bfloat16
    for packed in (plain, gated):
        assert error(packed.unpack(), wide) < 1e-2 and packed.unpack().dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("fmt", "zeros"), [*((fmt, "eight") for fmt in FMTS), ("w4a8-32", "own"), ("w4a8-64", "any")]
)
def test_experts(fmt: str, zeros: str) -> None:
    asked = (fmt, zeros != "eight", zeros != "any")
    up, up_grid, wide_up = given((4, 256, 128), *asked)
    down, down_grid, wide_down = given((4, 128, 128), *asked)
    got = pack_experts(up, down, None, None, "silu", (fmt, fmt), (up_grid, down_grid))
    assert isinstance(got, TritonExperts)
    assert (got.up.kind == got.down.kind == kinds.INT4_SHIFTED) == (zeros != "eight")
    want = reference_experts(wide_up, wide_down, None, None, "silu")
    for tokens in (2, 20):
        x, weights = torch.randn(tokens, 128), torch.rand(tokens, 2)
        ids = torch.stack([torch.randperm(4)[:2] for _ in range(tokens)])
        assert error(got.run(x, weights, ids), want.run(x, weights, ids)) < (
            0.03 if fmt == "w8a8" else 1e-5
        )


def test_integer_zero_points_stay_exact() -> None:
    """Differences of integers are exact in 16 bits, so no weight is rounded."""
    values, grid, _ = given((64, 128), "w4a8-32", True)
    packed = pack_linear(values, None, "w4a8-32", grid)
    assert isinstance(packed, QuantizedLinear) and packed.packed.scale is not None
    zero = packed.packed.scale[0, 4:]
    assert torch.equal(zero, zero.round()) and 0 <= zero.min() and zero.max() <= 15


@pytest.mark.parametrize(
    ("arch", "layout"),
    [
        ("LlamaForCausalLM", Layout("gptq", group=64, order=True)),
        ("Qwen3MoeForCausalLM", Layout("awq", group=32)),
    ],
)
def test_models(arch: str, layout: Layout, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64}
    sizes["num_hidden_layers"] = 1
    narrow, wide = write_integers(cached_tiny(arch, **sizes), tmp_path, layout)
    ops = ("pack_linear", "pack_gated", "pack_tied", "route", "pack_experts")
    kernels = bind("cpu", dict.fromkeys(ops, "triton"))
    model = load_model(narrow, kernels, scheme=make_scheme(None, "", checkpoint_quant(narrow)))
    ids = {0: [5, 6, 7, 8, 9], 1: [9, 8]}
    got, want = PagedRunner(model), PagedRunner(load_model(wide))
    steps = [(got.prefill(ids), want.prefill(ids))]
    steps.append((got.step({0: [3], 1: [4]}), want.step({0: [3], 1: [4]})))
    for ours, theirs in steps:
        for sequence, logits in theirs.items():
            assert error(ours[sequence], logits) < 1e-3
