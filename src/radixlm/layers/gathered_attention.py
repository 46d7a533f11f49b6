"""Attention over keys gathered out of the cache, sequence by sequence, in plain torch, for masks
that no backend's kernel has (one for each head, or depending on the keys). It reads the pool of any
backend; a token's numbers do not depend on the rest of the step.

Legend: T packed tokens, Q query tokens of a chunk, N tokens of its sequence, H query heads, K KV
heads, C channels of K, V of V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from radixlm.arch.spec import BlockSparse
from radixlm.base.record import Record
from radixlm.step.batch import AttentionSite, ForwardBatch

MAX_SCORES = 1 << 24  # numbers of the score matrix at once; longer chunks of queries are split


class QueryChunk(Record):
    """Some query tokens of one sequence and all keys up to the last of them."""

    rows: slice  # of T
    positions_Q: Tensor  # int64: positions of the queries; those of the keys are 0 .. N - 1
    k_NKC: Tensor
    v_NKV: Tensor
    sequence: int = 0  # which of the step's it is of

    @property
    def causal_QN(self) -> Tensor:
        """bool: keys that are not after the query."""
        return self.distance_QN >= 0

    @property
    def distance_QN(self) -> Tensor:
        """Distance from each key to the query in tokens."""
        places = torch.arange(self.k_NKC.shape[0], device=self.positions_Q.device)
        return self.positions_Q[:, None] - places


Choose = Callable[[QueryChunk], Tensor]  # bool [Q, N] or [H, Q, N]: what each query reads


def attend_gathered(
    q_THC: Tensor,
    k_TKC: Tensor | None,
    v_TKV: Tensor | None,
    site: AttentionSite,
    batch: ForwardBatch,
    choose: Choose,
    bias: Callable[[QueryChunk], Tensor] | None = None,
) -> Tensor:
    """Store the step's keys, attend to what ``choose`` leaves: [T, heads * v_dim] as q. ``bias``
    joins the scores: float32 [H, Q, N]."""
    if k_TKC is not None:
        pool = batch.attn.pools[site.group]
        pool.store(site.layer, batch.store_GT[site.group], k_TKC, v_TKV)
    out_THV = q_THC.new_zeros(q_THC.shape[0], site.heads, site.v_dim)
    for chunk in query_chunks(batch, site, q_THC.dtype):
        more = None if bias is None else bias(chunk)
        parts = ((q_THC[chunk.rows], slice(None)),)
        out_THV[chunk.rows] = attend_parts(parts, chunk, choose(chunk), site, more)
    return out_THV.flatten(1)


def query_chunks(
    batch: ForwardBatch, site: AttentionSite, dtype: torch.dtype
) -> Iterator[QueryChunk]:
    """The step's sequences, long ones split into chunks; keys and values as ``dtype``."""
    pool, table_SP = batch.attn.pools[site.group], batch.page_table_GSP[site.group]
    starts = batch.query_start_S1.tolist()
    for index, length in enumerate(batch.kv_len_S.tolist()):
        start, end = starts[index], starts[index + 1]
        if start == end:
            continue
        pages = table_SP[index, : -(-length // pool.page_size)].tolist()
        k, v = pool.read(site.layer, pages)
        k = k[:length].to(dtype)
        v = k[..., : site.v_dim] if v is None else v[:length].to(dtype)
        step = max(1, MAX_SCORES // (site.heads * length))
        for first in range(start, end, step):
            last = min(first + step, end)
            until = length - (end - last)
            positions_Q = torch.arange(until - (last - first), until, device=k.device)
            yield QueryChunk(slice(first, last), positions_Q, k[:until], v[:until], index)


def attend_parts(
    parts: Sequence[tuple[Tensor, slice]],
    chunk: QueryChunk,
    chosen: Tensor,
    site: AttentionSite,
    bias_HQN: Tensor | None = None,
) -> Tensor:
    """[Q, H, V] of one chunk. ``parts``: queries [Q, H, C] and the keys that they score; together
    all keys, in order."""
    k_NKC, v = chunk.k_NKC, chunk.v_NKV.transpose(0, 1)
    scores = torch.cat([_scores(q, k_NKC[keys], site.kv_heads) for q, keys in parts], -1)
    scores = scores * site.scale
    if site.softcap:
        scores = torch.tanh(scores / site.softcap) * site.softcap
    if bias_HQN is not None:
        scores = scores + bias_HQN.view(scores.shape)
    mask = chosen & chunk.causal_QN
    mask = mask.expand(site.heads, *mask.shape[-2:]).reshape(scores.shape)
    scores = scores.masked_fill(~mask, -torch.inf)
    if site.sinks is not None:
        sinks = site.sinks.float().view(site.kv_heads, -1, 1, 1)
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
    weights = scores.softmax(-1)[..., : k_NKC.shape[0]].to(v.dtype)
    return (weights @ v[:, None]).flatten(0, 1).transpose(0, 1)


def _scores(q_QHC: Tensor, k_NKC: Tensor, kv_heads: int) -> Tensor:
    """Float32 products [K, H / K, Q, N]."""
    width = q_QHC.shape[-1]  # a row of the cache may hold more than the key
    q = q_QHC.transpose(0, 1).reshape(kv_heads, -1, q_QHC.shape[0], width)
    return (q @ k_NKC[..., :width].permute(1, 2, 0)[:, None]).float()


def block_sparse_choice(spec: BlockSparse, heads: int) -> Choose:
    """The keys that a layer of block-sparse attention reads."""

    def choose(chunk: QueryChunk) -> Tensor:
        device = chunk.positions_Q.device
        of_query = (chunk.positions_Q // spec.size)[:, None]
        of_key = torch.arange(chunk.k_NKC.shape[0], device=device) // spec.size
        near = of_query - of_key < spec.local
        moved = of_key + 1 + spec.step * torch.arange(heads, device=device)[:, None]
        return near | (moved % spec.stride == 0)[:, None]

    return choose
