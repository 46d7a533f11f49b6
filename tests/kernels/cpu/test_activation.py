"""Activations over their whole range, and the embedding gather."""

import re
from pathlib import Path

import pytest
import torch

from radixlm.kernels.cpu import activation
from radixlm.kernels.ops.activation import activate_gated

F = torch.nn.functional
PLAIN = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "tanh": torch.tanh,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


@pytest.mark.parametrize("act", PLAIN)
def test_pointwise(act: str) -> None:
    x = torch.linspace(-100, 100, 40001)
    x = torch.cat([x, torch.linspace(-6, 6, 24001), torch.tensor([0.0, -0.0, 1e-20])])[None]
    want = PLAIN[act](x.double())
    got = activation.activate(x, act).double()
    assert float(((got - want).abs() / (want.abs() + 1e-2)).max()) < 2e-5
    assert float((got - want).abs().max() / want.abs().max()) < 1e-6


@pytest.mark.parametrize("inner", [1, 16, 37])
def test_gated(inner: int) -> None:
    x = torch.randn(9, 2 * inner, generator=torch.Generator().manual_seed(0)) * 4
    gate, up = x.double().chunk(2, 1)
    for act in ("silu", "gelu", "gelu_tanh"):
        want = PLAIN[act](gate) * up
        got = activation.act_mul(x, f"{act}_mul")
        assert float((got - want).abs().max() / want.abs().max()) < 1e-6


@pytest.mark.parametrize("limit", [(0.0, False), (3.0, False), (3.0, True), (0.0, True)])
@pytest.mark.parametrize("act", ["silu", "gelu_tanh", "swiglu_oai"])
def test_limits(act: str, limit: tuple[float, bool]) -> None:
    x = torch.randn(9, 2 * 37, generator=torch.Generator().manual_seed(0)) * 8
    want = activate_gated(x.double(), act, *limit)
    got = activation.act_mul(x, f"{act}_mul", limit)
    assert float((got - want).abs().max() / want.abs().max()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_embedding(dtype: torch.dtype) -> None:
    table = torch.randn(11, 19, generator=torch.Generator().manual_seed(0)).to(dtype)
    ids = torch.tensor([3, 10, 0, -1, 11])
    got = activation.embedding(ids, table, scale=0.5)
    assert torch.equal(got[:3], table[ids[:3]].float() * 0.5)
    assert not got[3:].any()


def test_the_page_on_kernels_gives_a_new_activation_the_next_number() -> None:
    root = Path(__file__).parents[3]
    numbers = [
        [int(n) for n in re.findall(r"ACT_\w+ = (\d+)", (root / path).read_text("utf-8"))]
        for path in ("csrc/common/api.h", "docs/adding/kernel.md")
    ]
    assert numbers[0] == list(range(len(numbers[0])))
    assert numbers[1] == [numbers[0][-1], len(numbers[0])]
