"""Copies of whole pages, all layers in one launch: within a pool, from a pool into contiguous rows
(to send them or keep them on the host), and back.

A tensor of a pool is [L, P, ...]: a layer's page is one run of memory, moved as words.
Legend: L layers, P pages, N pages to move.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixlm.kernels.triton.launch import cdiv, launch
from radixlm.kernels.triton.mode import runs_on

_BLOCK = 2048  # words of a program


@triton.jit(do_not_specialize=["num_words"])
def move_kernel(
    source_ptr, target_ptr, from_ptr, to_ptr, num_words, source_layer, source_page, target_layer,
    target_page, FROM: tl.constexpr, TO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (n, l, i): block i of layer l of page n, from page from[n] (n without FROM) to page
    to[n] (n without TO). Distances are in words."""
    page, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    source, target = page, page
    if FROM:
        source = tl.load(from_ptr + page)
    if TO:
        target = tl.load(to_ptr + page)
    source_ptr += layer * source_layer + source * source_page
    target_ptr += layer * target_layer + target * target_page
    words = tl.load(source_ptr + word, mask=word < num_words)
    tl.store(target_ptr + word, words, mask=word < num_words)


def takes(pool: Tensor) -> bool:
    """Whether pages of a tensor [L, P, ...] can be moved."""
    return runs_on(pool) and pool.is_contiguous() and pool.numel() > 0


def _words(x: Tensor) -> Tensor:
    """[L, P, words of a page]: words of 4 bytes where a page is made of such."""
    flat = x.view(torch.uint8).flatten(2)
    return flat.view(torch.int32) if flat.shape[2] % 4 == 0 else flat


def _index(pages: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    if isinstance(pages, Tensor):
        return pages.to(device, torch.int64)
    index = torch.tensor(pages, dtype=torch.int64)
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index


def _move(source: Tensor, target: Tensor, of: Tensor | None, to: Tensor | None, num: int) -> None:
    a, b = _words(source), _words(target)
    num_layers, num_words = a.shape[0], a.shape[2]
    launch(
        move_kernel, (num, num_layers, cdiv(num_words, _BLOCK)),
        (a, b, a if of is None else of, b if to is None else to),
        (num_words, a.stride(0), a.stride(1), b.stride(0), b.stride(1)),
        FROM=of is not None, TO=to is not None, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


def gather_pages(pool: Tensor, pages: Sequence[int] | Tensor, out: Tensor | None = None) -> Tensor:
    """[L, N, ...]: contiguous copies of ``pages``, in ``out`` if given."""
    index = _index(pages, pool.device)
    if out is None:
        out = pool.new_empty(pool.shape[0], index.shape[0], *pool.shape[2:])
    if index.shape[0]:
        _move(pool, out, index, None, index.shape[0])
    return out


def scatter_pages(pool: Tensor, pages: Sequence[int] | Tensor, rows: Tensor) -> None:
    """The inverse of ``gather_pages``; no page may be named twice."""
    index = _index(pages, pool.device)
    if index.shape[0]:
        _move(rows.contiguous(), pool, None, index, index.shape[0])


def copy_pages(pool: Tensor, source: Sequence[int], target: Sequence[int]) -> None:
    """Copy pages inside the pool; all reads happen before any write."""
    if set(source) & set(target):
        scatter_pages(pool, target, gather_pages(pool, source))
    elif source:
        of, to = _index(source, pool.device), _index(target, pool.device)
        _move(pool, pool, of, to, len(source))
