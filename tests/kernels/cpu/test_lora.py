"""LoRA kernels against float64, in different batches, and refused inputs."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from radixlm.kernels.cpu import lora
from radixlm.kernels.ops.lora import AdapterRows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Case:
    """Adapters of different ranks, and tokens that the adapter of each sequence changes."""

    def __init__(
        self, seed: int, lengths: list[int], num_in: int, widths: list[int], ranks: list[int],
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.g = torch.Generator().manual_seed(seed)
        self.widths, self.lengths, rank = widths, lengths, max(ranks)
        self.a = self.rand(len(ranks), len(widths), rank, num_in).div(num_in**0.5).to(dtype)
        self.b = self.rand(len(ranks), sum(widths), rank).div(rank**0.5).to(dtype)
        for adapter, used in enumerate(ranks):
            self.a[adapter, :, used:], self.b[adapter, :, used:] = 0, 0
        self.ranks = torch.tensor(ranks, dtype=torch.int32)
        self.scale = self.rand(len(ranks))
        wide = self.rand(sum(lengths), num_in + sum(widths) + 3)  # rows of a wider matrix
        self.x, self.y = wide[:, :num_in], wide[:, num_in + 3 :]
        self.adapters = torch.randint(-1, len(ranks), (len(lengths),), generator=self.g).tolist()

    def rand(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.g)

    def rows(self, adapters: list[int], lengths: list[int], hint: bool = False) -> AdapterRows:
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        ranks = self.ranks if hint else None
        return AdapterRows(torch.tensor(adapters, dtype=torch.int32), starts, max(lengths), ranks)

    def run(self, rows: AdapterRows, span: slice = slice(None), threads: int = 0) -> list[Tensor]:
        """h and the changed y of the tokens."""
        y = self.y[span].clone()
        h = lora.lora_shrink(self.x[span], self.a, rows, threads)
        lora.lora_expand_(y, h, self.b, self.scale, self.widths, rows, threads)
        return [h, y]

    def exact(self) -> list[Tensor]:
        """The same as `run`, in float64, token by token."""
        a, b, x, y = (t.double() for t in (self.a, self.b, self.x, self.y))
        h = torch.zeros(len(x), *a.shape[1:3], dtype=torch.float64)
        owners = [
            n for n, count in zip(self.adapters, self.lengths, strict=True) for _ in range(count)
        ]
        for token, adapter in enumerate(owners):
            if adapter < 0:
                continue
            h[token] = a[adapter] @ x[token]
            parts = zip(b[adapter].split(self.widths), h[token], strict=True)
            delta = torch.cat([part @ numbers for part, numbers in parts])
            y[token] += float(self.scale[adapter]) * delta
        return [h, y]


def near(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(
        float((g - w).abs().max()) < 5e-6 * max(1.0, float(w.abs().max()))
        for g, w in zip(got, want, strict=True)
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1 << 20), lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    num_in=st.integers(1, 300), widths=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    ranks=st.lists(st.integers(1, 70), min_size=1, max_size=4), dtype=st.sampled_from(DTYPES),
    threads=st.integers(1, 2), hint=st.booleans(),
)  # fmt: skip
def test_equals_float64(
    seed: int, lengths: list[int], num_in: int, widths: list[int], ranks: list[int],
    dtype: torch.dtype, threads: int, hint: bool,
) -> None:  # fmt: skip
    case = Case(seed, lengths, num_in, widths, ranks, dtype)
    got = case.run(case.rows(case.adapters, lengths, hint), threads=threads)
    assert near(got, case.exact())
    bounds = pairwise(torch.tensor([0, *lengths]).cumsum(0).tolist())
    for adapter, (first, end) in zip(case.adapters, bounds, strict=True):
        assert adapter >= 0 or torch.equal(got[1][first:end], case.y[first:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    """A prompt, several rows and single rows, over inputs that are cut into slices."""
    case = Case(3, [70, 1, 5, 1, 30], 2500, [70, 20], [16, 5, 33], dtype)
    adapters = [2, 0, 2, 1, 0]
    together = case.run(case.rows(adapters, case.lengths), threads=2)
    hinted = case.run(case.rows(adapters, case.lengths, hint=True), threads=1)
    assert all(torch.equal(a, b) for a, b in zip(together, hinted, strict=True))
    first = 0
    for adapter, length in zip(adapters, case.lengths, strict=True):
        for token in {first, first + length - 1}:
            span = slice(token, token + 1)
            alone = case.run(case.rows([adapter], [1]), span)
            assert all(torch.equal(a, b[span]) for a, b in zip(alone, together, strict=True))
        first += length


def test_other_dtypes_run_the_reference() -> None:
    case = Case(1, [3, 2], 40, [24], [8], torch.bfloat16)
    rows = case.rows([0, -1], case.lengths)
    h = lora.lora_shrink(case.x.bfloat16(), case.a, rows)
    wanted = case.run(rows)[0]
    assert h.dtype == torch.float32 and not h[3:].any()
    torch.testing.assert_close(h, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("adapters", "starts", "ranks", "message"),
    [
        ([0, 2], [0, 2, 4], [8, 8], "an adapter that is not there"),
        ([0, 1], [0, 3, 2], [8, 8], "follow each other"),
        ([0, 1], [0, 2, 5], [8, 8], "follow each other"),
        ([-1, -1], [-1, 2, 4], [8, 8], "follow each other"),
        ([0, 1], [0, 4], [8, 8], "expected 3 numbers"),
        ([0, 1], [0, 2, 4], [8, 9], "rank of an adapter"),
        ([0, 1], [0, 2, 4], [8], "expected 2 numbers"),
    ],
)
def test_steps_out_of_bounds_are_refused(
    adapters: list[int], starts: list[int], ranks: list[int], message: str
) -> None:
    case = Case(1, [2, 2], 40, [24], [8, 8], torch.float32)
    rows = AdapterRows(torch.tensor(adapters), torch.tensor(starts), 2, torch.tensor(ranks))
    with pytest.raises(ValueError, match=message):
        lora.lora_shrink(case.x, case.a, rows)
    with pytest.raises(ValueError, match=message):
        lora.lora_expand_(case.y, torch.zeros(4, 1, 8), case.b, case.scale, [24], rows)


def test_shapes_that_do_not_fit_are_refused() -> None:
    case = Case(1, [2, 2], 40, [24], [8, 8], torch.float32)
    rows = case.rows([0, 1], [2, 2])
    with pytest.raises(ValueError, match="expected 40 channels"):
        lora.lora_shrink(case.x[:, :39], case.a, rows)
    h = torch.zeros(4, 1, 8)
    for y, widths in ((case.y[:, :23], [24]), (case.y, [20]), (case.y, [25, -1])):
        with pytest.raises(ValueError, match="do not fit"):
            lora.lora_expand_(y, h, case.b, case.scale, widths, rows)
    with pytest.raises(ValueError, match="h: expected"):
        lora.lora_expand_(case.y, h, case.b, case.scale, [12, 12], rows)
