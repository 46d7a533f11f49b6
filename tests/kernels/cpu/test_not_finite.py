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


def lose_value(world: World, s: int, position: int, head: int) -> None:
    """One channel of V of a token becomes NaN."""
    k, v = (x.float() for x in world.shape.tokens(*world.caches))
    size = world.case.page_size
    slot = int(world.pages[s, position // size]) * size + position % size
    (k if world.case.is_latent else v)[slot, head, 5] = torch.nan
    world.caches = world.shape.pages(k, v)


@pytest.mark.parametrize("dtype", kv.DTYPES, ids=str)
@pytest.mark.parametrize(
    "kind",
    [{"kv_heads": 2}, {"kv_heads": 2, "window": 30}, {"kv_heads": 1, "is_latent": True}],
    ids=str,
)
def test_values_reach_no_earlier_token(dtype: torch.dtype, kind: dict[str, object]) -> None:
    """Three drafts, some rows and many, where one of the last tokens is lost."""
    lens, lost = [(3, 70), (20, 50), (90, 100)], (68, 40, 80)
    world = World(Case(tuple(lens), 4, dim=48, v_dim=48, dtype=dtype, **kind))  # type: ignore[arg-type]
    before = world.run(lens)
    head = world.case.kv_heads - 1
    for s, position in enumerate(lost):
        lose_value(world, s, position, head)
    heads = slice(head * 4 // world.case.kv_heads, 4)
    for (new, total), position, old, now in zip(lens, lost, before, world.run(lens), strict=True):
        is_lost = torch.zeros(new, 4, dtype=torch.bool)
        is_lost[position - (total - new) :, heads] = True
        assert bool(now[is_lost].isnan().any(-1).all())
        assert torch.equal(now[~is_lost], old[~is_lost])


@pytest.mark.parametrize("dtype", kv.DTYPES, ids=str)
def test_values_reach_no_other_branch(dtype: torch.dtype) -> None:
    world = World(Case(((4, 100),), dtype=dtype))
    parents = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]])

    def run() -> torch.Tensor:
        return world.layer.run(
            world.q[0][96:], *world.caches, world.pages, torch.tensor([0, 4], dtype=torch.int32),
            torch.tensor([100], dtype=torch.int32), tree_mask_TN=parents.to(torch.uint8),
        )  # fmt: skip

    before = run()
    lose_value(world, 0, 97, 1)
    after = run()
    assert bool(after[1, 2:].isnan().any(-1).all())
    assert torch.equal(after[[0, 2, 3]], before[[0, 2, 3]])
    assert torch.equal(after[1, :2], before[1, :2])
