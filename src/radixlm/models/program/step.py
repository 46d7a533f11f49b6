"""A decoder's whole step as one call into the C++ kernels.

The list of operations is written once for a model and its cache (``program_writer``); a step passes
addresses and row counts. It covers decoders of attention, latent attention and recurrent mixers
and of dense or sparse feed-forwards whose weights the C++ kernels have packed; others run layer by
layer. Results are the same bit for bit whatever else is in the batch.

Legend: T packed tokens, R rows whose logits are wanted, D model channels, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from radixlm.attention.cpu import CpuBackend, CpuPool
from radixlm.kernels.cpu.extension import address
from radixlm.layers.rope import LengthRope, StaticRope
from radixlm.models.program_states import runs_of
from radixlm.models.program_writer import ProgramSource, ProgramWriter, is_covered
from radixlm.pools.state import StatePool
from radixlm.step.batch import ForwardBatch


def make_program(
    model: ProgramSource, backend: object, states: StatePool | None = None
) -> StepProgram | None:
    """The program of a model over a backend's pools and the pool of its states; None where it must
    run layer by layer."""
    if not isinstance(backend, CpuBackend) or not is_covered(model) or not _are_known(states):
        return None
    return StepProgram(model, backend, states)


def has_program(model: ProgramSource, backend: object) -> bool:
    """Whether the steps of a model that may have one are a program over this backend."""
    return isinstance(backend, CpuBackend) and is_covered(model)


def _are_known(states: StatePool | None) -> bool:
    """Whether all states are float32 on the host."""
    tensors = [] if states is None else [t for layer in states.layers for t in layer]
    return all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)


def _pool_of(batch: ForwardBatch) -> StatePool | None:
    return None if batch.states is None else batch.states.pool


class StepProgram:
    """One model over one backend's pools."""

    def __init__(
        self, model: ProgramSource, backend: CpuBackend, states: StatePool | None = None
    ) -> None:
        pools = [pool for pool in backend.pools if isinstance(pool, CpuPool)]
        assert len(pools) == len(backend.pools), "make_pool() comes first"
        self.backend, self.pools, self.states = backend, pools, states
        decoder = model.decoder
        self._dim, self._vocab = decoder.dim, decoder.vocab
        self._ropes = model.ropes
        self._takes_embeds = decoder.positions is None and not decoder.embed_norm_text_only
        self._suppressed_tokens = torch.tensor(decoder.suppressed_tokens).long()
        writer = ProgramWriter(model, pools, states)
        writer.write()
        self._program, self._keep = writer.program, writer.keep
        self._num_positions = writer.ops.grown_positions

    def is_current(self, batch: ForwardBatch) -> bool:
        """Whether the backend still has the pools that the program was written for."""
        pools = zip(self.pools, self.backend.pools, strict=True)
        return all(a is b for a, b in pools) and self.states is _pool_of(batch)

    def accepts(self, batch: ForwardBatch) -> bool:
        """Whether the step asks for nothing that the program cannot do."""
        is_plain = batch.mrope is None and not batch.feature_data and not batch.bidirectional_spans
        if not is_plain or batch.max_kv_len > self._num_positions:
            return False
        if batch.media is not None and batch.media.deepstack_LTD is not None:
            return False
        return batch.embeds is None or self._takes_embeds

    def hidden(self, batch: ForwardBatch) -> Tensor:
        """Hidden states of all tokens after the final norm: [T, D] float32."""
        out_TD = torch.empty(batch.num_tokens, self._dim)
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
        return out_RV

    def _run(
        self, batch: ForwardBatch, rows_R: Tensor, logits: Tensor | None, hidden: Tensor | None
    ) -> None:
        backend, embeds, mask_T = self.backend, None, None
        if batch.embeds is not None:
            embeds, mask_T = batch.embeds.rows_TD.float().contiguous(), batch.embeds.mask_T
        ids, positions = batch.token_ids_T.int(), batch.positions_T.int()
        angles = [_angles(maker, batch) for maker in self._ropes.makers]
        runs = None if batch.states is None else runs_of(batch.states)
        groups = zip(backend.tables, backend.slots, strict=True)
        self._program.run(
            batch.num_tokens,
            ids.data_ptr(),
            positions.data_ptr(),
            batch.num_sequences,
            backend.starts.data_ptr(),
            backend.kv_len.data_ptr(),
            [(table.data_ptr(), table.stride(0), slots.data_ptr()) for table, slots in groups],
            [(table.data_ptr(), by_token) for table, by_token in angles],
            rows_R.data_ptr(),
            rows_R.shape[0],
            address(logits),
            0 if logits is None else logits.stride(0),
            address(hidden),
            0 if hidden is None else hidden.stride(0),
            address(embeds),
            address(mask_T),
            0,
            0,
            address(runs),
            0 if runs is None else runs.shape[0],
            0,
        )


def _angles(maker: StaticRope | LengthRope, batch: ForwardBatch) -> tuple[Tensor, bool]:
    """A rope's table, and whether it has a row for each token (else one for each position)."""
    if isinstance(maker, StaticRope):
        maker.reserve(batch.max_kv_len)
        return maker.table_N2R, False
    return maker.angles(batch), True
