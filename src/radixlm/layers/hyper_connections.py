"""Hyper-connections (arXiv:2409.19606): several residual streams, read and written by each branch
with weights of its own; with doubly stochastic mixing as in arXiv:2512.24880.

Legend: T tokens, N streams, D model channels.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from radixlm.arch.spec import Block, HyperConnections
from radixlm.layers.context import LayerContext
from radixlm.layers.module import Module
from radixlm.layers.rope import Angles
from radixlm.layers.whole_block import WholeBlock
from radixlm.quant.param import Param
from radixlm.step.batch import ForwardBatch


class Mixed(NamedTuple):
    """A branch's input, and the weights with which its output is added to the streams."""

    x_TD: Tensor
    after_TN: Tensor  # float32
    mix_TNN: Tensor | None  # float32: how much of stream [n] stream [m] takes over


class Weights(Module):
    """Weights made of all streams: scale * (fn . norm(streams)) + base."""

    def __init__(
        self, spec: HyperConnections, rows: int, num_scales: int, dim: int, context: LayerContext
    ) -> None:
        kernels = context.kernels
        self.spec, self._pack, self._sigmoid = spec, kernels.pack_linear, kernels.sigmoid
        self.fn = Param((rows, spec.count * dim), "float32")
        self.base, self.scale = Param((rows,), "float32"), Param((num_scales,), "float32")

    def finish(self) -> None:
        self._fn = self._pack(self.fn.take(), None, "")
        self._base, self._scale = self.base.take(), self.scale.take()

    def _numbers(self, x_TND: Tensor) -> Tensor:
        """float32 [T, rows], neither scaled nor with the base."""
        flat = x_TND.flatten(1).float()
        size = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.spec.norm.eps)
        return self._fn.run(flat) * size


class BranchWeights(Weights):
    def __init__(self, spec: HyperConnections, dim: int, context: LayerContext) -> None:
        super().__init__(spec, spec.rows, 3 if spec.rounds else 2, dim, context)

    def run(self, x_TND: Tensor) -> Mixed:
        """The branch's input and what ``join`` needs."""
        spec, count = self.spec, self.spec.count
        numbers, base = self._numbers(x_TND), self._base
        before = self._sigmoid(numbers[:, :count] * self._scale[0] + base[:count]) + spec.eps
        last = slice(count, 2 * count)
        after = spec.gain * self._sigmoid(numbers[:, last] * self._scale[1] + base[last])
        read = (before[..., None] * x_TND).sum(1).to(x_TND.dtype)
        if not spec.rounds:
            return Mixed(read, after + spec.eps, None)
        mix = numbers[:, 2 * count :] * self._scale[2] + base[2 * count :]
        return Mixed(read, after, self._doubly_stochastic(mix.view(-1, count, count)))

    def _doubly_stochastic(self, mix_TNN: Tensor) -> Tensor:
        eps = self.spec.eps
        mix = mix_TNN.softmax(-1) + eps
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
        for _ in range(self.spec.rounds - 1):
            mix = mix / (mix.sum(-1, keepdim=True) + eps)
            mix = mix / (mix.sum(-2, keepdim=True) + eps)
        return mix


def join(x_TND: Tensor, y_TD: Tensor, mixed: Mixed) -> Tensor:
    """The streams with a branch's output: [T, N, D]."""
    kept = x_TND.float()
    if mixed.mix_TNN is not None:
        kept = mixed.mix_TNN.transpose(1, 2) @ kept
    joined: Tensor = mixed.after_TN[..., None] * y_TD[:, None].float() + kept
    return joined.to(x_TND.dtype)


class HyperConnectionBlock(WholeBlock):
    """A block of layout pre on N streams."""

    def __init__(
        self,
        spec: Block,
        streams: HyperConnections,
        dim: int,
        context: LayerContext,
        rope: int,
        pool: tuple[int, int],
        state_row: int,
    ) -> None:
        super().__init__(spec, dim, context, rope, pool, state_row)
        assert spec.layout == "pre" and None not in (spec.mixer, spec.ffn)
        self.streams1, self.streams2 = (BranchWeights(streams, dim, context) for _ in range(2))

    def run_whole(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """See ``WholeBlock``; x are the streams [T, N, D]."""
        mixed = self.streams1.run(x_TD)
        x_TND = join(x_TD, self._mix(self.norm1.run(mixed.x_TD), batch, angles), mixed)
        mixed = self.streams2.run(x_TND)
        fed = self._feed(self.norm2.run(mixed.x_TD), batch)
        return join(x_TND, fed, mixed)


class EndWeights(Weights):
    """The weights of the streams after the last block."""

    def __init__(self, spec: HyperConnections, dim: int, context: LayerContext) -> None:
        super().__init__(spec, spec.count, 1, dim, context)

    def run(self, x_TND: Tensor) -> Tensor:
        """The weighted sum: [T, D]."""
        weights = self._sigmoid(self._numbers(x_TND) * self._scale + self._base) + self.spec.eps
        return (weights[..., None] * x_TND).sum(1).to(x_TND.dtype)


class HyperConnectionEnds(Module):
    """What runs before the first and after the last block."""

    def __init__(self, spec: HyperConnections, dim: int, context: LayerContext) -> None:
        self.spec = spec
        if spec.ends == "weighted":
            self.end_weights = EndWeights(spec, dim, context)

    def begin(self, x_TD: Tensor) -> Tensor:
        """The streams [T, N, D], all the same."""
        return x_TD[:, None].repeat(1, self.spec.count, 1)

    def end(self, x_TND: Tensor) -> Tensor:
        """One stream again: [T, D]."""
        return self.end_weights.run(x_TND) if self.spec.ends == "weighted" else x_TND.mean(1)
