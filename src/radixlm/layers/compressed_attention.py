"""Attention to the newest tokens and to compressed entries, each of which sums up a run of earlier
tokens (``spec.CompressedSparseAttention``).

The cache has two groups. One holds a row for each token, freed as the window passes: its key and
what it adds to entries. The other holds the entries, each in the row of the last token of its run.

Legend: T packed tokens, D model channels, H heads, C channels of a key; of a sequence: Q queries,
N tokens read, E entries, W new ones, S tokens summed up in one, G index heads of I channels.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from radixlm.arch.rope import inv_freq
from radixlm.arch.spec import CompressedSparseAttention, KVCompression, Norm
from radixlm.base.record import Record
from radixlm.kernels.products import LANES, head_averages, head_products, place_shares
from radixlm.layers.context import LayerContext
from radixlm.layers.gathered_attention import MAX_SCORES
from radixlm.layers.indexer import index_scores, top_k_mask
from radixlm.layers.module import Module
from radixlm.layers.norm import NormLayer
from radixlm.layers.rope import Angles
from radixlm.quant.param import Param
from radixlm.step.batch import AttentionSite, ForwardBatch


class Span(Record):
    """The step's tokens of one sequence: rows [start, end) of T, at positions from ``first`` on."""

    index: int
    start: int
    end: int
    first: int

    @property
    def length(self) -> int:
        """Tokens of the sequence, including those of the step."""
        return self.first + self.end - self.start


def spans(batch: ForwardBatch) -> Iterator[Span]:
    """The step's sequences that have tokens."""
    starts = batch.query_start_S1.tolist()
    for index, length in enumerate(batch.kv_len_S.tolist()):
        start, end = starts[index], starts[index + 1]
        if end > start:
            yield Span(index, start, end, length - (end - start))


class KvCompressor(Module):
    """Compresses runs of tokens to entries of ``width`` channels."""

    def __init__(
        self, sums: KVCompression, width: int, norm: Norm, dim: int, context: LayerContext
    ) -> None:
        self._sums = sums
        half = sums.raw(width) // 2
        self.kv = context.plain_linear(dim, half)
        self.share = context.plain_linear(dim, half)
        self.share_of_place = Param((sums.rate, half), "float32")
        self.norm = NormLayer(norm, (width,), context.kernels, context.device)

    def finish(self) -> None:
        self._share_of_place = self.share_of_place.take()

    def raw(self, x_TD: Tensor, positions_T: Tensor) -> Tensor:
        """What the cache keeps of each token for later entries."""
        shares = self.share.run(x_TD) + self._share_of_place[positions_T % self._sums.rate]
        return torch.cat((self.kv.run(x_TD), shares.to(x_TD.dtype)), -1)

    def entries(self, raw_NR: Tensor, is_first: bool) -> Tensor:
        """Normed sums of whole runs, float32 [W, width]. Where they overlap, the first run of
        ``raw`` is only there for the second, unless the sequence begins with it."""
        runs = raw_NR.float().view(-1, self._sums.rate, raw_NR.shape[-1])
        kv_WSC, share_WSC = runs.chunk(2, -1)
        if self._sums.overlaps:
            kv_WSC = self._with_before(kv_WSC, is_first, 0.0)
            share_WSC = self._with_before(share_WSC, is_first, -torch.inf)
        summed: Tensor = (kv_WSC * place_shares(share_WSC)).sum(1)
        return self.norm.run(summed)

    def _with_before(self, x_WSC: Tensor, is_first: bool, nothing: float) -> Tensor:
        """The second half of each run's channels after the first half of the run before."""
        before, current = x_WSC.chunk(2, -1)
        if is_first:
            before = torch.cat((torch.full_like(before[:1], nothing), before[:-1]))
        else:
            before, current = before[:-1], current[1:]
        return torch.cat((before, current), 1)


class CompressedIndexer(Module):
    """Which entries a query reads: those whose indexer entries score highest."""

    def __init__(self, spec: CompressedSparseAttention, dim: int, context: LayerContext) -> None:
        assert spec.sums is not None
        self.spec, sums = spec.sums, spec.sums
        self.sums = KvCompressor(sums, sums.dim, spec.norm, dim, context)
        self.q = context.plain_linear(spec.q_rank, sums.heads * sums.dim)
        self.weights = context.plain_linear(dim, sums.heads)
        self._scale = sums.dim**-0.5 * sums.heads**-0.5

    def queries(self, low_TQ: Tensor) -> Tensor:
        """[T, G, I], before rotation."""
        q_TGI: Tensor = self.q.run(low_TQ)
        return q_TGI.view(-1, self.spec.heads, self.spec.dim)

    def scaled_weights(self, x_TD: Tensor) -> Tensor:
        """float32 [T, G]."""
        weights_TG: Tensor = self.weights.run(x_TD).float()
        scaled: Tensor = weights_TG * self._scale
        return scaled


class Queries(Record):
    """Queries of the step's tokens [T, H, C], and those of the indexer."""

    q_THC: Tensor
    index_TGI: Tensor | None
    weights_TG: Tensor | None


class CompressedSparseAttentionLayer(Module):
    """q, one key a token, entries -> attention -> inverse rotation -> grouped projection."""

    site: AttentionSite
    entry_place: tuple[int, int]  # (group, row) of the entries, set by the model

    def __init__(
        self,
        spec: CompressedSparseAttention,
        dim: int,
        context: LayerContext,
        rope: int,
        pool: tuple[int, int],
    ) -> None:
        """``pool`` is (group, row) of the tokens' rows."""
        self.spec, self._rope, self._pool, self._context = spec, rope, pool, context
        kernels, device, width = context.kernels, context.device, spec.head_dim
        self.q_a = context.linear(dim, spec.q_rank)
        self.q_a_norm = NormLayer(spec.norm, (spec.q_rank,), kernels, device)
        self.q_b = context.linear(spec.q_rank, spec.heads * width)
        self.q_norm = NormLayer(Norm(spec.norm.eps, affine=False), (width,), kernels, device)
        self.kv = context.linear(dim, width)
        self.kv_norm = NormLayer(spec.norm, (width,), kernels, device)
        self.sinks = Param((spec.heads,), "float32")
        inputs = spec.heads * width // spec.groups
        self.o_a = Param((spec.groups * spec.group_rank, inputs))
        self.o_b = context.linear(spec.groups * spec.group_rank, dim)
        if spec.sums is not None:
            self.sums = KvCompressor(spec.sums, width, spec.norm, dim, context)
            if spec.sums.heads:
                self.index = CompressedIndexer(spec, dim, context)

    def finish(self) -> None:
        spec, (group, row) = self.spec, self._pool
        self._sinks_H = self.sinks.take()
        parts = self.o_a.take().view(spec.groups, spec.group_rank, -1)
        self._narrow = self._context.kernels.pack_head_linear(parts)
        frequencies, self._factor = inv_freq(spec.rope)
        self._inv_freq_R = torch.from_numpy(frequencies).to(self._context.device)
        self.site = AttentionSite(
            layer=row,
            group=group,
            heads=spec.heads,
            kv_heads=1,
            head_dim=spec.row,
            v_dim=spec.head_dim,
            scale=spec.head_dim**-0.5,
            window=spec.sliding_window,
            sinks=self._sinks_H,
            latent=True,
        )

    def run(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """The mixer's branch: [T, D]."""
        spec, cos_sin = self.spec, angles[self._rope]
        queries = self._queries(x_TD, cos_sin)
        self.store(x_TD, batch, angles)
        out_THC = torch.empty_like(queries.q_THC)
        for span in spans(batch):
            if spec.sums is not None:
                self._store_entries(span, spec.sums, batch)
            self._attend(span, queries, batch, out_THC)
        half = cos_sin.shape[-1] // 2
        self._apply_rope(out_THC, torch.cat((cos_sin[:, :half], -cos_sin[:, half:]), -1))
        grouped = out_THC.view(out_THC.shape[0], spec.groups, -1)
        return self.o_b.run(self._narrow.run(grouped).flatten(1))

    def store(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> None:
        """Store what the cache keeps of each token, but for entries."""
        batch.attn.pools[self.site.group].store(
            self.site.layer,
            batch.store_GT[self.site.group],
            self._token_rows(x_TD, batch.positions_T, angles[self._rope])[:, None],
            None,
        )

    def _queries(self, x_TD: Tensor, cos_sin: Angles) -> Queries:
        spec = self.spec
        low_TQ = self.q_a_norm.run(self.q_a.run(x_TD))
        q = self.q_norm.run(self.q_b.run(low_TQ).view(-1, spec.head_dim))
        q_THC = q.view(-1, spec.heads, spec.head_dim)
        self._apply_rope(q_THC, cos_sin)
        if spec.sums is None or not spec.sums.heads:
            return Queries(q_THC, None, None)
        index_TGI = self.index.queries(low_TQ)
        self._apply_rope(index_TGI, cos_sin)
        return Queries(q_THC, index_TGI, self.index.scaled_weights(x_TD))

    def _token_rows(self, x_TD: Tensor, positions_T: Tensor, cos_sin: Angles) -> Tensor:
        """What the cache keeps of each token: its key, then its part of entries. [T, row]"""
        key_TC = self.kv_norm.run(self.kv.run(x_TD))
        self._apply_rope(key_TC[:, None], cos_sin)
        if self.spec.sums is None:
            return key_TC
        parts = [key_TC, self.sums.raw(x_TD, positions_T)]
        if self.spec.sums.heads:
            parts.append(self.index.sums.raw(x_TD, positions_T))
        return torch.cat(parts, -1)

    def _store_entries(self, span: Span, sums: KVCompression, batch: ForwardBatch) -> None:
        """Store the entries of the runs that the step completes."""
        first_run, end_run = span.first // sums.rate, span.length // sums.rate
        if first_run == end_run:
            return
        low_run = max(0, first_run - 1) if sums.overlaps else first_run
        raw = self._read(batch, span, low_run * sums.rate, end_run * sums.rate)
        raw = raw[:, self.spec.head_dim :]
        widths = (sums.raw(self.spec.head_dim), sums.raw(sums.dim))
        of_key, of_index = raw.split_with_sizes(widths, -1)
        is_first = first_run == 0
        runs = torch.arange(first_run, end_run, device=raw.device)
        cos_sin = self._context.kernels.rope_angles(
            runs * sums.rate, self._inv_freq_R, self._factor
        )
        parts = [self.sums.entries(of_key, is_first)]
        if sums.heads:
            parts.append(self.index.sums.entries(of_index, is_first))
        for part in parts:
            self._apply_rope(part[:, None], cos_sin)
        group, row = self.entry_place
        last = span.start + (runs + 1) * sums.rate - 1 - span.first
        slots = batch.store_GT[group][last] // self._tokens_per_row(batch)
        batch.attn.pools[group].store(row, slots, torch.cat(parts, -1)[:, None], None)

    def _attend(self, span: Span, queries: Queries, batch: ForwardBatch, out_THC: Tensor) -> None:
        """Fill the rows of one sequence, some queries at a time."""
        spec = self.spec
        is_block = (span.start, span.end - span.start) in batch.bidirectional_spans
        low = first = max(0, span.first - spec.sliding_window + (not is_block))
        own_NC = self._read(batch, span, low, span.length)[:, : spec.head_dim]
        # a key has its place in sums by its position alone
        own_NC = F.pad(own_NC, (0, 0, low % LANES, -span.length % LANES))
        low -= low % LANES
        entries_ER = self._entries(batch, span) if spec.sums is not None else None
        width = own_NC.shape[0] + (0 if entries_ER is None else entries_ER.shape[0])
        step = max(1, MAX_SCORES // (spec.heads * width))
        for start in range(span.start, span.end, step):
            rows = slice(start, min(start + step, span.end))
            positions_Q = span.first + torch.arange(
                rows.start - span.start, rows.stop - span.start, device=own_NC.device
            )
            distance_QN = positions_Q[:, None] - torch.arange(
                low, low + len(own_NC), device=own_NC.device
            )
            keys, seen = own_NC, (distance_QN >= 0) & (distance_QN < spec.sliding_window)
            if is_block:  # its tokens see each other, and all of them the window before the first
                places_QN = positions_Q[:, None] - distance_QN
                seen = (places_QN >= first) & (places_QN < span.length)
            if entries_ER is not None:
                keys = torch.cat((keys, entries_ER[:, : spec.head_dim]))
                seen = torch.cat((seen, self._seen(entries_ER, queries, rows, positions_Q)), -1)
            out_THC[rows] = self._weigh(queries.q_THC[rows], keys.to(out_THC.dtype), seen)

    def _weigh(self, q_QHC: Tensor, keys_NC: Tensor, causal_QN: Tensor) -> Tensor:
        """[Q, H, C]"""
        keys = keys_NC[:, None]
        scores_HQN = head_products(q_QHC.transpose(0, 1), keys) * self.site.scale
        scores_HQN = scores_HQN.masked_fill(~causal_QN, -torch.inf)
        return head_averages(scores_HQN, keys, self._sinks_H)

    def _seen(
        self, entries_ER: Tensor, queries: Queries, rows: slice, positions_Q: Tensor
    ) -> Tensor:
        """bool [Q, E]: the entries that each query reads."""
        sums = self.spec.sums
        assert sums is not None
        count = torch.arange(entries_ER.shape[0], device=entries_ER.device)
        is_whole = count < ((positions_Q + 1) // sums.rate)[:, None]
        if queries.index_TGI is None or queries.weights_TG is None:
            return is_whole
        keys_EI = entries_ER[:, self.spec.head_dim :].float()
        scores_QE = index_scores(queries.index_TGI[rows], queries.weights_TG[rows], keys_EI)
        return is_whole & top_k_mask(scores_QE.masked_fill(~is_whole, -torch.inf), sums.top_k)

    def _entries(self, batch: ForwardBatch, span: Span) -> Tensor:
        """All entries of a sequence: [E, entry]."""
        sums, (group, row) = self.spec.sums, self.entry_place
        assert sums is not None
        if span.length < sums.rate:
            return self._inv_freq_R.new_empty(0, self.spec.entry)
        pool, table_SP = batch.attn.pools[group], batch.page_table_GSP[group]
        places = torch.arange(sums.rate - 1, span.length, sums.rate, device=table_SP.device)
        rows = places // self._tokens_per_row(batch)
        pages, at = torch.unique(rows // pool.page_size, return_inverse=True)
        rows_NR: Tensor = pool.read(row, table_SP[span.index, pages].tolist())[0][:, 0]
        return rows_NR[at * pool.page_size + rows % pool.page_size]

    def _tokens_per_row(self, batch: ForwardBatch) -> int:
        """Tokens for each row of the entries' pool."""
        tokens, entries = (batch.attn.pools[i] for i in (self.site.group, self.entry_place[0]))
        return int(tokens.page_size) // int(entries.page_size)

    def _read(self, batch: ForwardBatch, span: Span, low: int, high: int) -> Tensor:
        """The cache rows of the tokens [low, high) of a sequence: [N, row]."""
        pool, table_SP = batch.attn.pools[self.site.group], batch.page_table_GSP[self.site.group]
        first = low // pool.page_size
        pages = table_SP[span.index, first : -(-high // pool.page_size)].tolist()
        rows_NR: Tensor = pool.read(self.site.layer, pages)[0][:, 0]
        return rows_NR[low - first * pool.page_size : high - first * pool.page_size]

    def _apply_rope(self, x_THC: Tensor, cos_sin: Angles) -> None:
        """Rotate the last channels, in place."""
        rotated = x_THC[..., x_THC.shape[-1] - cos_sin.shape[-1] :]
        self._context.kernels.rope(rotated, cos_sin, self.spec.rope.interleaved)
