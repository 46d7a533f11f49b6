"""Dual chunk attention (``spec.DualChunk``): a query has three rotations, for keys of its own chunk
of positions, of the chunk before, and of all earlier ones.

Tokens of the first chunk have ordinary attention, which the backends' kernels compute whatever else
is in the step; for later ones keys are gathered. Qwen's own code scales keys and queries by the
length of the whole prompt; here the length is the query's position, so that cached keys serve
prompts of any length.

Legend: T packed tokens, H query heads, K KV heads, C channels of K, V of V.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from radixlm.arch.rope import inv_freq
from radixlm.arch.spec import DualChunk, Rope
from radixlm.kernels.dispatch import Kernels
from radixlm.layers.gathered_attention import QueryChunk, attend_parts, query_chunks
from radixlm.layers.rope import Angles
from radixlm.step.batch import AttentionSite, ForwardBatch


class DualChunkAttention:
    """The attention of a layer for steps with a sequence beyond its first chunk."""

    def __init__(self, spec: DualChunk, rope: Rope, kernels: Kernels) -> None:
        self.spec, self._kernels = spec, kernels
        # up to so many tokens a sequence is ordinary attention
        self.plain_len = min(spec.chunk, spec.trained or spec.chunk)
        frequencies, self._factor = inv_freq(rope, 0)
        self._inv_freq_R = torch.from_numpy(frequencies)

    def attend(
        self,
        q_THC: Tensor,
        k_TKC: Tensor | None,
        v_TKV: Tensor | None,
        turn: Callable[[Angles], Tensor],
        site: AttentionSite,
        batch: ForwardBatch,
    ) -> Tensor:
        """Store the step's keys, attend: [T, heads * v_dim]. ``q``: rotated by the places in their
        chunks; ``turn``: the same queries, rotated by other angles."""
        out_THV = batch.attn.run(q_THC, k_TKC, v_TKV, site).view(len(q_THC), site.heads, -1)
        places_T = batch.positions_T % self.spec.chunk
        near = (places_T + self.spec.chunk).clamp(max=self.spec.size)
        far = torch.full_like(places_T, min(2 * self.spec.chunk - 1, self.spec.size))
        scale_T11 = self._scales(batch.positions_T)[:, None, None]
        queries = [
            (q * scale_T11).to(q.dtype)
            for q in (turn(self._angles(far)), turn(self._angles(near)), q_THC)
        ]
        for whole in query_chunks(batch, site, q_THC):
            for part, first in self._cut(whole):
                # the first key of the chunk before, and of the queries' own
                before, own = max(0, first - self.spec.chunk), first
                keys = slice(0, before), slice(before, own), slice(own, None)
                parts = [(q[part.rows], k) for q, k in zip(queries, keys, strict=True)]
                out_THV[part.rows] = attend_parts(
                    parts, part, part.causal_QN, site, sinks_H=site.sinks
                )
        return out_THV.flatten(1)

    def _angles(self, positions_T: Tensor) -> Angles:
        frequencies = self._inv_freq_R.to(positions_T.device)
        return self._kernels.rope_angles(positions_T, frequencies, self._factor)

    def _scales(self, positions_T: Tensor) -> Tensor:
        """Factors of the scores: float32 [T]."""
        if not self.spec.trained:
            return torch.ones_like(positions_T, dtype=torch.float32)
        longer = torch.log((positions_T.float() + 1) / self.spec.trained).clamp(min=0)
        return (1 + 0.1 * longer) ** 2

    def _cut(self, whole: QueryChunk) -> Iterator[tuple[QueryChunk, int]]:
        """Queries of one chunk of positions each and its first position, without those that
        ordinary attention has answered."""
        size = self.spec.chunk
        begin, end = int(whole.positions_Q[0]), int(whole.positions_Q[-1]) + 1
        row = whole.rows.start - begin
        later = max(begin, self.plain_len)
        for first in range(later // size * size, end if later < end else 0, size):
            start, stop = max(later, first), min(end, first + size)
            yield (
                QueryChunk(
                    slice(row + start, row + stop),
                    whole.positions_Q[start - begin : stop - begin],
                    whole.sequence,
                    whole.index_NKR[:stop],
                    whole.k_NKC[:stop],
                    whole.v_NKV[:stop],
                ),
                first,
            )
