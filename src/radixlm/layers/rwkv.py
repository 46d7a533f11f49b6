"""RWKV 4 (arXiv:2305.13048): mixers that read each token together with the one before it.

Legend: T packed tokens, D model channels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from radixlm.arch.spec import RwkvChannel, RwkvTime
from radixlm.layers.context import LayerContext
from radixlm.layers.convolved_attention import run_recurrence, shifted
from radixlm.layers.module import Module
from radixlm.layers.rope import Angles
from radixlm.pools.state import StateStep
from radixlm.quant.param import Param
from radixlm.step.batch import ForwardBatch

EMPTY_EXPONENT = -1e38  # exponent of an empty sum


class _Mixing(Module):
    """x where a channel's share is 1, the token before where it is 0."""

    def __init__(self, dim: int) -> None:
        self.share = Param((dim,), "float32")

    def finish(self) -> None:
        self._share_D = self.share.take()

    def run(self, x_TD: Tensor, before_TD: Tensor) -> Tensor:
        mixed: Tensor = x_TD * self._share_D + before_TD * (1 - self._share_D)
        return mixed.to(x_TD.dtype)


class RwkvTimeLayer(Module):
    """Sums of values weighted by exp(key) decayed by channel; the token itself has a bonus."""

    def __init__(self, spec: RwkvTime, dim: int, context: LayerContext, row: int) -> None:
        self.spec, self._row, self._kernels = spec, row, context.kernels
        self.mix_key, self.mix_value, self.mix_receptance = (_Mixing(dim) for _ in "kvr")
        self.key, self.value, self.receptance = (context.linear(dim, spec.channels) for _ in "kvr")
        self.out = context.linear(spec.channels, dim)
        self.decay, self.first = (
            Param((spec.channels,), "float32"),
            Param((spec.channels,), "float32"),
        )

    def finish(self) -> None:
        self._fade_C = -torch.exp(self.decay.take())
        self._first_C = self.first.take()

    def run(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """The mixer's branch: [T, D]."""
        before = run_recurrence(batch, (self._row, 0), x_TD, shifted)
        key = self.key.run(self.mix_key.run(x_TD, before)).float()
        value = self.value.run(self.mix_value.run(x_TD, before)).float()
        read = self.receptance.run(self.mix_receptance.run(x_TD, before))
        opened = self._kernels.sigmoid(read.float())
        step: StateStep = batch.states
        out = torch.empty_like(value)
        for segment in step.segments:
            k, v = (
                t[segment.rows].view(segment.num_sequences, -1, t.shape[1]) for t in (key, value)
            )
            states = [t[segment.source].float() for t in step.pool.layers[self._row][1:]]
            is_new = batch.positions_T[segment.rows].view(segment.num_sequences, -1)[:, :1] == 0
            states[2] = torch.where(is_new, EMPTY_EXPONENT, states[2])
            y, after = self._kernels.fading_mean(
                k, v, self._first_C, self._fade_C, torch.stack(states, 1)
            )
            for kept, state in zip(step.pool.layers[self._row][1:], after.unbind(1), strict=True):
                kept[segment.target] = state.to(kept.dtype)
            out[segment.rows] = y.flatten(0, 1)
        return self.out.run((opened * out).to(x_TD.dtype))


class RwkvChannelLayer(Module):
    """A feed-forward gated by another map of the same."""

    def __init__(self, spec: RwkvChannel, dim: int, context: LayerContext, row: int) -> None:
        self.spec, self._row, self._kernels = spec, row, context.kernels
        self.mix_key, self.mix_receptance = (_Mixing(dim) for _ in "kr")
        self.key, self.value = context.linear(dim, spec.inner), context.linear(spec.inner, dim)
        self.receptance = context.linear(dim, dim)

    def run(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """The mixer's branch: [T, D]."""
        before = run_recurrence(batch, (self._row, 0), x_TD, shifted)
        h = torch.relu(self.key.run(self.mix_key.run(x_TD, before))).square()
        read = self.receptance.run(self.mix_receptance.run(x_TD, before))
        return (self._kernels.sigmoid(read.float()) * self.value.run(h)).to(x_TD.dtype)
