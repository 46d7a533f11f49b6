"""A text encoder's blocks as one call into the C++ kernels.

A step holds whole texts. Each layer writes its keys and values to the same scratch pages, which no
later step reads. Encoders with tables of distances, and texts longer than a layer's window, run
layer by layer. Results are the same bit for bit whatever else is in the step.

Legend: S texts, T packed tokens, D model channels, P scratch pages of a text.
"""

from __future__ import annotations

import logging
from typing import Protocol

import torch
from torch import Tensor

from radixlm.arch.spec import Decoder
from radixlm.attention.cpu import CpuPool
from radixlm.kernels.cpu.cache import TILE
from radixlm.kernels.cpu.extension import native
from radixlm.layers.block import BlockLayer
from radixlm.layers.norm import NormLayer
from radixlm.layers.program import ProgramBuilder, ProgramStream, Unsupported, struct
from radixlm.layers.rope import RopeTables
from radixlm.models.program.step import rope_table
from radixlm.pools.group import KvGroup
from radixlm.step.batch import AttentionSite, ForwardBatch

log = logging.getLogger(__name__)


class EncoderBlocks(Protocol):
    """What a program is made of."""

    decoder: Decoder
    ropes: RopeTables
    blocks: list[BlockLayer]

    @property
    def final_norm(self) -> NormLayer | None:
        """The norm after the last block, if there is one."""
        ...


def make_encoder_program(model: EncoderBlocks) -> EncoderProgram | None:
    """The program of a loaded encoder; None where it must run layer by layer."""
    try:
        return EncoderProgram(model)
    except Unsupported as reason:
        log.debug("encoder steps run layer by layer: the C++ program has no %s", reason)
        return None


class EncoderProgram:
    """The blocks of one encoder and their scratch pages."""

    def __init__(self, model: EncoderBlocks) -> None:
        """Unsupported if a part of the model cannot be emitted."""
        encoder = model.decoder.encoder
        assert encoder is not None
        if encoder.distances or encoder.disentangled or model.decoder.layer_inputs:
            raise Unsupported("tables of distances or inputs of each layer")
        shapes = {(site.kv_heads, site.head_dim, site.v_dim) for site in map(_site, model.blocks)}
        if len(shapes) > 1:
            raise Unsupported("layers with heads of different shapes")
        self._model, self._shape = model, shapes.pop()
        self._make(64)

    def _make(self, num_pages: int) -> None:
        """Emit the operations over new scratch pages, whose addresses they hold."""
        model, decoder = self._model, self._model.decoder
        kv_heads, head_dim, v_dim = self._shape
        group = KvGroup(0, "full", (0,), kv_heads, head_dim, v_dim)
        self._pool = CpuPool(group, num_pages, TILE, torch.float32)
        builder = ProgramBuilder(decoder.dim, [self._pool], None, decoder.max_positions)
        builder.is_causal = False
        stream = ProgramStream(builder.buffer("residual"))
        nothing = struct("EmbedArgs", table=0, vocab=0, dim=decoder.dim)  # the step brings the rows
        builder.ops.embed(y=stream.residual, tied=None, args=nothing, replaced=True)
        for block in model.blocks * (len(decoder.blocks) // len(model.blocks)):
            block.emit(builder, stream, False)
        final = stream.residual
        if model.final_norm is not None:
            final = model.final_norm.emit(builder, final, builder.buffer("final"))
        builder.ops.hidden(x=final, dim=decoder.dim)
        self._builder, self._step = builder, native().Step()

    @property
    def longest(self) -> int:
        """Tokens of the longest text that fits into the window of every layer."""
        return self._builder.max_kv_len

    def accepts(self, batch: ForwardBatch) -> bool:
        """Whether the program can run the step's texts."""
        return batch.lora is None and batch.max_query_len <= self.longest

    def run(self, batch: ForwardBatch, x_TD: Tensor) -> Tensor:
        """Hidden states of all tokens, from their embeddings: [T, D] float32."""
        lengths_S = batch.query_start_S1.diff()
        pages_S = (lengths_S + TILE - 1) // TILE
        ends_S = pages_S.cumsum(0)
        if int(ends_S[-1]) > self._pool.num_pages:
            self._make(1 << int(ends_S[-1]).bit_length())
        first_S = ends_S - pages_S
        table_SP = (first_S[:, None] + torch.arange(int(pages_S.max()))).int()
        slots_T = torch.repeat_interleave(first_S * TILE, lengths_S) + batch.positions_T
        slots_T, positions_T = slots_T.int(), batch.positions_T.int()
        starts_S1, kv_len_S = batch.query_start_S1.int().contiguous(), lengths_S.int()
        embeds_TD, ids_T = x_TD.float().contiguous(), torch.zeros_like(positions_T)
        out_TD, rows_T = torch.empty_like(embeds_TD), torch.arange(len(x_TD), dtype=torch.int32)
        ext, step = native(), self._step
        tables = [rope_table(maker, batch) for maker in self._model.ropes.makers]
        step.tokens, step.ids, step.positions = len(x_TD), ids_T.data_ptr(), positions_T.data_ptr()
        step.num_seqs = batch.num_sequences
        step.query_start, step.kv_len = starts_S1.data_ptr(), kv_len_S.data_ptr()
        step.groups = [ext.KvGroup(table_SP.data_ptr(), table_SP.stride(0), slots_T.data_ptr())]
        step.ropes = [ext.RopeTable(table.data_ptr(), by_token) for table, by_token in tables]
        step.rows, step.num_rows = rows_T.data_ptr(), len(rows_T)
        step.hidden, step.ld_hidden = out_TD.data_ptr(), out_TD.stride(0)
        step.embeds = embeds_TD.data_ptr()
        self._builder.ops.run(step)
        return out_TD


def _site(block: BlockLayer) -> AttentionSite:
    site = block.site
    assert site is not None, "an encoder has attention in every layer"
    return site
