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
from radixlm.kernels.cpu.linear import act_code
from radixlm.layers.block import emit_layer_input
from radixlm.layers.context import LayerContext
from radixlm.layers.embedding import Embedding
from radixlm.layers.linear import Linear
from radixlm.layers.mixers import emit_mixer
from radixlm.layers.mlp import MlpLayer
from radixlm.layers.module import Module
from radixlm.layers.norm import NormLayer
from radixlm.layers.program import (
    Branch,
    ProgramBuilder,
    ProgramStream,
    Target,
    handles,
    struct,
)
from radixlm.layers.rope import Angles
from radixlm.layers.whole_block import WholeBlock
from radixlm.quant.param import Param
from radixlm.step.batch import ForwardBatch

LEAST_SQUARE = 1e-5  # of the mean square that a stream is divided by


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

    def emit_begin(self, program: ProgramBuilder, stream: ProgramStream) -> None:
        """``begin``, and the inputs of all layers."""
        handles(
            self.spec, "streams", "rank", "layer_dim", "layer_vocab", "act", "scales"
        )  # fmt: skip
        self.emit(program, stream.residual)
        stream.others = [
            self._emit_sized(program, stream, one, stream.residual, f"stream {i}")
            for i, one in enumerate(self.spread)
        ]

    def emit_end(self, program: ProgramBuilder, stream: ProgramStream) -> None:
        """``end``: the stream is one again."""
        first, dim, selected = program.buffer("end"), program.dim, stream.selected
        program.ops.copy(x=stream.residual, y=first, dim=dim, selected=selected)
        for one, x in zip(self.join, stream.others, strict=True):
            sized = self._emit_sized(program, stream, one, x, "joined")
            program.ops.add(x=sized, y=first, dim=dim, selected=selected)
        program.scale_rows(first, 1 / self.spec.streams, selected)
        stream.residual, stream.others = first, ()

    @staticmethod
    def _emit_sized(
        program: ProgramBuilder, stream: ProgramStream, layer: Linear, x: int, name: str
    ) -> int:
        """What the layer makes of x, with the root mean square of the first stream."""
        y, selected = program.project(layer, x, name, stream.selected), stream.selected
        program.ops.size_as(
            x=stream.residual, y=y, dim=program.dim, least=LEAST_SQUARE, selected=selected
        )
        return y


def _sized(x_TD: Tensor, like_TD: Tensor) -> Tensor:
    """x with the root mean square of ``like``."""
    size = like_TD.square().mean(-1, keepdim=True).sqrt()
    return x_TD * size / x_TD.square().mean(-1, keepdim=True).clamp(min=LEAST_SQUARE).sqrt()


class AltUpBlock(WholeBlock):
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

    def run_whole(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """See ``WholeBlock``; x are the streams [N, T, D]."""
        x_NTD, streams = x_TD, self.altup.streams
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
        return torch.cat((x_NTD[:1], x_NTD[1:] + added_TD))

    def emit(self, program: ProgramBuilder, stream: ProgramStream, is_last: bool) -> None:
        """See ``BlockLayer``."""
        handles(self.spec, "mixer", "ffn", "norm", "layout")
        assert self.spec.layout == "sandwich" and self.mixer is not None
        self._emit_predicted(program, stream)
        h = self.norm1.emit(program, stream.residual, program.buffer("h"))
        low = program.project(self.left, h, "low-rank residual")
        laurel = program.project(self.right, low, "laurel")
        self.laurel_norm.emit(program, laurel, laurel)
        program.ops.add(x=h, y=laurel, dim=program.dim)
        branches = emit_mixer(self.mixer, program, h)
        if is_last:
            branches, laurel = self._select(program, stream, branches, laurel)
        self._emit_corrected(
            program, stream, self._emit_computed(program, stream, branches, laurel)
        )

    def _emit_routed(self, program: ProgramBuilder, x: int, selected: bool) -> int:
        routed = self.router_norm.emit(program, x, program.buffer("routed by"), 0, selected)
        program.scale_rows(routed, 1 / program.dim, selected)
        return program.project(self.router, routed, "routed", selected, act_code("tanh", False))

    def _emit_predicted(self, program: ProgramBuilder, stream: ProgramStream) -> None:
        """New streams, each the old one plus a weighted sum of all old ones."""
        dim, before = program.dim, (stream.residual, *stream.others)
        routed = self._emit_routed(program, stream.residual, False)
        weights = program.project(self.predict, routed, "weights of streams")
        after = [
            program.buffer(f"predicted {self._index % 2} {n}") for n in range(len(before))
        ]  # fmt: skip
        for n, to in enumerate(after):
            program.ops.copy(x=before[n], y=to, dim=dim)
            for m, x in enumerate(before):
                column = n * len(before) + m
                program.ops.add_weighted(x=x, y=to, dim=dim, weights=weights, column=column)
        stream.residual, stream.others = after[0], after[1:]

    def _emit_computed(
        self, program: ProgramBuilder, stream: ProgramStream, branches: list[Branch], laurel: int
    ) -> int:
        """The buffer of what the layer makes of the first stream."""
        dim, selected = program.dim, stream.selected
        mixed, out = program.buffer("mixer's branch"), program.buffer("computed")
        program.add_branches(branches, Target(mixed, selected=selected))
        self.norm2.emit(program, mixed, mixed, 0, selected)
        program.ops.copy(x=stream.residual, y=out, dim=dim, selected=selected)
        for x in (mixed, laurel):
            program.ops.add(x=x, y=out, dim=dim, selected=selected)
        program.scale_rows(out, 1 / math.sqrt(2), selected)
        h = self.norm3.emit(program, out, program.buffer("h"), 0, selected)
        assert isinstance(self.ffn, MlpLayer)
        fed = program.buffer("fed")
        self.ffn.emit(program, h, Target(fed, selected=selected))
        self.norm4.emit(program, fed, fed, 0, selected)
        program.ops.add(x=fed, y=out, dim=dim, selected=selected)
        return out

    def _emit_corrected(self, program: ProgramBuilder, stream: ProgramStream, out: int) -> None:
        """All streams gain a share of how far the prediction was off, all but the first the
        layer's own input."""
        dim, selected, first = program.dim, stream.selected, program.buffer("first")
        routed = self._emit_routed(program, out, selected)
        shares = program.project(self.correct, routed, "shares", selected)
        program.ops.add(x=stream.residual, y=out, dim=dim, scale=-1.0, selected=selected)
        for n, to in enumerate((stream.residual, *stream.others)):
            program.ops.add_weighted(
                x=out, y=to, dim=dim, weights=shares, column=n, shift=1.0, selected=selected
            )
        program.ops.copy(x=stream.residual, y=first, dim=dim, selected=selected)
        if self._correct_scale is not None:
            scale = program.hold(self._correct_scale)
            program.ops.affine(y=first, shift=0, factor=scale, dim=dim, selected=selected)
        parts = (self.layer_gate, self.layer_out, self.layer_norm)
        act = self.altup.act
        branch = emit_layer_input(program, first, parts, act, self._index, selected)
        for to in stream.others:
            program.ops.add(x=branch, y=to, dim=dim, selected=selected)
