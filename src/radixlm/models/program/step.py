"""A decoder's whole step as one call into the C++ kernels.

The list of operations is emitted once for a model and its cache (``DecoderModel.emit``); a step
passes addresses and row counts. It covers decoders all of whose layers can be emitted; others run
layer by layer. Results are the same bit for bit whatever else is in the batch.

Legend: T packed tokens, R rows whose logits are wanted, D model channels, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from radixlm.attention.cpu import CpuBackend, CpuPool
from radixlm.kernels.cpu.extension import address, native
from radixlm.layers.program import CachePool, ProgramBuilder, Unsupported
from radixlm.layers.rope import LengthRope, StaticRope
from radixlm.models.continuation import Continuation
from radixlm.pools.state import StatePool, StateStep
from radixlm.step.batch import ForwardBatch

if TYPE_CHECKING:
    from radixlm.models.decoder import DecoderModel

log = logging.getLogger(__name__)


def make_program(
    model: DecoderModel, backend: object, states: StatePool | None = None
) -> StepProgram | None:
    """The program of a model over a backend's pools and the pool of its states; None where it must
    run layer by layer."""
    if not isinstance(backend, CpuBackend):
        return None
    try:
        return StepProgram(model, backend, states)
    except Unsupported as reason:
        log.debug("steps run layer by layer: the C++ program has no %s", reason)
        return None


def why_no_program(model: DecoderModel) -> str:
    """What of a loaded model the C++ program cannot do; "" if nothing."""
    try:
        _emitted(model, None, None)
    except Unsupported as reason:
        return str(reason)
    return ""


def _emitted(
    model: DecoderModel, pools: Sequence[CachePool] | None, states: StatePool | None
) -> ProgramBuilder:
    sites = {key: site for one in model.adapted for key, site in one.packed_sites.items()}
    builder = ProgramBuilder(model.decoder.dim, pools, states, model.decoder.max_positions, sites)
    builder.keep.append(model)
    model.emit(builder)
    if builder.sites_left:
        raise Unsupported("adapters of every layer")
    return builder


def runs_of(step: StateStep) -> Tensor:
    """How a step's sequences advance: int32 [runs, 4] of first row, tokens, source and target
    page (csrc/common/api.h: StateRun)."""
    parts = []
    for segment in step.segments:
        count = segment.num_sequences
        if isinstance(segment.rows, slice):
            each = (segment.rows.stop - segment.rows.start) // count
            first = torch.arange(segment.rows.start, segment.rows.stop, each)
        else:
            each, first = 1, segment.rows
        tokens = torch.full_like(first, each)
        parts.append(torch.stack((first, tokens, segment.source, segment.target), 1))
    return torch.cat(parts).int()


def _pool_of(batch: ForwardBatch) -> StatePool | None:
    return None if batch.states is None else batch.states.pool


class StepProgram:
    """One model over one backend's pools."""

    def __init__(
        self, model: DecoderModel, backend: CpuBackend, states: StatePool | None = None
    ) -> None:
        """Unsupported if a part of the model cannot be emitted."""
        pools = [pool for pool in backend.pools if isinstance(pool, CpuPool)]
        if len(pools) != len(backend.pools):
            raise Unsupported("a cache that layers read themselves")
        self.backend, self.pools, self.states = backend, pools, states
        decoder = model.decoder
        self._dim, self._vocab, self._ropes = decoder.dim, decoder.vocab, model.ropes
        self._handed = model.handed
        self._takes_embeds = not (
            decoder.positions or decoder.embed_norm_text_only or decoder.add_media_embeds
        )
        self._suppressed_tokens = torch.tensor(decoder.suppressed_tokens).long()
        self._builder = _emitted(model, pools, states)
        ext = native()
        self._program, self._step = self._builder.ops, ext.Step()
        # ranks whose logits are gathered elsewhere return none
        self._num_logits = None if self._builder.has_logits else 0
        self._group, self._rope = ext.KvGroup, ext.RopeTable

    @property
    def num_ops(self) -> int:
        """Operations of a step."""
        return int(self._program.num_ops)

    def is_current(self, batch: ForwardBatch) -> bool:
        """Whether the backend still has the pools that the program was made for."""
        pools = zip(self.pools, self.backend.pools, strict=True)
        return all(a is b for a, b in pools) and self.states is _pool_of(batch)

    def accepts(self, batch: ForwardBatch) -> bool:
        """Whether the step asks for nothing that the program cannot do."""
        is_plain = batch.mrope is None and not batch.feature_data and not batch.bidirectional_spans
        if not is_plain or batch.max_kv_len > self._builder.max_kv_len:
            return False
        if batch.lora is not None and not hasattr(batch.lora, "address"):
            return False
        if batch.media is not None and batch.media.deepstack_LTD is not None:
            return False
        if batch.carried:  # by the stage before, in place of embeddings
            return self._handed is not None and self._handed.accepts(batch.carried)
        return batch.embeds is None or self._takes_embeds

    def hidden(self, batch: ForwardBatch) -> Tensor:
        """Hidden states of all tokens after the final norm, [T, D] float32; what a stage before
        the last hands on: [T, W]."""
        out_TD = torch.empty(batch.num_tokens, self._builder.hidden_dim)
        every_T = torch.arange(batch.num_tokens, dtype=torch.int32)
        self._run(batch, every_T, None, out_TD)
        return out_TD

    def logits(self, batch: ForwardBatch) -> Tensor:
        """Logits of the rows that the batch asks for: [R, V] float32."""
        rows_R = batch.logits_rows_R.int()
        out_RV = torch.empty(rows_R.shape[0], self._vocab)
        self._run(batch, rows_R, out_RV, None)
        if len(self._suppressed_tokens):
            out_RV.index_fill_(1, self._suppressed_tokens, -torch.inf)
        return out_RV[: self._num_logits]

    def hidden_and_logits(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Both, of the rows that the batch asks for: [R, D] and [R, V] float32."""
        rows_R = batch.logits_rows_R.int()
        out_RD = torch.empty(rows_R.shape[0], self._dim)
        out_RV = torch.empty(rows_R.shape[0], self._vocab)
        self._run(batch, rows_R, out_RV, out_RD)
        if len(self._suppressed_tokens):
            out_RV.index_fill_(1, self._suppressed_tokens, -torch.inf)
        return out_RD, out_RV[: self._num_logits]

    def go_on(
        self, batch: ForwardBatch, logits_RV: Tensor, how: Continuation
    ) -> tuple[Tensor, Tensor] | None:
        """Sample from the logits of the step that has just run, of sequences that decode, and go on
        with their tokens: int64 and bool [P, S], the tokens and which rows hold a NaN or allow no
        token; fewer than P places where no sequence needs more. None where another pass needs more
        than the next position."""
        has_table = all(isinstance(maker, StaticRope) for maker in self._ropes.makers)
        if not has_table or self._gets_sparse(batch, how) or batch.states is not None:
            return None
        if self._num_logits == 0 or self._builder.attention_groups is not None or batch.carried:
            return None
        step, draws, suppressed = self._step, native().Draws(), self._suppressed_tokens
        shape = how.rows.shape
        tokens_PS, is_bad_PS = torch.empty(shape, dtype=torch.int64), torch.empty(shape).bool()
        ids, positions = batch.token_ids_T.to(torch.int32, copy=True), batch.positions_T.int()
        kv_len, rows_S = batch.kv_len_S.clone(), torch.arange(shape[1], dtype=torch.int32)
        step.ids, step.positions, step.kv_len = map(address, (ids, positions, kv_len))
        step.rows, step.logits = address(rows_S), logits_RV.data_ptr()
        step.ld_logits = logits_RV.stride(0)
        draws.passes, draws.vocab = shape[0], logits_RV.shape[1]
        draws.rows, draws.counts = how.rows.ctypes.data, how.counts_S.ctypes.data
        draws.tokens, draws.is_bad = tokens_PS.data_ptr(), is_bad_PS.data_ptr()
        draws.slots = [store.ctypes.data for store in how.store_GP]
        draws.suppressed, draws.num_suppressed = suppressed.data_ptr(), len(suppressed)
        if (told := how.told) is not None:
            draws.told = lambda place: told(tokens_PS[place])
        draws.ends = list(how.ends)
        passes = self._program.go_on(step, draws)
        return tokens_PS[:passes], is_bad_PS[:passes]

    def _gets_sparse(self, batch: ForwardBatch, how: Continuation) -> bool:
        """Whether a token is or becomes sparse, which the passes do not know."""
        sparsity = self.backend.sparsity
        longest = int(batch.kv_len_S.max()) + how.rows.shape[0] - 1
        return sparsity is not None and longest > sparsity.first_position

    def _run(
        self, batch: ForwardBatch, rows_R: Tensor, logits: Tensor | None, hidden: Tensor | None
    ) -> None:
        backend, step, group, rope = self.backend, self._step, self._group, self._rope
        ids, positions = batch.token_ids_T.int(), batch.positions_T.int()
        embeds, mask_T = None, None
        if batch.carried:
            assert self._handed is not None
            embeds = self._handed.pack(batch.carried)
        elif batch.embeds is not None:
            embeds, mask_T = batch.embeds.rows_TD.float().contiguous(), batch.embeds.mask_T
        runs = None if batch.states is None else runs_of(batch.states)
        angles = [rope_table(maker, batch) for maker in self._ropes.makers]
        step.tokens, step.ids, step.positions = len(ids), ids.data_ptr(), positions.data_ptr()
        step.num_seqs = batch.num_sequences
        step.query_start, step.kv_len = backend.starts.data_ptr(), backend.kv_len.data_ptr()
        step.groups = [
            group(table.data_ptr(), table.stride(0), slots.data_ptr())
            for table, slots in zip(backend.tables, backend.slots, strict=True)
        ]
        step.ropes = [rope(table.data_ptr(), by_token) for table, by_token in angles]
        step.rows, step.num_rows = rows_R.data_ptr(), len(rows_R)
        step.logits, step.ld_logits = address(logits), 0 if logits is None else logits.stride(0)
        step.hidden, step.ld_hidden = address(hidden), 0 if hidden is None else hidden.stride(0)
        sparse = backend.sparse
        step.num_sparse = 0 if sparse is None else len(sparse.rows)
        if sparse is not None:
            step.sparse_rows, step.is_sparse = sparse.rows.data_ptr(), sparse.is_sparse.data_ptr()
            step.max_sparse_len = sparse.max_len
        step.taps = 0
        if (num_taps := self._builder.num_taps) and batch.leaves_taps:
            if batch.taps_TN is None:  # else earlier stages have filled their part
                batch.taps_TN = torch.empty(batch.num_tokens, num_taps * self._dim)
            step.taps, step.ld_taps = batch.taps_TN.data_ptr(), num_taps * self._dim
        step.embeds, step.embeds_mask = address(embeds), address(mask_T)
        step.runs, step.num_runs = address(runs), 0 if runs is None else len(runs)
        step.lora = 0 if batch.lora is None else batch.lora.address
        if (attention := self._builder.attention_groups) is not None:
            step.group_tokens = list(attention.counts)
            step.lora_of_all = 0 if attention.lora is None else attention.lora.address
        self._program.run(step)


def rope_table(maker: StaticRope | LengthRope, batch: ForwardBatch) -> tuple[Tensor, bool]:
    """A rope's table, and whether it has a row for each token (else one for each position)."""
    if isinstance(maker, StaticRope):
        maker.reserve(batch.max_kv_len)
        return maker.table_N2R, False
    return maker.angles(batch), True
