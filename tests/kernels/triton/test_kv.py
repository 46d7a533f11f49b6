"""Page copies by the kernel against indexing."""

from __future__ import annotations

import pytest
import torch

from radixlm.kernels.ops.kv import indexable_view
from radixlm.kernels.triton import kv

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]


def pool_of(dtype: torch.dtype, channels: int = 5) -> torch.Tensor:
    shape = (3, 9, 4, 2, channels)
    x = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(0))
    return x.to(torch.int8).view(dtype) if dtype.itemsize == 1 else x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("source", "target"),
    [([0, 4, 8], [7, 1, 2]), ([3, 5, 6], [5, 6, 3]), ([1, 1], [2, 3]), ([], [])],
)
def test_copies_read_before_they_write(
    dtype: torch.dtype, source: list[int], target: list[int]
) -> None:
    pool, expected = pool_of(dtype), pool_of(dtype)
    indexable_view(expected)[:, target] = indexable_view(expected)[:, source]
    kv.copy_pages(pool, source, target)
    assert torch.equal(indexable_view(pool), indexable_view(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_are_read_and_written_back(dtype: torch.dtype) -> None:
    pool, pages = pool_of(dtype, 700), [8, 0, 3]  # more than one block of words
    rows = kv.gather_pages(pool, pages)
    assert torch.equal(indexable_view(rows), indexable_view(pool)[:, pages])
    other = torch.zeros_like(pool)
    kv.scatter_pages(other, torch.tensor([2, 6, 1]), rows)
    expected = torch.zeros_like(pool)
    indexable_view(expected)[:, [2, 6, 1]] = indexable_view(rows)
    assert torch.equal(indexable_view(other), indexable_view(expected))
    kept = torch.empty_like(rows)
    assert kv.gather_pages(pool, pages, kept) is kept
    assert torch.equal(indexable_view(kept), indexable_view(rows))


def test_an_odd_number_of_bytes_is_moved_byte_by_byte() -> None:
    pool = pool_of(torch.int8, 5)[:, :, :1, :1].contiguous()
    assert torch.equal(kv.gather_pages(pool, [4, 2]), pool[:, [4, 2]])
