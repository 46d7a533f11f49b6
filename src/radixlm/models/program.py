"""A decoder's whole step as one call into the C++ kernels.

The list of operations is written once for a model and its cache (``program_writer``); a step passes
addresses and row counts. It covers decoders of plain or latent attention and of dense or sparse
feed-forwards whose weights the C++ kernels have packed; others run layer by layer. Results are the
same bit for bit whatever else is in the batch.

Legend: T packed tokens, R rows whose logits are wanted, D model channels, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from radixlm.attention.cpu import CpuBackend, CpuPool
from radixlm.kernels.cpu.extension import address
from radixlm.layers.rope import LengthRope, StaticRope
from radixlm.models.program_writer import ProgramSource, ProgramWriter, is_covered
from radixlm.step.batch import ForwardBatch


def make_program(model: ProgramSource, backend: object) -> StepProgram | None:
    """The program of a model over a backend's pools; None where it must run layer by layer."""
    if not isinstance(backend, CpuBackend) or not is_covered(model):
        return None
    return StepProgram(model, backend)


def has_program(model: ProgramSource, backend: object) -> bool:
    """Whether the steps of a model that may have one are a program over this backend."""
    return isinstance(backend, CpuBackend) and is_covered(model)


class StepProgram:
    """One model over one backend's pools."""

    def __init__(self, model: ProgramSource, backend: CpuBackend) -> None:
        pools = [pool for pool in backend.pools if isinstance(pool, CpuPool)]
        assert len(pools) == len(backend.pools), "make_pool() comes first"
        self.backend, self.pools = backend, pools
        decoder = model.decoder
        self._dim, self._vocab = decoder.dim, decoder.vocab
        self._ropes = model.ropes
        self._has_positions = decoder.positions is not None
        writer = ProgramWriter(model, pools)
        writer.write()
        self._program, self._keep = writer.program, writer.keep

    def is_current(self) -> bool:
        """Whether the backend still has the pools that the program was written for."""
        return all(a is b for a, b in zip(self.pools, self.backend.pools, strict=True))

    def accepts(self, batch: ForwardBatch) -> bool:
        """Whether the step asks for nothing that the program cannot do."""
        is_plain = batch.rope_ids_3T is None and batch.deep_LTD is None and not batch.extras
        is_plain = is_plain and not batch.mutual
        return is_plain and not (batch.embeds_TD is not None and self._has_positions)

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
        return out_RV

    def _run(
        self, batch: ForwardBatch, rows_R: Tensor, logits: Tensor | None, hidden: Tensor | None
    ) -> None:
        backend, embeds = self.backend, batch.embeds_TD
        ids, positions = batch.token_ids_T.int(), batch.positions_T.int()
        if embeds is not None:
            embeds = embeds.float().contiguous()
        angles = [_angles(maker, batch) for maker in self._ropes.makers]
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
            0 if embeds is None else address(batch.embeds_mask_T),
            0,
            0,
            0,
        )


def _angles(maker: StaticRope | LengthRope, batch: ForwardBatch) -> tuple[Tensor, bool]:
    """A rope's table, and whether it has a row for each token (else one for each position)."""
    if isinstance(maker, StaticRope):
        maker.reserve(batch.max_kv_len)
        return maker.table_N2R, False
    return maker.angles(batch), True
