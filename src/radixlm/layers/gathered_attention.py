"""Attention over keys gathered out of the cache, sequence by sequence, for masks that no backend's
kernel has (one for each head, or depending on the keys). It reads the pool of any backend; a
token's numbers do not depend on the rest of the step (``kernels/products``). Where a pool has a
kernel for it, tokens read only what an index has chosen.

Legend: T packed tokens, Q query tokens of a chunk, N tokens of its sequence, H query heads, K KV
heads, C channels of K, V of V, R of an index's part of a row of K, behind C; G choices, each for
as many heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from radixlm.arch.spec import BlockSparse
from radixlm.base.record import Record
from radixlm.kernels.products import head_averages, head_products
from radixlm.pools.pool import ChosenReader
from radixlm.step.batch import AttentionSite, ForwardBatch

MAX_SCORES = 1 << 24  # numbers of the score matrix at once; longer chunks of queries are split


class IndexChunk(Record):
    """Some query tokens of one sequence, and what an index keeps of all tokens up to the last."""

    rows: slice  # of T
    positions_Q: Tensor  # int64: positions of the queries; those of the keys are 0 .. N - 1
    sequence: int  # which of the step's it is of
    index_NKR: Tensor

    @property
    def causal_QN(self) -> Tensor:
        """bool: keys that are not after the query."""
        return self.distance_QN >= 0

    @property
    def distance_QN(self) -> Tensor:
        """Distance from each key to the query in tokens."""
        places = torch.arange(self.index_NKR.shape[0], device=self.positions_Q.device)
        return self.positions_Q[:, None] - places


class QueryChunk(IndexChunk):
    """With all keys and values up to the last query."""

    k_NKC: Tensor
    v_NKV: Tensor


Choose = Callable[[IndexChunk], Tensor]  # bool [Q, N] or [G, Q, N]: what each query reads


def attend_gathered(
    q_THC: Tensor,
    k_TKC: Tensor | None,
    v_TKV: Tensor | None,
    site: AttentionSite,
    batch: ForwardBatch,
    choose: Callable[[QueryChunk], Tensor],
    bias: Callable[[QueryChunk], Tensor] | None = None,
    sinks_TH: Tensor | None = None,
) -> Tensor:
    """Store the step's keys, attend to what ``choose`` leaves: [T, heads * v_dim] as q. ``bias``
    joins the scores: float32 [H, Q, N]. ``sinks_TH``: of each token, in place of the site's."""
    _store(k_TKC, v_TKV, site, batch)
    out_THV = q_THC.new_zeros(q_THC.shape[0], site.heads, site.v_dim)
    for chunk in query_chunks(batch, site, q_THC):
        more = None if bias is None else bias(chunk)
        parts = ((q_THC[chunk.rows], slice(None)),)
        sinks = site.sinks if sinks_TH is None else sinks_TH[chunk.rows].T
        out_THV[chunk.rows] = attend_parts(parts, chunk, choose(chunk), site, more, sinks)
    return out_THV.flatten(1)


def attend_chosen(
    q_THC: Tensor,
    k_TKC: Tensor | None,
    v_TKV: Tensor | None,
    site: AttentionSite,
    batch: ForwardBatch,
    choose: Choose,
    runs: tuple[int, int] = (1, 1),
) -> Tensor:
    """``attend_gathered``, where tokens read only what they choose, if the pool has a kernel for
    that. ``runs``: G, and the tokens that are chosen together."""
    pool = batch.attn.pools[site.group]
    reader = pool.chosen_reader(site, q_THC.shape[2], runs)
    if reader is None:
        return attend_gathered(q_THC, k_TKC, v_TKV, site, batch, choose)
    _store(k_TKC, v_TKV, site, batch)
    out_THV = q_THC.new_zeros(q_THC.shape[0], site.heads, site.v_dim)
    for chunk, pages in _index_chunks(batch, site, reader):
        chosen = choose(chunk)
        chosen_GQN = chosen.view(-1, *chosen.shape[-2:])
        out_THV[chunk.rows] = reader.run(q_THC[chunk.rows], pages, chosen_GQN).to(out_THV.dtype)
    return out_THV.flatten(1)


def _store(
    k_TKC: Tensor | None, v_TKV: Tensor | None, site: AttentionSite, batch: ForwardBatch
) -> None:
    if k_TKC is not None:
        pool = batch.attn.pools[site.group]
        pool.store(site.layer, batch.store_GT[site.group], k_TKC, v_TKV)


def _sequences(batch: ForwardBatch) -> Iterator[tuple[int, slice, int]]:
    """The step's sequences that have tokens: (sequence, rows of T, tokens up to the last)."""
    starts = batch.query_start_S1.tolist()
    for sequence, length in enumerate(batch.kv_len_S.tolist()):
        rows = slice(starts[sequence], starts[sequence + 1])
        if rows.start < rows.stop:
            yield sequence, rows, length


def _parts(rows: slice, length: int, heads: int) -> Iterator[tuple[slice, int]]:
    """The rows of a sequence, many of them in parts, each with the tokens up to its last."""
    step = max(1, MAX_SCORES // (heads * length))
    for first in range(rows.start, rows.stop, step):
        last = min(first + step, rows.stop)
        yield slice(first, last), length - (rows.stop - last)


def _positions(rows: slice, until: int, device: torch.device) -> Tensor:
    return torch.arange(until - (rows.stop - rows.start), until, device=device)


def _index_chunks(
    batch: ForwardBatch, site: AttentionSite, reader: ChosenReader
) -> Iterator[tuple[IndexChunk, Tensor]]:
    """Chunks and the pages of their tokens."""
    size, table_SP = batch.attn.pools[site.group].page_size, batch.page_table_GSP[site.group]
    for sequence, whole, length in _sequences(batch):
        pages = table_SP[sequence, : -(-length // size)].long()
        index_NKR = reader.index(pages)
        for rows, until in _parts(whole, length, site.heads):
            positions_Q = _positions(rows, until, index_NKR.device)
            chunk = IndexChunk(rows, positions_Q, sequence, index_NKR[:until])
            yield chunk, pages[: -(-until // size)]


def query_chunks(batch: ForwardBatch, site: AttentionSite, q_THC: Tensor) -> Iterator[QueryChunk]:
    """The step's sequences, long ones split into chunks, keys and values as q."""
    pool, table_SP = batch.attn.pools[site.group], batch.page_table_GSP[site.group]
    width, dtype = q_THC.shape[2], q_THC.dtype
    for sequence, whole, length in _sequences(batch):
        pages = table_SP[sequence, : -(-length // pool.page_size)].tolist()
        k, v = pool.read(site.layer, pages)
        k = k[:length].to(dtype)
        v = k[..., : site.v_dim] if v is None else v[:length].to(dtype)
        for rows, until in _parts(whole, length, site.heads):
            positions_Q, seen = _positions(rows, until, k.device), k[:until]
            yield QueryChunk(rows, positions_Q, sequence, seen[..., width:], seen, v[:until])


def attend_parts(
    parts: Sequence[tuple[Tensor, slice]],
    chunk: QueryChunk,
    chosen: Tensor,
    site: AttentionSite,
    bias_HQN: Tensor | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """[Q, H, V] of one chunk. ``parts``: queries [Q, H, C] and the keys that they score; together
    all keys, in order. ``sinks_H`` may be [H, Q]."""
    k_NKC, width = chunk.k_NKC, parts[0][0].shape[-1]  # a row of the cache may hold more
    scores = torch.cat(
        [head_products(q.transpose(0, 1), k_NKC[keys, :, :width]) for q, keys in parts], -1
    )
    scores = scores * site.scale
    if site.softcap:
        scores = torch.tanh(scores / site.softcap) * site.softcap
    if bias_HQN is not None:
        scores = scores + bias_HQN
    mask = (chosen & chunk.causal_QN).view(-1, *chosen.shape[-2:])
    mask = mask.repeat_interleave(site.heads // len(mask), 0)
    return head_averages(scores.masked_fill(~mask, -torch.inf), chunk.v_NKV, sinks_H)


def causal_choice(chunk: IndexChunk) -> Tensor:
    """All tokens up to the query."""
    return chunk.causal_QN


def chunk_choice(size: int, lookback: int) -> Choose:
    """The tokens of the query's chunk of ``size`` and of ``lookback`` chunks before it."""

    def choose(chunk: IndexChunk) -> Tensor:
        device = chunk.positions_Q.device
        of_key = torch.arange(chunk.index_NKR.shape[0], device=device) // size
        return (chunk.positions_Q // size)[:, None] - of_key <= lookback

    return choose


def block_sparse_choice(spec: BlockSparse, heads: int) -> Choose:
    """The keys that a layer of block-sparse attention reads."""

    def choose(chunk: IndexChunk) -> Tensor:
        device = chunk.positions_Q.device
        of_query = (chunk.positions_Q // spec.size)[:, None]
        of_key = torch.arange(chunk.index_NKR.shape[0], device=device) // spec.size
        near = of_query - of_key < spec.local
        moved = of_key + 1 + spec.step * torch.arange(heads, device=device)[:, None]
        return near | (moved % spec.stride == 0)[:, None]

    return choose
