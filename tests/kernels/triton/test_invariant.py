"""Linear maps and experts whose rows do not depend on the batch, against the usual ones."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.fakes.quick import slow_unless
from torch import Tensor

from radixlm.base.errors import ConfigError
from radixlm.kernels.dispatch import INVARIANT, INVARIANT_OPS, Kernels, bind
from radixlm.kernels.triton.gemm import INVARIANT_ROWS

ROWS = INVARIANT_ROWS + 6  # more than one tile


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return bind("cpu", {"all": "triton"} | dict.fromkeys(INVARIANT_OPS, INVARIANT))


@pytest.fixture(scope="module")
def usual() -> Kernels:
    return bind("cpu", {"all": "reference"})


def assert_rows_alone(whole: Tensor, rows: dict[int, Tensor]) -> None:
    for row, alone in rows.items():
        assert torch.equal(alone[0], whole[row])


@pytest.mark.parametrize(
    ("act", "fmt"),
    slow_unless(
        lambda act, fmt: act != "gelu_tanh" or not fmt,  # another function of the same sums
        itertools.product(
            ("", "silu", "gelu_tanh"), ("", "int8wo", "w8a8", "int4-32", "fp8", "fp8-128")
        ),
    ),
)
def test_linear(kernels: Kernels, usual: Kernels, fmt: str, act: str) -> None:
    torch.manual_seed(1)
    weight, bias, x = torch.randn(128, 128) / 8, torch.randn(128), torch.randn(ROWS, 128)
    args = (weight, bias, fmt, act) if act else (weight, bias, fmt)
    op = "pack_gated" if act else "pack_linear"
    made = getattr(kernels, op)(*args)
    whole = made.run(x)
    assert_rows_alone(whole, {row: made.run(x[row : row + 1]) for row in (0, 37, ROWS - 1)})
    error = (whole - getattr(usual, op)(*args).run(x)).norm() / whole.norm()
    assert float(error) < 0.02


def test_tied_tables_and_heads(kernels: Kernels, usual: Kernels) -> None:
    torch.manual_seed(2)
    table, x = torch.randn(96, 64), torch.randn(ROWS, 64)
    tied = kernels.pack_tied(table)
    assert_rows_alone(tied.run(x), {row: tied.run(x[row : row + 1]) for row in (3, ROWS - 1)})
    weight, heads = torch.randn(3, 48, 64), torch.randn(ROWS, 3, 64)
    made = kernels.pack_head_linear(weight)
    whole = made.run(heads)
    assert_rows_alone(whole, {row: made.run(heads[row : row + 1]) for row in (3, ROWS - 1)})
    wanted = usual.pack_head_linear(weight).run(heads)
    torch.testing.assert_close(whole, wanted, rtol=1e-4, atol=1e-4)


def test_experts(kernels: Kernels, usual: Kernels) -> None:
    torch.manual_seed(3)
    up, down = torch.randn(4, 64, 48) / 7, torch.randn(4, 48, 32) / 6
    x, weights = torch.randn(ROWS, 48), torch.rand(ROWS, 2)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(ROWS)])
    made, wanted = (k.pack_experts(up, down, None, None, "silu") for k in (kernels, usual))
    whole = made.run(x, weights, ids)
    alone = {r: made.run(*(t[r : r + 1] for t in (x, weights, ids))) for r in (0, 41, ROWS - 1)}
    assert_rows_alone(whole, alone)
    torch.testing.assert_close(whole, wanted.run(x, weights, ids), rtol=1e-4, atol=1e-4)


def test_what_has_no_such_kernel_is_refused(kernels: Kernels) -> None:
    with pytest.raises(ConfigError, match="--enable-deterministic-inference: pack_gated"):
        kernels.pack_gated(torch.randn(8, 8, dtype=torch.float64), None, "int8wo", "silu")
