"""Attention of blocks that run several times (``spec.AttentionExtras.later_window``).

Legend: T tokens, D model channels, H query heads, C channels of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from radixlm.arch.spec import Attention
from radixlm.base.record import replace
from radixlm.layers.attention import AttentionLayer, heads_of
from radixlm.layers.context import LayerContext
from radixlm.layers.program import Branch, ProgramBuilder, Unsupported
from radixlm.layers.rope import Angles
from radixlm.quant.param import Param, Shard
from radixlm.step.batch import AttentionSite, ForwardBatch


class LoopedAttentionLayer(AttentionLayer):
    """The first run attends to all tokens. A later one has keys of its own with a window, and reads
    those of the first run too; a gate of each query weighs the two."""

    def __init__(
        self, spec: Attention, dim: int, context: LayerContext, rope: int, pool: tuple[int, int]
    ) -> None:
        """As ``AttentionLayer``; ``pool`` is that of the first run."""
        assert spec.extras is not None
        plain = replace(spec, extras=None)
        super().__init__(plain, dim, context, rope, pool)
        cut, self._window = heads_of(plain, context), spec.extras.later_window
        self.run_gate = cut.cut(Param((spec.heads, spec.head_dim), "float32", Shard(0)))
        self.run_bias = cut.cut(Param((spec.heads,), "float32", Shard(0)))
        self._first: AttentionSite | None = None

    def finish(self) -> None:
        super().finish()
        self._gate_HC, self._bias_H = self.run_gate.take(), self.run_bias.take()

    def of_later_run(self, place: tuple[int, int]) -> LoopedAttentionLayer:
        """The layer of a later run, whose keys lie at ``place`` (group, row) of the cache."""
        layer, (group, row) = copy(self), place
        layer.site = replace(self.site, group=group, layer=row, window=self._window)
        layer._first = replace(self.site, stores=False)
        return layer

    def run(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """The mixer's branch: [T, D]."""
        if self._first is None:
            return super().run(x_TD, batch, angles)
        q, k, v, _ = self._project(x_TD)
        self._prepare(q, k, self.qk_norm, angles[self.rope_index], self._interleaved)
        near = batch.attn.run(q, k, v, self.site).view(q.shape)
        far = batch.attn.run(q, None, None, self._first).view(q.shape)
        share_TH = torch.sigmoid((q.float() * self._gate_HC).sum(-1) + self._bias_H)
        out = torch.lerp(near.float(), far.float(), share_TH[..., None])
        return self.o.run(out.to(near.dtype).flatten(1))

    def emit(self, program: ProgramBuilder, source: int) -> list[Branch]:
        raise Unsupported("AttentionExtras.later_window")
