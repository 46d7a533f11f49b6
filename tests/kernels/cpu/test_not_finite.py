"""What is not finite stays so, and in its own row: tokens of a lost NaN look right."""

import pytest
import torch
from tests.kernels.cpu.test_attention import Case, World

from radixlm.kernels.cpu import activation, linear
from radixlm.kernels.cpu.fused import softcap
from radixlm.kernels.ops import kv

pytestmark = pytest.mark.usefixtures("isa")
FORMATS = ("fp32", "bf16", "fp16", "int8wo", "w8a8", "int4-32", "w4a8-32", "fp4-32")


@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_of_linear_layers(fmt: str) -> None:
    packed = linear.pack(torch.randn(70, 96), None, fmt)
    for num_rows in (1, 3, 40):
        x, row = torch.randn(num_rows, 96), num_rows // 2
        want = packed.run(x)
        for column, number in ((0, torch.nan), (17, torch.nan), (95, torch.nan), (50, torch.inf)):
            bad = x.clone()
            bad[row, column] = number
            got = packed.run(bad)
            assert not bool(got[row].isfinite().any()), (num_rows, column)
            assert torch.equal(got[:row], want[:row])
            assert torch.equal(got[row + 1 :], want[row + 1 :])


@pytest.mark.parametrize("act", linear.ACT_CODE)
def test_numbers_of_activations(act: str) -> None:
    x = torch.randn(3, 37)
    is_nan = torch.rand(3, 37) < 0.2
    x[is_nan] = torch.nan
    assert torch.equal(activation.activate(x, act).isnan(), is_nan)
    both = torch.cat([x, torch.randn(3, 37)], 1)
    for gate_and_up in (both, both.roll(37, 1)):
        for limit in ((0.0, False), (1.0, False), (1.0, True)):
            got = activation.act_mul(gate_and_up, f"{act}_mul", limit)
            assert torch.equal(got.isnan(), is_nan), limit


def test_capped_logits() -> None:
    x = torch.tensor([[1.0, torch.nan, torch.inf, -torch.inf]])
    assert torch.equal(softcap(x, 30.0).isnan(), x.isnan())


@pytest.mark.parametrize("dtype", kv.DTYPES, ids=str)
@pytest.mark.parametrize("kind", [{}, {"softcap": 20.0, "has_sinks": True}], ids=str)
def test_queries(dtype: torch.dtype, kind: dict[str, object]) -> None:
    lens = [(1, 70), (5, 5), (40, 100)]
    world = World(Case(tuple(lens), 6, 2, 12, 16, dtype=dtype, **kind))  # type: ignore[arg-type]
    before = torch.cat(world.run(lens))
    world.q[2][70, 3, 5] = torch.nan  # a query of row 1 + 5 + 10
    after = torch.cat(world.run(lens))
    is_lost = torch.zeros(before.shape[:2], dtype=torch.bool)
    is_lost[16, 3] = True
    assert bool(after[is_lost].isnan().all())
    assert torch.equal(after[~is_lost], before[~is_lost])
