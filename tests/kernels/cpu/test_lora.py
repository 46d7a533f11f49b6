"""Adapters' rows in C++ against float64, in different batches, and refused inputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from radixlm.kernels.cpu.lora import NativeAdapter, NativeLoraRows
from radixlm.kernels.ops.lora import LoraPart, ReferenceAdapter, ReferenceLoraRows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SITE = 2


class Case:
    """Adapters with parts of different ranks and scales, and tokens that have some of them."""

    def __init__(
        self, seed: int, tokens: int, num_in: int, widths: list[int], ranks: list[int],
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.g = torch.Generator().manual_seed(seed)
        self.adapters = []
        for adapter, rank in enumerate(ranks):
            parts, first = [], 0
            for number, width in enumerate(widths):
                r = 1 + (rank + number) % (rank + 1)
                a, b = self.rand(r, num_in) / num_in**0.5, self.rand(width, r) / r**0.5
                bias = self.rand(width) if (adapter + number) % 3 == 0 else None
                has_gain = (adapter + number) % 2 == 1
                gain, own = (self.rand(width) if has_gain else None for _ in range(2))
                scale = float(self.rand(1))
                part = LoraPart(a.to(dtype), b.to(dtype), scale, first, bias, gain, own)
                if (adapter + number) % 4 != 3:  # a module that was not trained
                    parts.append(part)
                first += width
            self.adapters.append({SITE: tuple(parts)})
        wide = self.rand(tokens, num_in + sum(widths) + 3)  # rows of a wider matrix
        self.x, self.y = wide[:, :num_in], wide[:, num_in + 3 :]
        self.of = torch.randint(-1, len(ranks), (tokens,), generator=self.g, dtype=torch.int32)

    def rand(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.g)

    def run(self, rows: slice = slice(None), threads: int = 0) -> Tensor:
        """The changed y of these tokens alone."""
        y = self.y[rows].clone()
        packed = [NativeAdapter(parts) for parts in self.adapters]
        NativeLoraRows(packed, self.of[rows].clone()).add_(
            SITE, self.x[rows], y, num_threads=threads
        )
        return y

    def exact(self) -> Tensor:
        """In float64, token by token."""
        y = self.y.double()
        for token, adapter in enumerate(self.of.tolist()):
            for part in self.adapters[adapter][SITE] if adapter >= 0 else ():
                delta = part.b_OR.double() @ (part.a_RI.double() @ self.x[token].double())
                delta += 0 if part.bias_O is None else part.bias_O
                own = 0 if part.own_O is None else part.own_O
                outputs = slice(part.first, part.first + len(delta))
                changed = y[token, outputs] - own + delta * part.scale
                y[token, outputs] = changed * (1 if part.gain_O is None else part.gain_O) + own
        return y


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1 << 20), tokens=st.integers(1, 130), num_in=st.integers(1, 300),
    widths=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    ranks=st.lists(st.integers(1, 70), min_size=1, max_size=4), dtype=st.sampled_from(DTYPES),
    threads=st.integers(1, 2),
)  # fmt: skip
def test_equals_float64(
    seed: int, tokens: int, num_in: int, widths: list[int], ranks: list[int],
    dtype: torch.dtype, threads: int,
) -> None:  # fmt: skip
    case = Case(seed, tokens, num_in, widths, ranks, dtype)
    got, want = case.run(threads=threads), case.exact()
    assert float((got - want).abs().max()) < 5e-6 * max(1.0, float(want.abs().max()))
    base = case.of < 0
    assert torch.equal(got[base], case.y[base])
    reference = case.y.clone()
    rows = ReferenceLoraRows([ReferenceAdapter(parts) for parts in case.adapters], case.of)
    rows.add_(SITE, case.x, reference)
    torch.testing.assert_close(got, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    """Many rows and single ones, over inputs that are cut into slices."""
    case = Case(3, 120, 2500, [70, 20], [16, 5, 33], dtype)
    together = case.run(threads=2)
    assert torch.equal(together, case.run(threads=1))
    for token in (0, 1, 50, 119):
        assert torch.equal(case.run(slice(token, token + 1))[0], together[token])
    assert torch.equal(case.run(slice(30, 90)), together[30:90])


def test_rows_of_other_dtypes_run_the_reference() -> None:
    case = Case(1, 5, 40, [24], [8], torch.bfloat16)
    y = case.y.bfloat16()
    NativeLoraRows([NativeAdapter(p) for p in case.adapters], case.of).add_(
        SITE, case.x.bfloat16(), y
    )
    torch.testing.assert_close(y.float(), case.run(), rtol=5e-2, atol=5e-2)


def test_inputs_that_do_not_fit_are_refused() -> None:
    case = Case(1, 4, 40, [24], [8], torch.float32)
    packed = [NativeAdapter(parts) for parts in case.adapters]
    with pytest.raises(ValueError, match="an adapter that is not there"):
        NativeLoraRows(packed, torch.tensor([0, 1], dtype=torch.int32))
    rows = NativeLoraRows(packed, case.of)
    with pytest.raises(ValueError, match="expected 4 rows, got 3 and 4"):
        rows.add_(SITE, case.x[:3], case.y)
    with pytest.raises(ValueError, match="a part of an adapter has no size"):
        NativeAdapter({0: (LoraPart(torch.ones(1, 2), torch.ones(0, 1), 1.0),)})


def test_layers_without_parts_are_known() -> None:
    case = Case(1, 4, 40, [24], [8], torch.float32)
    packed = [NativeAdapter(parts) for parts in case.adapters]
    assert NativeLoraRows(packed, torch.tensor([0, -1], dtype=torch.int32)).has(SITE)
    assert not NativeLoraRows(packed, torch.tensor([0], dtype=torch.int32)).has(SITE + 1)
    assert not NativeLoraRows(packed, torch.tensor([-1], dtype=torch.int32)).has(SITE)


@pytest.mark.parametrize("block", [0, 1])
def test_one_expert_gets_its_own_change_alone(block: int) -> None:
    """A layer without a kernel for its experts asks for one of them at a time."""
    g = torch.Generator().manual_seed(block)
    shapes = ((2, 8), (5, 2), (3, 8), (3, 5))
    a, b, x, y = (torch.randn(*shape, generator=g) for shape in shapes)
    parts = {SITE: tuple(LoraPart(a + k, b - k, 0.5, block=k) for k in range(3))}
    of, wanted = torch.tensor([0, -1, 0], dtype=torch.int32), y.clone()
    wanted[::2] += 0.5 * x[::2] @ (a + block).T @ (b - block).T
    NativeLoraRows([NativeAdapter(parts)], of).add_(SITE, x, y, block)
    torch.testing.assert_close(y, wanted)
