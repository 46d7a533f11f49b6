"""LoRA: the reference against dense weights, the kernels against the reference."""

from __future__ import annotations

import pytest
import torch

from radixlm.kernels.ops import lora as reference
from radixlm.kernels.ops.lora import AdapterRows
from radixlm.kernels.triton import lora

WIDTHS = (70, 20, 20)


def rows_of(adapters: list[int], lengths: list[int]) -> AdapterRows:
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return AdapterRows(torch.tensor(adapters, dtype=torch.int32), starts, max(lengths))


def case(rank: int, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens, 150, generator=g).to(dtype)
    a = (torch.randn(3, len(WIDTHS), rank, 150, generator=g) / 12).to(dtype)
    b = (torch.randn(3, sum(WIDTHS), rank, generator=g) / rank**0.5).to(dtype)
    y = torch.randn(tokens, sum(WIDTHS), generator=g).to(dtype)
    return x, a, b, y, torch.tensor([0.5, 2.0, 1.0])


def test_reference_is_a_dense_delta() -> None:
    rows = rows_of([2, -1, 0], [3, 2, 4])
    x, a, b, y, scale = case(8, 9, torch.float32)
    expected = y.clone()
    for token, adapter in enumerate([2] * 3 + [-1] * 2 + [0] * 4):
        if adapter >= 0:
            parts = zip(b[adapter].split(WIDTHS), a[adapter], strict=True)
            weight = torch.cat([p @ q for p, q in parts])
            expected[token] += scale[adapter] * (weight @ x[token])
    reference.lora_expand_(y, reference.lora_shrink(x, a, rows), b, scale, WIDTHS, rows)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("rank", "dtype"),
    [(1, torch.float32), (33, torch.float32), (8, torch.float16), (128, torch.bfloat16)],
)
def test_kernels_match_the_reference(rank: int, dtype: torch.dtype) -> None:
    rows = rows_of([1, -1, 0, 1], [17, 5, 1, 3])
    x, a, b, y, scale = case(rank, 26, dtype)
    h, wanted_h = lora.lora_shrink(x, a, rows), reference.lora_shrink(x, a, rows)
    torch.testing.assert_close(h, wanted_h, rtol=2e-5, atol=2e-5)
    wanted, before = y.clone(), y.clone()
    reference.lora_expand_(wanted, wanted_h, b, scale, WIDTHS, rows)
    lora.lora_expand_(y, h, b, scale, WIDTHS, rows)
    limit = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(y, wanted, rtol=limit, atol=limit)
    assert torch.equal(y[17:22], before[17:22])


def test_a_token_has_the_same_bits_in_any_batch() -> None:
    x, a, b, y, scale = case(16, 8, torch.float32)
    rows, alone = rows_of([0, 1, 1, 0], [2, 2, 1, 3]), rows_of([1], [1])
    h = lora.lora_shrink(x, a, rows)
    one = y[4:5].clone()
    lora.lora_expand_(one, lora.lora_shrink(x[4:5], a, alone), b, scale, WIDTHS, alone)
    lora.lora_expand_(y, h, b, scale, WIDTHS, rows)
    assert torch.equal(one, y[4:5])
