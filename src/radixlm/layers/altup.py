"""AltUp (arXiv:2301.13310): several residual streams, of which a layer computes one and predicts
the others; LAuReL (arXiv:2411.07501): low-rank residuals; and an input of its own for each layer.

Legend: N streams, T tokens, D model channels, L layers, P channels of a layer's own input.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from radixlm.arch.spec import AltUp, Block, LayerInputs, Norm
from radixlm.kernels.cpu.checks import dtype_code
from radixlm.layers.block import BlockLayer
from radixlm.layers.context import LayerContext
from radixlm.layers.embedding import Embedding
from radixlm.layers.module import Module
from radixlm.layers.norm import NormLayer
from radixlm.layers.program import ProgramBuilder, struct
from radixlm.layers.residual import added
from radixlm.layers.rope import Angles
from radixlm.quant.param import Param
from radixlm.step.batch import ForwardBatch


class PerLayerInputsMaker(Module):
    """The inputs of all layers, from tokens and their embeddings."""

    def __init__(
        self, spec: LayerInputs, dim: int, num_layers: int, norm: Norm, context: LayerContext
    ) -> None:
        self.inputs_spec, self._dim, self._num_layers = spec, dim, num_layers
        width = num_layers * spec.dim
        if spec.vocab:
            self.per_layer = Embedding(spec.vocab, width, context, spec.dim**0.5)
        self.project = context.plain_linear(dim, width)
        self.project_norm = NormLayer(norm, (spec.dim,), context.kernels, context.device)

    def inputs(self, ids_T: Tensor, x_TD: Tensor) -> Tensor:
        """Each layer's own input: [T, L, P]."""
        spec = self.inputs_spec
        shape = (-1, self._num_layers, spec.dim)
        projected = self.project.run(x_TD) * self._dim**-0.5
        rows = projected.reshape(-1, spec.dim)
        normed = self.project_norm.run(rows).view(shape)
        if not spec.vocab:
            return normed
        ids_T = torch.where(ids_T < spec.vocab, ids_T, 0)
        return (normed + self.per_layer.run(ids_T).view(shape)) * 2**-0.5

    def emit(self, program: ProgramBuilder, source: int) -> None:
        """The same as operations of a program, the layers' inputs one after another in a row."""
        spec, width = self.inputs_spec, self.project.out_features
        inputs = program.layer_inputs = program.buffer("inputs", width)
        program.linear(self.project.packed, source, inputs, scale=self._dim**-0.5)
        self.project_norm.emit_heads(program, inputs, 0, 0, self._num_layers)
        if not spec.vocab:
            return
        table, rows = self.per_layer.plain_table, program.buffer("input rows", width)
        assert table is not None
        args = struct(
            "EmbedArgs", table=program.hold(table), dtype=dtype_code(table.dtype, "embedding"),
            vocab=spec.vocab, dim=width, scale=self.per_layer.scale, takes_first=1,
        )  # fmt: skip
        program.ops.embed(y=rows, tied=None, args=args, replaced=False)
        program.ops.add(x=rows, y=inputs, dim=width)
        program.ops.scale(y=inputs, offset=0, dim=width, scale=2**-0.5)


class AltUpEnds(PerLayerInputsMaker):
    """What runs before the first and after the last block."""

    def __init__(
        self, spec: AltUp, dim: int, num_layers: int, norm: Norm, context: LayerContext
    ) -> None:
        inputs = LayerInputs(spec.layer_dim, spec.layer_vocab, spec.act)
        super().__init__(inputs, dim, num_layers, norm, context)
        self.spec = spec
        self.spread = [context.plain_linear(dim, dim) for _ in range(spec.streams - 1)]
        self.join = [context.plain_linear(dim, dim) for _ in range(spec.streams - 1)]

    def begin(self, x_TD: Tensor) -> Tensor:
        """The streams [N, T, D], all with the root mean square of the first."""
        return torch.stack([x_TD, *(_sized(one.run(x_TD), x_TD) for one in self.spread)])

    def end(self, x_NTD: Tensor) -> Tensor:
        """One stream again: [T, D]."""
        first = x_NTD[0]
        rest = [_sized(one.run(x), first) for one, x in zip(self.join, x_NTD[1:], strict=True)]
        return torch.stack([first, *rest]).mean(0)


def _sized(x_TD: Tensor, like_TD: Tensor) -> Tensor:
    """x with the root mean square of ``like``."""
    size = like_TD.square().mean(-1, keepdim=True).sqrt()
    return x_TD * size / x_TD.square().mean(-1, keepdim=True).clamp(min=1e-5).sqrt()


class AltUpBlock(BlockLayer):
    """A block on N streams: it computes the first one."""

    def __init__(
        self,
        spec: Block,
        altup: AltUp,
        index: int,
        dim: int,
        context: LayerContext,
        rope: int,
        pool: tuple[int, int],
    ) -> None:
        super().__init__(spec, dim, context, rope, pool)
        self.altup, self._index = altup, index
        streams, kernels, device = altup.streams, context.kernels, context.device
        linear = context.plain_linear
        self.predict, self.correct = linear(streams, streams**2), linear(streams, streams)
        self.router = linear(dim, streams)
        self.router_norm = NormLayer(spec.norm, (dim,), kernels, device)
        self.left, self.right = linear(dim, altup.rank), linear(altup.rank, dim)
        self.laurel_norm = NormLayer(spec.norm, (dim,), kernels, device)
        self.layer_gate, self.layer_out = linear(dim, altup.layer_dim), linear(altup.layer_dim, dim)
        self.layer_norm = NormLayer(spec.norm, (dim,), kernels, device)
        self.correct_scale = Param((dim,), "float32")
        self._activate = kernels.activate

    def finish(self) -> None:
        super().finish()
        scale = self.correct_scale.take()
        self._correct_scale = scale if self.altup.scales else None

    def _routed(self, x_TD: Tensor) -> Tensor:
        """The router's weight of each stream: [T, N]."""
        return torch.tanh(self.router.run(self.router_norm.run(x_TD) / x_TD.shape[-1]))

    def run_deferred(
        self,
        x_TD: Tensor,
        pending_TD: Tensor | None,
        batch: ForwardBatch,
        angles: Sequence[Angles],
    ) -> tuple[Tensor, Tensor | None]:
        """See ``BlockLayer``; x are the streams [N, T, D]."""
        x_NTD, streams = added(x_TD, pending_TD), self.altup.streams
        weights = self.predict.run(self._routed(x_NTD[0])).view(-1, streams, streams)
        x_NTD = x_NTD + torch.einsum("mtd,tnm->ntd", x_NTD, weights)
        active = x_NTD[0]
        h = self.norm1.run(active)
        laurel = h + self.laurel_norm.run(self.right.run(self.left.run(h)))
        mixed = self.norm2.run(self._mix(h, batch, angles))
        residual = (active + mixed + laurel) / math.sqrt(2)
        out = residual + self.norm4.run(self._feed(self.norm3.run(residual), batch))
        share = (self.correct.run(self._routed(out)) + 1.0).T[..., None]
        x_NTD = x_NTD + (out - active) * share
        first = x_NTD[0] if self._correct_scale is None else x_NTD[0] * self._correct_scale
        assert batch.scratch.per_layer_TLP is not None
        gated = self._activate(self.layer_gate.run(first.contiguous()), self.altup.act)
        gated = gated * batch.scratch.per_layer_TLP[:, self._index]
        added_TD = self.layer_norm.run(self.layer_out.run(gated))
        return torch.cat((x_NTD[:1], x_NTD[1:] + added_TD)), None
