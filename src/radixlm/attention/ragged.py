"""Bidirectional attention of encoders over whole texts, without a KV cache.

Texts are packed without padding and computed one at a time, so that a result does not depend on
the rest of the step. Legend: T packed tokens, S texts, N tokens of
one text, H query heads, K KV heads, C head channels.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from radixlm.step.batch import AttentionSite, ForwardBatch

# relative position queries and keys, [2 * span, H, C] each
Tables = tuple[Tensor | None, Tensor | None]
MAX_SCORES = (
    1 << 24
)  # numbers of the score matrix at once; longer texts are computed in blocks of queries


class RaggedAttention:
    """The AttentionRunner of one step of an encoder."""

    pools: Sequence[Any] = ()  # there is no cache

    def __init__(
        self,
        batch: ForwardBatch,
        bias_BHW: Tensor | None = None,
        places: Mapping[int, int] | None = None,
        tables: Mapping[int, Tables] | None = None,
        rows_W: Tensor | None = None,
    ) -> None:
        """``bias_BHW`` [B, H, 2M - 1]: added to scores by the distance key - query, from 1 - M to M
        - 1; M is at least the longest text. ``places``: which of them a layer has, by id(site); 0
        where it has no entry. ``tables``: disentangled attention's tables of each
        layer, by id(site); ``rows_W`` [2M - 1]: the row of a distance."""
        starts = batch.query_start_S1.tolist()
        self._spans = list(itertools.pairwise(starts))
        self._bias_BHW, self._places = bias_BHW, places or {}
        self._tables, self._rows_W = tables or {}, rows_W
        self._masks: dict[tuple[int, int, int, int, int], Tensor | None] = {}

    def run(
        self, q_THD: Tensor, k_TKD: Tensor | None, v_TKV: Tensor | None, site: AttentionSite
    ) -> Tensor:
        """[T, heads * v_dim] in the dtype of q."""
        assert k_TKD is not None and v_TKV is not None, "an encoder has no cache to read"
        out_THV = q_THD.new_empty(q_THD.shape[0], site.heads, site.v_dim)
        for start, end in self._spans:
            k = k_TKD[start:end].transpose(0, 1)
            v = v_TKV[start:end].transpose(0, 1)
            step = max(1, MAX_SCORES // (site.heads * (end - start)))
            for first in range(start, end, step):
                last = min(first + step, end)
                q = q_THD[first:last].transpose(0, 1)
                mask = self._mask(end - start, first - start, last - start, site)
                if id(site) in self._tables:
                    mask = self._disentangled_bias(q, k, first - start, site, mask)
                out_THV[first:last] = _attend(q, k, v, mask, site).transpose(0, 1)
        return out_THV.flatten(1)

    def _disentangled_bias(
        self, q: Tensor, k: Tensor, first: int, site: AttentionSite, mask: Tensor | None
    ) -> Tensor:
        """The distances' part of the scores of q [H, Q, C] with k [H, N, C]: [H, Q, N]."""
        assert self._rows_W is not None
        query_RHC, key_RHC = self._tables[id(site)]
        position_N = torch.arange(k.shape[1], device=k.device)
        ahead_QN = position_N - position_N[first : first + q.shape[1], None]
        rows_QN = self._rows_W[ahead_QN + (self._rows_W.shape[0] - 1) // 2]
        added = torch.zeros((), device=k.device)
        if key_RHC is not None:
            scores = q @ key_RHC.permute(1, 2, 0)
            added = added + scores.gather(2, rows_QN.expand(len(q), -1, -1))
        if query_RHC is not None:
            scores = k @ query_RHC.permute(1, 2, 0)
            added = added + scores.gather(2, rows_QN.T.expand(len(q), -1, -1)).transpose(1, 2)
        return added * site.scale if mask is None else added * site.scale + mask

    def _mask(self, length: int, first: int, last: int, site: AttentionSite) -> Tensor | None:
        """Bias and window mask of queries [first, last) of a text: float [H or 1, Q, N]."""
        window = site.window if site.window < length else 0
        key = (length, first, last, window, self._places.get(id(site), 0))
        if key not in self._masks:
            self._masks[key] = self._make_mask(*key)
        return self._masks[key]

    def _make_mask(
        self, length: int, first: int, last: int, window: int, place: int
    ) -> Tensor | None:
        bias = None if self._bias_BHW is None else self._bias_BHW[place]
        if bias is None and not window:
            return None
        device = None if bias is None else bias.device
        position_N = torch.arange(length, device=device)
        ahead_QN = position_N - position_N[first:last, None]
        mask = torch.zeros(1, last - first, length, device=device)
        if bias is not None:
            mask = bias[:, ahead_QN + (bias.shape[1] - 1) // 2]
        return mask.masked_fill(ahead_QN.abs() >= window, -torch.inf) if window else mask


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, site: AttentionSite) -> Tensor:
    """[H, Q, V] of q [H, Q, C], k [K, N, C] and v [K, N, V]."""
    if mask is not None:
        mask = mask.to(q.device, q.dtype)
    if not site.softcap:
        grouped = site.heads != site.kv_heads
        wide = None if mask is None else mask[None]
        return F.scaled_dot_product_attention(
            q[None], k[None], v[None], wide, scale=site.scale, enable_gqa=grouped
        )[0]
    repeat = site.heads // site.kv_heads
    k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
    scores = torch.tanh(q @ k.transpose(1, 2) * (site.scale / site.softcap)) * site.softcap
    return torch.softmax(scores if mask is None else scores + mask, -1) @ v
