"""An encoder's blocks as calls into the C++ kernels.

A step holds whole sequences: texts, or the patches of images. Each layer writes its keys and values
to the same scratch pages, which no later step reads. Encoders with tables of distances, and texts
longer than a layer's window, run layer by layer. Results are the same bit for bit whatever else is
in the step.

Legend: S sequences, T packed tokens, D model channels, P scratch pages of a sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from radixlm.attention.cpu import CpuPool
from radixlm.kernels.cpu.cache import TILE
from radixlm.kernels.cpu.extension import native
from radixlm.layers.block import BlockLayer
from radixlm.layers.norm import NormLayer
from radixlm.layers.program import ProgramBuilder, ProgramStream, Unsupported, struct
from radixlm.pools.group import KvGroup
from radixlm.step.batch import AttentionSite

if TYPE_CHECKING:
    from radixlm.models.encoders.text import EncoderModel

log = logging.getLogger(__name__)


def make_encoder_program(model: EncoderModel) -> EncoderProgram | None:
    """The program of a loaded text encoder; None where it must run layer by layer."""
    decoder, encoder = model.decoder, model.decoder.encoder
    assert encoder is not None
    try:
        if encoder.distances or encoder.disentangled or decoder.layer_inputs:
            raise Unsupported("tables of distances or inputs of each layer")
        blocks = model.blocks * (len(decoder.blocks) // len(model.blocks))
        return EncoderProgram([blocks], decoder.dim, model.final_norm, decoder.max_positions)
    except Unsupported as reason:
        log.debug("encoder steps run layer by layer: the C++ program has no %s", reason)
        return None


class EncoderProgram:
    """Blocks of one encoder and their scratch pages. A call runs one of its parts: all blocks of a
    text encoder, a single one of a vision encoder, whose parts share the memory."""

    def __init__(
        self,
        parts: Sequence[Sequence[BlockLayer]],
        dim: int,
        final_norm: NormLayer | None = None,
        max_positions: int = 0,
    ) -> None:
        """``final_norm``: of each part. ``max_positions``: of queries that are scaled by their
        position. Unsupported if a block cannot be emitted."""
        sites = [_site(block) for blocks in parts for block in blocks]
        shapes = {(site.kv_heads, site.head_dim, site.v_dim) for site in sites}
        if len(shapes) > 1:
            raise Unsupported("layers with heads of different shapes")
        self._parts, self._dim, self._final_norm = parts, dim, final_norm
        self._max_positions, self._shape = max_positions, shapes.pop()
        self._make(64)

    def _make(self, num_pages: int) -> None:
        """Emit the operations over new scratch pages, whose addresses they hold."""
        kv_heads, head_dim, v_dim = self._shape
        group = KvGroup(0, "full", (0,), kv_heads, head_dim, v_dim)
        self._pool = CpuPool(group, num_pages, TILE, torch.float32)
        self._builder = ProgramBuilder(self._dim, [self._pool], None, self._max_positions)
        self._builder.is_causal = False
        self._spans = [self._emit(blocks) for blocks in self._parts]
        self._step = native().Step()

    def _emit(self, blocks: Sequence[BlockLayer]) -> tuple[int, int]:
        """Emit a part: its first operation and how many."""
        builder = self._builder
        first = builder.ops.num_ops
        stream = ProgramStream(builder.buffer("residual"))
        nothing = struct("EmbedArgs", table=0, vocab=0, dim=self._dim)  # the step brings the rows
        builder.ops.embed(y=stream.residual, tied=None, args=nothing, replaced=True)
        for block in blocks:
            block.emit(builder, stream, False)
        final = stream.residual
        if self._final_norm is not None:
            final = self._final_norm.emit(builder, final, builder.buffer("final"))
        builder.ops.hidden(x=final, dim=self._dim)
        return first, builder.ops.num_ops - first

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that fits into the window of every layer."""
        return self._builder.max_kv_len

    def run(
        self,
        x_TD: Tensor,
        starts_S1: Tensor,
        ropes: Sequence[tuple[Tensor, bool]] = (),
        part: int = 0,
    ) -> Tensor:
        """Hidden states of all tokens after a part, from those before it: [T, D] float32.
        ``starts_S1``: the first token of each sequence, then T. ``ropes``: float32 tables, and
        whether they have a row for each token (else one for each position)."""
        lengths_S = starts_S1.diff()
        pages_S = (lengths_S + TILE - 1) // TILE
        ends_S = pages_S.cumsum(0)
        if int(ends_S[-1]) > self._pool.num_pages:
            self._make(1 << int(ends_S[-1]).bit_length())
        first_S = ends_S - pages_S
        table_SP = (first_S[:, None] + torch.arange(int(pages_S.max()))).int()
        rows_T = torch.arange(len(x_TD), dtype=torch.int32)
        positions_T = rows_T - torch.repeat_interleave(starts_S1[:-1].int(), lengths_S)
        slots_T = (torch.repeat_interleave(first_S * TILE, lengths_S) + positions_T).int()
        starts_S1, kv_len_S = starts_S1.int().contiguous(), lengths_S.int()
        embeds_TD, ids_T = x_TD.float().contiguous(), torch.zeros_like(positions_T)
        out_TD = torch.empty_like(embeds_TD)
        ext, step = native(), self._step
        step.tokens, step.ids, step.positions = len(x_TD), ids_T.data_ptr(), positions_T.data_ptr()
        step.num_seqs = len(lengths_S)
        step.query_start, step.kv_len = starts_S1.data_ptr(), kv_len_S.data_ptr()
        step.groups = [ext.KvGroup(table_SP.data_ptr(), table_SP.stride(0), slots_T.data_ptr())]
        step.ropes = [ext.RopeTable(table.data_ptr(), by_token) for table, by_token in ropes]
        step.rows, step.num_rows = rows_T.data_ptr(), len(rows_T)
        step.hidden, step.ld_hidden = out_TD.data_ptr(), out_TD.stride(0)
        step.embeds = embeds_TD.data_ptr()
        step.first_op, step.num_ops = self._spans[part]
        self._builder.ops.run(step)
        return out_TD


def _site(block: BlockLayer) -> AttentionSite:
    site = block.site
    if site is None:
        raise Unsupported("encoder layers without attention")
    return site
