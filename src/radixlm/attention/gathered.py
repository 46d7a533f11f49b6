"""Attention in plain torch over the C++ kernels' cache layout, for what those kernels lack:
slopes on the scores (ALiBi) and chunks.

Legend: S sequences, N tokens read of a sequence, K KV heads, C channels of K, V of V.
"""

from __future__ import annotations

from torch import Tensor

from radixlm.attention.reference import attend, make_piece, spans_of, split_spans
from radixlm.kernels.cpu.cache import TILE
from radixlm.step.batch import AttentionSite, ForwardBatch


def attend_gathered(
    q_THC: Tensor, k_cache: Tensor, v_cache: Tensor, batch: ForwardBatch, site: AttentionSite
) -> Tensor:
    """[T, heads * v_dim]; K and V of the step are stored already.

    ``k_cache`` is [P, K, B / 16, C, 16], ``v_cache`` [P, K, B, V]: a layer's pages.
    """
    page_size = v_cache.shape[2]
    out_THV = q_THC.new_zeros(q_THC.shape[0], site.heads, site.v_dim)
    table_SP = batch.page_table_GSP[site.group].long()
    for spans in split_spans(spans_of(batch), site):
        piece = make_piece(spans, table_SP, page_size, site.window, site.chunk)
        pages_SN, at_SN = piece.tokens_SN // page_size, piece.tokens_SN % page_size
        k_SNKC = k_cache[pages_SN, :, at_SN // TILE, :, at_SN % TILE].to(q_THC.dtype)
        v_SNKV = v_cache[pages_SN, :, at_SN].to(q_THC.dtype)
        out_THV[piece.rows_SQ] = attend(q_THC[piece.rows_SQ], k_SNKC, v_SNKV, piece, site)
    return out_THV.flatten(1)
