"""Attention over a paged cache by any backend, and its float64 reference.

Legend: T query tokens, S sequences, H query heads, K KV heads, C channels, P pages a sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpu.session import Session
from radixlm.attention.base import AttentionBackend
from radixlm.attention.select import make_backend
from radixlm.kernels.dispatch import bind
from radixlm.pools.group import KvGroup
from radixlm.pools.pool import PagedPool
from radixlm.step.batch import AttentionSite, ForwardBatch

PAGE = 16


@dataclass(frozen=True, slots=True)
class Heads:
    """Head counts and sizes of a layer."""

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    window: int = 0


@dataclass(slots=True)
class Case:
    """One step over randomly shuffled pages: (query tokens, tokens before them) of each
    sequence."""

    s: Session
    name: str
    shapes: list[tuple[int, int]]
    heads: Heads
    dtype: torch.dtype
    backend: AttentionBackend = field(init=False)
    batch: ForwardBatch = field(init=False)
    rows: tuple[Tensor, Tensor, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        s, h = self.s, self.heads
        group = KvGroup(0, "full", (0,), h.kv_heads, h.dim, h.dim)
        self.backend = make_backend(self.name, (group,), bind(s.device.type), s.device)
        width = max(-(-sum(shape) // PAGE) for shape in self.shapes)
        count = width * len(self.shapes)
        pool = self.backend.make_pool(group, count + 1, PAGE, self.dtype)
        assert isinstance(pool, PagedPool) and pool.v_LPBKV is not None
        for tensor in (pool.k_LPBKC, pool.v_LPBKV):
            tensor.normal_()
        pages = torch.randperm(count, device=s.device).int().view(-1, width) + 1
        self.batch = self._batch(pages)
        num = sum(new for new, _ in self.shapes)
        q, k, v = (
            s.normal(num, heads, h.dim, dtype=self.dtype) for heads in (h.heads, *[h.kv_heads] * 2)
        )
        self.rows = q, k, v

    def _batch(self, pages_SP: Tensor) -> ForwardBatch:
        device, shapes = self.s.device, self.shapes
        counts = torch.tensor([new for new, _ in shapes], device=device)
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        positions = torch.cat([torch.arange(b, b + n, device=device) for n, b in shapes])
        seq = torch.repeat_interleave(torch.arange(len(shapes), device=device), counts)
        store = pages_SP[seq, positions // PAGE].long() * PAGE + positions % PAGE
        return ForwardBatch(
            token_ids_T=torch.zeros_like(positions),
            positions_T=positions,
            rope_len_T=positions + 1,
            query_start_S1=starts,
            kv_len_S=torch.tensor([sum(x) for x in shapes], device=device, dtype=torch.int32),
            page_table_GSP=(pages_SP,),
            store_GT=(store,),
            logits_rows_R=starts[1:].long() - 1,
            attn=self.backend,
            max_query_len=max(new for new, _ in shapes),
            max_kv_len=max(sum(shape) for shape in shapes),
            is_decode=all(new == 1 for new, _ in shapes),
        )

    @property
    def site(self) -> AttentionSite:
        h = self.heads
        scale = 1 / math.sqrt(h.dim)
        return AttentionSite(0, 0, h.heads, h.kv_heads, h.dim, h.dim, scale, window=h.window)

    def begin(self) -> None:
        """Call once before `run`."""
        self.backend.begin(self.batch)

    def run(self) -> Tensor:
        """Store and attend; [T, H * C]."""
        return self.backend.run(*self.rows, self.site)

    def stored(self) -> tuple[Tensor, Tensor]:
        """K and V rows of the step as read back from the cache, [T, K, C]."""
        pool = self.backend.pools[0]
        assert isinstance(pool, PagedPool) and pool.v_LPBKV is not None
        slots = self.batch.store_GT[0]
        return tuple(x[0].flatten(0, 1)[slots] for x in (pool.k_LPBKC, pool.v_LPBKV))  # type: ignore[return-value]

    def expected(self) -> Tensor:
        """The float64 result [T, H * C], computed from the cache after `run`."""
        pool, outs, at = self.backend.pools[0], [], 0
        assert isinstance(pool, PagedPool) and pool.v_LPBKV is not None
        for row, (new, before) in enumerate(self.shapes):
            places = torch.arange(new + before, device=self.s.device)
            slots = self.batch.page_table_GSP[0][row, places // PAGE].long() * PAGE + places % PAGE
            k, v = (x[0].flatten(0, 1)[slots].double() for x in (pool.k_LPBKC, pool.v_LPBKV))
            outs.append(self._attend(self.rows[0][at : at + new].double(), k, v, before))
            at += new
        return torch.cat(outs)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, before: int) -> Tensor:
        group = self.heads.heads // self.heads.kv_heads
        scores = torch.einsum("qkgc,nkc->kgqn", q.unflatten(1, (-1, group)), k) * self.site.scale  # type: ignore[no-untyped-call]
        ahead = torch.arange(len(k), device=q.device) - (
            torch.arange(len(q), device=q.device)[:, None] + before
        )
        hidden = ahead > 0
        if self.heads.window:
            hidden |= ahead <= -self.heads.window
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return torch.einsum("kgqn,nkc->qkgc", weights, v).flatten(1)
