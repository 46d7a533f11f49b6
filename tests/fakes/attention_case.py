"""A random attention problem, and its run through a backend over shuffled pages."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from radixlm.attention.select import make_backend
from radixlm.base.record import Record
from radixlm.kernels.dispatch import Kernels, bind
from radixlm.pools.group import KvGroup
from radixlm.step.batch import AttentionSite, ForwardBatch

CPU = torch.device("cpu")


class Case(Record):
    """For each sequence: q [queries, H, C] of its last tokens, k and v of all its tokens."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    page_size: int
    seed: int
    cache_dtype: torch.dtype = torch.float32

    @classmethod
    def random(
        cls,
        site: AttentionSite,
        shapes: list[tuple[int, int]],
        page_size: int,
        seed: int,
        cache_dtype: torch.dtype = torch.float32,
    ) -> Case:
        """`shapes` holds (queries, tokens before them) of each sequence."""
        g = torch.Generator().manual_seed(seed)
        q = [torch.randn(n, site.heads, site.head_dim, generator=g) for n, _ in shapes]
        k = [torch.randn(n + m, site.kv_heads, site.head_dim, generator=g) for n, m in shapes]
        v = [torch.randn(n + m, site.kv_heads, site.v_dim, generator=g) for n, m in shapes]
        return cls(q, k, v, page_size, seed, cache_dtype)


def run_case(
    case: Case,
    site: AttentionSite,
    backend_name: str,
    poison: bool = False,
    kernels: Kernels | None = None,
    forget: bool = False,
    bidirectional_spans: tuple[tuple[int, int], ...] = (),
    ignores_window: bool = False,
) -> list[Tensor]:
    """Outputs [queries, H * V] of each sequence. `poison` fills unowned memory with NaN; `forget`
    overwrites table entries of pages outside every query's window; `bidirectional_spans`: spans of
    the packed queries that attend in both directions."""
    num_layers = site.layer + 1
    group = KvGroup(
        0, "full", tuple(range(num_layers)), site.kv_heads, site.head_dim, site.v_dim, site.latent
    )
    kernels = kernels or bind("cpu", {"all": "reference"})
    backend = make_backend(backend_name, (group,), kernels, CPU)
    counts = [-(-len(k) // case.page_size) for k in case.k]
    num_pages = sum(counts) + 3
    pool = backend.make_pool(group, num_pages, case.page_size, case.cache_dtype)
    order = random.Random(case.seed).sample(range(num_pages), num_pages)
    if poison:
        _poison(pool, group, num_pages, num_layers)
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = torch.tensor([order.pop() for _ in range(count)])
    # tokens before the queries are computed in a step of their own
    before = [(k[: len(k) - len(q)], v[: len(k) - len(q)]) for q, k, v in _rows(case)]
    if any(len(k) for k, _ in before):
        q = [torch.zeros(len(k), site.heads, site.head_dim) for k, _ in before]
        _step(case, site, backend, tables, q, before, [len(k) for k, _ in before])
    if forget:
        for row, (q, k) in enumerate(zip(case.q, case.k, strict=True)):
            first = max(0, len(k) - len(q) - site.window + 1)
            tables[row, : first // case.page_size] = 1 << 30
    now = [(k[len(k) - len(q) :], v[len(k) - len(q) :]) for q, k, v in _rows(case)]
    lengths = [len(k) for k in case.k]
    out = _step(
        case, site, backend, tables, case.q, now, lengths, bidirectional_spans, ignores_window
    )
    return list(out.split([len(q) for q in case.q]))


def _rows(case: Case) -> list[tuple[Tensor, Tensor, Tensor]]:
    return list(zip(case.q, case.k, case.v, strict=True))


def _poison(pool: Any, group: KvGroup, num_pages: int, num_layers: int) -> None:
    for layer in range(num_layers):
        k, v = pool.read(layer, range(num_pages))
        nan_v = None if v is None else torch.full_like(v, torch.nan)
        pool.write(layer, range(num_pages), torch.full_like(k, torch.nan), nan_v)


def _step(
    case: Case,
    site: AttentionSite,
    backend: Any,
    tables: Tensor,
    q: list[Tensor],
    kv: list[tuple[Tensor, Tensor]],
    kv_len: list[int],
    bidirectional_spans: tuple[tuple[int, int], ...] = (),
    ignores_window: bool = False,
) -> Tensor:
    keep = [i for i, rows in enumerate(q) if len(rows)]
    counts = [len(q[i]) for i in keep]
    position = torch.cat([torch.arange(kv_len[i] - len(q[i]), kv_len[i]) for i in keep])
    owner = torch.repeat_interleave(torch.tensor(keep), torch.tensor(counts))
    size = case.page_size
    store = tables[owner, position // size].long() * size + position % size
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    batch = ForwardBatch(
        token_ids_T=torch.zeros(len(position), dtype=torch.int64),
        positions_T=position,
        rope_len_T=position,
        query_start_S1=starts,
        kv_len_S=torch.tensor([kv_len[i] for i in keep], dtype=torch.int32),
        page_table_GSP=(tables[keep].contiguous(),),
        store_GT=(store,),
        logits_rows_R=torch.arange(len(position)),
        attn=backend,
        max_query_len=max(counts),
        max_kv_len=max(kv_len[i] for i in keep),
        bidirectional_spans=bidirectional_spans,
        spans_ignore_window=ignores_window,
    )
    backend.begin(batch)
    k, v = torch.cat([kv[i][0] for i in keep]), torch.cat([kv[i][1] for i in keep])
    out: Tensor = backend.run(torch.cat([q[i] for i in keep]), k, None if site.latent else v, site)
    return out
