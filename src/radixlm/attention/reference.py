"""torch_native: paged attention in plain torch, for any page size, dtype and device, with windows,
softcap, sinks and latents. Each sequence reads only its own tokens, through its page table. On a
CPU the bits of a row do not depend on the rest of the step.

Legend: T packed tokens, S sequences, N tokens read of a sequence, Q its query tokens, H query
heads, K KV heads, C head channels, V value channels.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from radixlm.attention.double_sparsity import (
    DoubleSparsity,
    SparseStep,
    attend_sparse,
    is_plain,
    sparse_step,
)
from radixlm.attention.paged import PagedBackend
from radixlm.base.record import Record, replace
from radixlm.kernels.dispatch import Kernels
from radixlm.kernels.products import LANES, head_averages, head_products
from radixlm.pools.group import KvGroup
from radixlm.step.batch import AttentionSite, ForwardBatch

MAX_SCORES = 1 << 24  # numbers of the score matrix at once; longer queries are computed in blocks
MAX_PADDING = 2  # decodes share a call if the longest is at most this many times longer


class QueryBlock(Record):
    """Some query tokens and the keys that they attend to; sequences of a block are padded alike."""

    rows_SQ: Tensor  # int64: indices into T
    tokens_SN: Tensor  # int64: indices into the flat pool
    seen_SQN: Tensor  # bool
    ahead_SQN: Tensor  # int64: how far the key is ahead of the query (0 or less where seen)


class Span(Record):
    """One sequence of the step, or a part of it, on the host. ``num_ahead``: None for causal
    queries; else all queries see each other and ``num_ahead`` tokens after the last of them.
    ``seen_from``: the position from which they see all of these whatever the window, if not
    None."""

    index: int
    start: int  # first query token in T
    num_queries: int
    kv_len: int  # what its last query sees
    num_ahead: int | None = None
    seen_from: int | None = None

    @property
    def first_position(self) -> int:
        """Position of the first query in the sequence."""
        return self.kv_len - (self.num_ahead or 0) - self.num_queries


class TorchNativeBackend(PagedBackend):
    """The reference backend; it reads K and V in the dtype of q."""

    name = "torch_native"
    takes_sparsity = True

    def __init__(self, groups: Sequence[KvGroup], kernels: Kernels, device: torch.device) -> None:
        super().__init__(groups, kernels, device)
        # by (group, window, chunk, looks_ahead)
        self._blocks: dict[tuple[int, int, int, bool], list[QueryBlock]] = {}
        self._sparse: SparseStep | None = None

    def begin(self, batch: ForwardBatch) -> None:
        """Keep the batch; blocks are made when a layer first needs them."""
        self._batch = batch
        self._blocks = {}
        if self.sparsity is not None:
            self._sparse = sparse_step(batch, self.sparsity)

    def run(
        self, q_THD: Tensor, k_TKD: Tensor | None, v_TKV: Tensor | None, site: AttentionSite
    ) -> Tensor:
        """Store K and V, attend block by block."""
        batch, pool = self._batch, self.pools[site.group]
        assert batch is not None and pool is not None, "begin() and make_pool() come first"
        if k_TKD is not None:
            pool.store(site.layer, batch.store_GT[site.group], k_TKD, v_TKV)
        out_THV = q_THD.new_zeros(q_THD.shape[0], site.heads, site.v_dim)
        attend_ = attend_alone if q_THD.is_cpu else attend
        for block in self._blocks_of(site, pool.page_size):
            k, v = pool.load(site.layer, block.tokens_SN, q_THD.dtype)
            out_THV[block.rows_SQ] = attend_(q_THD[block.rows_SQ], k, v, block, site)
        if self.sparsity is not None and is_plain(site):
            self._attend_sparse(q_THD, out_THV, site, self.sparsity)
        return out_THV.flatten(1)

    def _attend_sparse(
        self, q_THD: Tensor, out_THV: Tensor, site: AttentionSite, sparsity: DoubleSparsity
    ) -> None:
        """Replace the sparse rows of a step."""
        batch, pool = self._batch, self.pools[site.group]
        assert batch is not None and pool is not None
        if self._sparse is None or not sparsity.width(pool.group):
            return
        channels_KW = sparsity.channels[pool.group.layers[site.layer]].to(q_THD.device)
        table_SP = batch.page_table_GSP[site.group].long()
        for token, sequence, count in self._sparse.rows.tolist():
            at = torch.arange(count, device=q_THD.device)
            slots = table_SP[sequence, at // pool.page_size] * pool.page_size + at % pool.page_size
            k, v = pool.load(site.layer, slots, torch.float32)
            row = attend_sparse(q_THD[token], k, v, channels_KW, sparsity.tokens, site)
            out_THV[token] = row.to(out_THV.dtype)

    def _blocks_of(self, site: AttentionSite, page_size: int) -> list[QueryBlock]:
        key = (site.group, site.window, site.chunk, site.looks_ahead)
        if key not in self._blocks:
            assert self._batch is not None
            table_SP = self._batch.page_table_GSP[site.group].long()
            self._blocks[key] = [
                make_block(part, table_SP, page_size, site.window, site.chunk)
                for part in split_spans(sequence_spans(self._batch, site.looks_ahead), site)
            ]
        return self._blocks[key]


def split_spans(spans: Sequence[Span], site: AttentionSite) -> list[list[Span]]:
    """Group the step's sequences: decodes of similar length together, long queries cut so that no
    score matrix is larger than MAX_SCORES."""
    parts: list[list[Span]] = []
    singles = sorted((s for s in spans if _is_single(s)), key=lambda s: s.kv_len)
    for span in singles:
        limit = MAX_SCORES // (site.heads * span.kv_len)
        shares = parts and len(parts[-1]) < limit
        if shares and span.kv_len <= MAX_PADDING * parts[-1][0].kv_len:
            parts[-1].append(span)
        else:
            parts.append([span])
    for span in spans:
        if _is_single(span) or not span.num_queries:
            continue
        step = max(1, MAX_SCORES // (site.heads * span.kv_len))
        for first in range(0, span.num_queries, step):
            parts.append([_part(span, first, min(step, span.num_queries - first))])
    return parts


def _is_single(span: Span) -> bool:
    return span.num_queries == 1 and not span.num_ahead


def _part(span: Span, first: int, count: int) -> Span:
    """Queries [first, first + count) of a span."""
    rest = span.num_queries - first - count
    if span.num_ahead is None:
        return Span(span.index, span.start + first, count, span.kv_len - rest)
    ahead = span.num_ahead + rest
    return Span(span.index, span.start + first, count, span.kv_len, ahead, span.seen_from)


def sequence_spans(batch: ForwardBatch, looks_ahead: bool = True) -> list[Span]:
    """The step's sequences on the host, cut at the ends of bidirectional spans."""
    starts = batch.query_start_S1.tolist()
    spans = [
        Span(index, starts[index], starts[index + 1] - starts[index], kv_len)
        for index, kv_len in enumerate(batch.kv_len_S.tolist())
    ]
    if not batch.bidirectional_spans or not looks_ahead:
        return spans
    runs, ignores_window = batch.bidirectional_spans, batch.spans_ignore_window
    return [part for span in spans for part in _cut(span, runs, ignores_window)]


def _cut(span: Span, runs: Sequence[tuple[int, int]], ignores_window: bool) -> Iterator[Span]:
    at, end = 0, span.num_queries
    for start, count in runs:
        first = start - span.start
        if not 0 <= first < end:
            continue
        if first > at:
            yield _part(span, at, first - at)
        part = _part(span, first, count)
        seen_from = part.first_position if ignores_window else None
        yield replace(part, num_ahead=0, seen_from=seen_from) if count > 1 else part
        at = first + count
    if at < end:
        yield _part(span, at, end - at)


def make_block(
    spans: Sequence[Span], table_SP: Tensor, page_size: int, window: int, chunk: int = 0
) -> QueryBlock:
    """Indices and mask of sequences that have the same number of query tokens."""
    device = table_SP.device
    num_queries, seen_from = spans[0].num_queries, spans[0].seen_from
    first = [
        max(0, s.first_position - window + 1) if window else 0 for s in spans
    ]  # earlier positions are out of every query's window, and their pages may be freed
    if seen_from is not None:  # such a span is alone in its block
        first = [min(first[0], seen_from)]
    places = LANES if device.type == "cpu" else 1  # a key's place in a row of so many is fixed
    base = [f - f % places for f in first]
    longest = max(s.kv_len - b for s, b in zip(spans, base, strict=True))
    longest += -longest % places
    numbers = [(s.start, s.kv_len, s.index, s.first_position) for s in spans]
    start_S, kv_len_S, index_S, position_S = torch.tensor(numbers, device=device).T
    first_S, base_S = torch.tensor((first, base), device=device)
    position_SN = base_S[:, None] + torch.arange(longest, device=device)
    query_Q = torch.arange(num_queries, device=device)
    query_SQ = position_S[:, None] + query_Q
    ahead_SQN = position_SN[:, None] - query_SQ[..., None]
    seen_SQN = ahead_SQN <= 0
    if spans[0].num_ahead is not None:  # such a span is alone in its block
        seen_SQN = (position_SN < kv_len_S[:, None])[:, None].repeat(1, num_queries, 1)
    if window:
        in_window_SQN = ahead_SQN > -window
        if seen_from is not None:
            in_window_SQN |= position_SN[:, None] >= seen_from
        seen_SQN &= in_window_SQN
    if chunk:
        seen_SQN &= position_SN[:, None] // chunk == query_SQ[..., None] // chunk
    # Padding reads the sequence's own tokens, never a page of another sequence.
    position_SN = torch.clamp(position_SN, first_S[:, None], kv_len_S[:, None] - 1)
    pages_SN = table_SP[index_S[:, None], position_SN // page_size]
    tokens_SN = pages_SN * page_size + position_SN % page_size
    return QueryBlock(start_S[:, None] + query_Q, tokens_SN, seen_SQN, ahead_SQN)


def attend(
    q_SQHC: Tensor, k_SNKC: Tensor, v_SNKV: Tensor, block: QueryBlock, site: AttentionSite
) -> Tensor:
    """Masked softmax attention: [S, Q, H, V] in the dtype of q."""
    q, k, v = (t.transpose(1, 2) for t in (q_SQHC, k_SNKC, v_SNKV))
    if site.softcap or site.sinks is not None or site.slopes is not None:
        out_SHQV = _attend_with_extras(q, k, v, block, site)
    else:
        out_SHQV = F.scaled_dot_product_attention(
            q, k, v, attn_mask=block.seen_SQN[:, None], scale=site.scale, enable_gqa=True
        )
    return out_SHQV.transpose(1, 2)


def attend_alone(
    q_SQHC: Tensor, k_SNKC: Tensor, v_SNKV: Tensor, block: QueryBlock, site: AttentionSite
) -> Tensor:
    """The same, one sequence after the other, by products in a fixed order."""
    rows = []
    for s, (q_QHC, k_NKC, v_NKV) in enumerate(zip(q_SQHC, k_SNKC, v_SNKV, strict=True)):
        scores_HQN = head_products(q_QHC.transpose(0, 1), k_NKC).mul_(site.scale)
        if site.softcap:
            scores_HQN = scores_HQN.div_(site.softcap).tanh_().mul_(site.softcap)
        if site.slopes is not None:
            scores_HQN += site.slopes.view(-1, 1, 1) * block.ahead_SQN[s]
        scores_HQN.masked_fill_(~block.seen_SQN[s], -torch.inf)
        rows.append(head_averages(scores_HQN, v_NKV.float(), site.sinks))
    return torch.stack(rows).to(q_SQHC.dtype)


def _attend_with_extras(
    q_SHQC: Tensor, k_SKNC: Tensor, v_SKNV: Tensor, block: QueryBlock, site: AttentionSite
) -> Tensor:
    """Attention with softcap, ALiBi slopes or sinks, which scaled_dot_product_attention lacks."""
    grouped = q_SHQC.reshape(
        q_SHQC.shape[0], site.kv_heads, -1, *q_SHQC.shape[2:]
    )  # [S, K, H / K, Q, C]
    scores = (grouped @ k_SKNC[:, :, None].transpose(-1, -2)).float() * site.scale
    if site.softcap:
        scores = torch.tanh(scores / site.softcap) * site.softcap
    if site.slopes is not None:
        slopes = site.slopes.view(1, site.kv_heads, -1, 1, 1)
        scores = scores + slopes * block.ahead_SQN[:, None, None]
    scores = scores.masked_fill(~block.seen_SQN[:, None, None], float("-inf"))
    if site.sinks is not None:
        sinks = site.sinks.float().view(1, site.kv_heads, -1, 1, 1)
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
    weights = scores.softmax(-1)[..., : k_SKNC.shape[2]].to(q_SHQC.dtype)
    return (weights @ v_SKNV[:, :, None]).flatten(1, 2)
