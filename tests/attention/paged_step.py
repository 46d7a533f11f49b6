"""One step of a backend over pages that already hold the earlier tokens, shuffled among pages of
NaN.

`run_case` of tests/fakes computes the earlier tokens in a step of their own, which is too slow in
Triton's interpreter.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import torch
from tests.fakes.attention_case import Case
from torch import Tensor

from radixlm.attention.select import make_backend
from radixlm.kernels.dispatch import Kernels, bind
from radixlm.pools.group import KvGroup
from radixlm.step.batch import AttentionSite, ForwardBatch

CPU = torch.device("cpu")


def open_backend(
    name: str,
    case: Case,
    site: AttentionSite,
    device: torch.device = CPU,
    kernels: Kernels | None = None,
) -> tuple[Any, Tensor]:
    """A backend whose pool holds all tokens before the step, and its page table."""
    layers = tuple(range(site.layer + 1))
    group = KvGroup(
        0, "full", layers, site.kv_heads, site.head_dim, site.v_dim, site.latent, site.window
    )
    backend = make_backend(
        name, (group,), kernels or bind(device.type, {"all": "reference"}), device
    )
    size = case.page_size
    counts = [-(-len(k) // size) for k in case.k]
    num_pages = sum(counts) + 3
    pool = backend.make_pool(group, num_pages, size, case.cache_dtype)
    nan_k = torch.full((num_pages * size, site.kv_heads, site.head_dim), torch.nan)
    nan_v = None if site.latent else nan_k[..., :1].expand(-1, -1, site.v_dim)
    for layer in layers:
        parts = [x if x is None else x.to(device) for x in (nan_k, nan_v)]
        pool.write(layer, range(num_pages), *parts)
    order = random.Random(case.seed).sample(range(num_pages), num_pages)
    table = torch.full((len(counts), max(counts, default=1)), 1 << 30, dtype=torch.int32)
    for row, count in enumerate(counts):
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    for row, (q, k, v) in enumerate(zip(case.q, case.k, case.v, strict=True)):
        before = len(k) - len(q)
        slots = slots_of(table, torch.full((before,), row), torch.arange(before), size)
        rows = [x[:before].to(device) for x in (k, v)]
        pool.store(site.layer, slots.to(device), rows[0], None if site.latent else rows[1])
    return backend, table.to(device)


def slots_of(table: Tensor, row: Tensor, position: Tensor, page_size: int) -> Tensor:
    """int64 slots where tokens are stored."""
    return table[row, position // page_size].long() * page_size + position % page_size


def make_batch(
    case: Case, table: Tensor, backend: Any, bidirectional_spans: tuple[tuple[int, int], ...] = ()
) -> ForwardBatch:
    """The step of a case."""
    counts = [len(q) for q in case.q]
    kv_len = [len(k) for k in case.k]
    ranges = [torch.arange(n - c, n) for n, c in zip(kv_len, counts, strict=True)]
    position = torch.cat(ranges)
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    device = table.device
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    position, owner = position.to(device), owner.to(device)
    return ForwardBatch(
        token_ids_T=torch.zeros(len(position), dtype=torch.int64, device=device),
        positions_T=position,
        rope_len_T=position,
        query_start_S1=starts.to(device),
        kv_len_S=torch.tensor(kv_len, dtype=torch.int32, device=device),
        page_table_GSP=(table,),
        store_GT=(slots_of(table, owner, position, case.page_size),),
        logits_rows_R=torch.arange(len(position), device=device),
        attn=backend,
        max_query_len=max(counts),
        max_kv_len=max(kv_len),
        bidirectional_spans=bidirectional_spans,
    )


def new_rows(
    case: Case, site: AttentionSite, dtype: torch.dtype, device: torch.device = CPU
) -> Sequence[Tensor | None]:
    """q, k and v of the step's tokens."""
    parts = [
        (q, k[len(k) - len(q) :], v[len(k) - len(q) :])
        for q, k, v in zip(case.q, case.k, case.v, strict=True)
    ]
    q, k, v = (torch.cat([part[i] for part in parts]).to(device, dtype) for i in range(3))
    return q, k, None if site.latent else v


def run_step(
    name: str,
    case: Case,
    site: AttentionSite,
    dtype: torch.dtype = torch.float32,
    prepare: Any = None,
    bidirectional_spans: tuple[tuple[int, int], ...] = (),
    device: torch.device = CPU,
    ignores_window: bool = False,
) -> Tensor:
    """[T, heads * v_dim] of the case's step. `prepare(backend)` runs after `begin`."""
    backend, table = open_backend(name, case, site, device)
    batch = make_batch(case, table, backend, bidirectional_spans)
    batch.spans_ignore_window = ignores_window
    backend.begin(batch)
    if prepare is not None:
        prepare(backend)
    out: Tensor = backend.run(*new_rows(case, site, dtype, device), site)
    return out
