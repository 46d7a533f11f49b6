"""Stacks of blocks that run repeatedly, over two streams or one (``spec.HierarchicalRecurrence``).

Legend: T packed tokens, D model channels.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from radixlm.arch.spec import HierarchicalRecurrence
from radixlm.layers.block import BlockLayer
from radixlm.layers.module import Module
from radixlm.layers.norm import NormLayer
from radixlm.layers.program import ProgramBuilder, ProgramStream, handles
from radixlm.layers.rope import Angles
from radixlm.quant.param import Param
from radixlm.step.batch import ForwardBatch

Run = Callable[[Tensor], Tensor]


class RecurrenceRunner(Module):
    """Runs the stacks. All runs of a stack share its weights; each has its own layers in the KV
    cache."""

    def __init__(self, spec: HierarchicalRecurrence, dim: int) -> None:
        self.spec = spec
        if spec.inner:
            self.start = Param((dim,), "float32")

    def finish(self) -> None:
        self._start_D = self.start.take() if self.spec.inner else None

    def layers_with_weights(self) -> list[int]:
        """The blocks of each stack's first run, which have the weights."""
        size, second = self.spec.size, self.spec.inner * self.spec.size
        return [*range(size), *(range(second, second + size) if second else ())]

    def bind(self, blocks: Sequence[BlockLayer], places: Mapping[int, tuple[int, int]]) -> None:
        """``blocks`` are the loaded ones of both stacks; ``places``: (group, row) of all layers."""
        size, runs = self.spec.size, list[tuple[BlockLayer, ...]]()
        for run, stack in enumerate(self.spec.runs):
            members = blocks[stack * size : (stack + 1) * size]
            runs.append(tuple(b.at(places[run * size + i]) for i, b in enumerate(members)))
        self._runs = tuple(runs)  # tuples: not part of the tree that is loaded

    def run(
        self, first_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles], norm: Run
    ) -> Tensor:
        """The first stream after all runs, normed: [T, D]."""
        start_D, second_TD = self._start_D, None
        if start_D is not None:
            second_TD = start_D.to(first_TD.dtype).expand_as(first_TD)
        for blocks, stack in zip(self._runs, self.spec.runs, strict=True):
            x_TD = first_TD if second_TD is None else first_TD + second_TD
            for block in blocks:
                x_TD = block.run(x_TD, batch, angles)
            normed = norm(x_TD) if self.spec.norms_each else x_TD
            if stack or second_TD is None:
                first_TD = normed
            else:
                second_TD = normed
        return first_TD if self.spec.norms_each else norm(first_TD)

    def emit(self, program: ProgramBuilder, stream: ProgramStream, norm: NormLayer) -> None:
        """The same as operations on the stream, before the last norm."""
        assert self.spec.runs[-1] or not self.spec.inner, "the first stream is the outcome"
        handles(self.spec, "outer", "inner", "size", "stacks")
        dim, last = program.dim, len(self._runs) - 1
        first, second, x = stream.residual, program.buffer("second"), program.buffer("run")
        for run, (blocks, stack) in enumerate(zip(self._runs, self.spec.runs, strict=True)):
            program.ops.copy(x=first, y=x, dim=dim)
            if run and self.spec.inner:
                program.ops.add(x=second, y=x, dim=dim)
            elif self.spec.inner:
                program.ops.affine(y=x, shift=program.hold(self._start_D), factor=0, dim=dim)
            stream.residual = x
            for i, block in enumerate(blocks):
                block.emit(program, stream, is_last=run == last and i == len(blocks) - 1)
            if run < last:
                norm.emit(program, x, first if stack or not self.spec.inner else second)
