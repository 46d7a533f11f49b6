"""One layer of a decoder: a mixer and a feed-forward, joined to the residual stream by a layout.

A layout is a list of steps (``LAYOUTS``). They are run in torch (``run``) and emitted as operations
of the C++ step program (``emit``); each step is a word:

    normN    h = normN(residual)                 read      h = residual
    renormN  residual = normN(residual)          mix       push mixer(h)
    feed     push ffn(h)                         experts   push parallel_moe(h, routed by residual)
    postN    top = normN(top)                    sum       add the top to the one below it
    conv     top = the mixer's convolution of top
    add      pop the top, it joins the residual
    defer    deferred = deferred_moe(h)          late      what was deferred joins: by the block
                                                 before, or in layout early_experts by this one

Legend: T tokens, D model channels. Blocks own the residual x and change it in place. A branch that
ends a block stays apart (``pending``): the next block's norm adds it, in one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass

from torch import Tensor

from radixlm.arch.spec import Block, LayerInputs, Moe, Norm, RelativeAttention, SquareLinear
from radixlm.base.record import replace
from radixlm.kernels.cpu.linear import act_code
from radixlm.layers.attention import AttentionLayer
from radixlm.layers.context import LayerContext
from radixlm.layers.convolved_attention import RelativeAttentionLayer
from radixlm.layers.extended_attention import ExtendedAttentionLayer
from radixlm.layers.linear import Linear
from radixlm.layers.looped_attention import LoopedAttentionLayer
from radixlm.layers.mixers import SquareLinearLayer, emit_mixer, make_mixer, site_of_mixer
from radixlm.layers.mlp import MlpLayer
from radixlm.layers.modality_moe import ModalityMoeLayer
from radixlm.layers.module import Module
from radixlm.layers.moe import MoeLayer
from radixlm.layers.norm import GatedNormLayer, NormLayer
from radixlm.layers.program import (
    NOWHERE,
    Branch,
    ProgramBuilder,
    ProgramStream,
    Target,
    Unsupported,
    handles,
)
from radixlm.layers.residual import AffineResidual, Join, added, gated_sum, weighted_sum
from radixlm.layers.rope import Angles
from radixlm.quant.param import Param
from radixlm.step.batch import AttentionSite, ForwardBatch

LAYOUTS = {
    "pre": "norm1 mix add norm2 feed add late",
    "post": "read mix post1 add read feed post2 add",
    "post_sum": "read mix add renorm1 read feed add renorm2",
    "sandwich": "norm1 mix post2 add norm3 feed post4 add",
    "parallel": "norm1 mix feed add add",
    "parallel2": "norm1 mix norm2 add feed add",
    "prenorm_ffn_only": "read mix add norm1 feed add",
    "scaled_post": "renorm1 read mix add renorm2 read feed add",
    "gated_cross": "norm1 mix add norm2 feed add",  # run by GatedCrossBlock
    "early_experts": "norm3 defer norm1 mix add norm2 feed add late",
}
MIXER_ONLY, FFN_ONLY = "norm1 mix add", "norm1 feed add"
WITH_CROSS = "norm1 mix add norm2 cross add norm3 feed add"  # run by EncoderDecoderBlock
WITH_CONVOLUTION = "norm1 mix add norm2 feed conv add"
WITH_DEFERRED = "norm1 mix add norm2 defer feed add late"
WITH_PARALLEL = "norm1 mix post2 add norm3 feed post5 norm6 experts post7 sum post4 add"


def layout_of(spec: Block) -> str:
    """The steps of a block."""
    if None in (spec.ffn, spec.mixer):
        return "" if spec.ffn is spec.mixer else FFN_ONLY if spec.mixer is None else MIXER_ONLY
    if isinstance(spec.mixer, RelativeAttention):
        return WITH_CONVOLUTION
    if spec.cross is not None:
        return WITH_CROSS
    if spec.parallel_moe is not None:
        return WITH_PARALLEL
    return WITH_DEFERRED if hands_on(spec) else LAYOUTS[spec.layout]


def hands_on(spec: Block) -> bool:
    """Whether what the block defers joins in the next one."""
    return spec.deferred_moe is not None and spec.layout == "pre"


def split_step(word: str) -> tuple[str, int]:
    """("norm", 2) of "norm2"; ("mix", 0) of "mix"."""
    name = word.rstrip("0123456789")
    return name, int(word[len(name) :] or 0)


class PerLayerInputLayer(Module):
    """How a layer's own input joins the residual: x + norm(out(act(gate(x)) * input))."""

    def __init__(
        self, spec: LayerInputs, index: int, dim: int, context: LayerContext, norm: Norm
    ) -> None:
        self.spec, self.index, self._activate = spec, index, context.kernels.activate
        self.gate = context.plain_linear(dim, spec.dim)
        self.out = context.plain_linear(spec.dim, dim)
        self.norm = NormLayer(norm, (dim,), context.kernels, context.device)

    def run(self, x_TD: Tensor, batch: ForwardBatch) -> Tensor:
        """x with the input joined."""
        assert batch.scratch.per_layer_TLP is not None
        gated = self._activate(self.gate.run(x_TD), self.spec.act)
        x_TD += self.norm.run(self.out.run(gated * batch.scratch.per_layer_TLP[:, self.index]))
        return x_TD

    def emit(self, program: ProgramBuilder, stream: ProgramStream) -> None:
        """The same, of the inputs that ``PerLayerInputsMaker.emit`` has made."""
        handles(self.spec, "dim", "vocab", "act")
        source, selected = stream.residual, stream.selected
        parts = (self.gate, self.out, self.norm)
        branch = emit_layer_input(program, source, parts, self.spec.act, self.index, selected)
        program.ops.add(x=branch, y=source, dim=program.dim, selected=selected)


def emit_layer_input(
    program: ProgramBuilder,
    source: int,
    parts: tuple[Linear, Linear, NormLayer],
    act: str,
    index: int,
    selected: bool,
) -> int:
    """norm(out(act(gate(source)) * input of layer ``index``)) in a buffer. ``parts``: gate, out,
    norm."""
    gate, out, norm = parts
    dim = gate.out_features
    inputs, offset = program.layer_inputs, index * dim
    gated = program.project(gate, source, "gated input", selected, act_code(act, False))
    if selected:
        inputs, offset = program.select(inputs, "selected input", dim, offset), 0
    program.gate(inputs, gated, (1, dim), "IDENTITY", offset=offset, selected=selected)
    branch = program.project(out, gated, "branch", selected)
    return norm.emit(program, branch, branch, selected=selected)


@dataclass(slots=True)
class _Outcome:
    """A branch of a program that is not yet in its buffer: ``emit`` puts it there, or adds it."""

    emit: Callable[[Target], None]
    scale: float
    buffer: int = NOWHERE


class BlockLayer(Module):
    """``run(x, batch, angles)`` adds the block's branches to x and returns it; ``run_deferred``
    takes and returns a branch that is yet to be added to x."""

    norm1: NormLayer
    norm2: NormLayer
    norm3: NormLayer
    norm4: NormLayer
    norm5: NormLayer
    norm6: NormLayer
    norm7: NormLayer
    ffn: MlpLayer | MoeLayer | SquareLinearLayer  # absent where the record has none
    layer_input: PerLayerInputLayer | None = None

    def __init__(
        self,
        spec: Block,
        dim: int,
        context: LayerContext,
        rope: int,
        pool: tuple[int, int],
        state_row: int = -1,
    ) -> None:
        """``rope`` indexes the model's RopeTables, ``pool`` is (group, row), ``state_row`` a row
        of the state pool; -1 without."""
        self.spec = spec
        self.mixer = make_mixer(spec, dim, context, rope, pool, state_row)
        if isinstance(spec.ffn, Moe):
            kind = MoeLayer if spec.ffn.vision is None else ModalityMoeLayer
            self.ffn = kind(spec.ffn, dim, context)
        elif isinstance(spec.ffn, SquareLinear):
            self.ffn = SquareLinearLayer(spec.ffn, dim, context)
        elif spec.ffn is not None:
            self.ffn = MlpLayer(spec.ffn, dim, context.of_dense)
        if spec.deferred_moe is not None:
            self.deferred_moe = MoeLayer(spec.deferred_moe, dim, context)
        if spec.parallel_moe is not None:
            self.parallel_moe = MoeLayer(spec.parallel_moe, dim, context)
        self._make_norms(dim, context)
        self._make_factors(dim)

    def _make_norms(self, dim: int, context: LayerContext) -> None:
        spec = self.spec
        words = [split_step(word) for word in layout_of(spec).split()]
        norms: dict[int, NormLayer] = {}
        for number in sorted({number for _, number in words if number}):
            index = number - 1
            norm = spec.post_norms[index // 2] if spec.post_norms and index % 2 else spec.norm
            rank = spec.norm_ranks[index] if index < 2 else 0
            norms[number] = (
                GatedNormLayer(norm, dim, rank, context)
                if rank
                else NormLayer(norm, (dim,), context.kernels, context.device)
            )
            setattr(self, f"norm{number}", norms[number])
        self._steps = tuple((name, norms.get(number)) for name, number in words)

    def _make_factors(self, dim: int) -> None:
        """What the residual and the branches are multiplied with."""
        spec = self.spec
        if spec.out_scale:
            self.out_scale = Param((1,), "float32")
        if spec.affine_residual:
            self.affine1, self.affine2 = (AffineResidual(dim) for _ in range(2))
        if spec.residual_channels:
            self.kept1, self.kept2 = Param((dim,), "float32"), Param((dim,), "float32")
        if spec.gate_temperature:
            self.gate1, self.gate2 = Param((dim,), "float32"), Param((dim,), "float32")

    def finish(self) -> None:
        self._scale = self.out_scale.take() if self.spec.out_scale else None
        self._joins = self._make_joins()

    def _make_joins(self) -> tuple[Join, ...]:
        """How the two branches join the residual, if not by a plain sum."""
        spec = self.spec
        if spec.affine_residual:
            return self.affine1.run, self.affine2.run
        if spec.residual_channels:
            return tuple(weighted_sum(p.take(), None) for p in (self.kept1, self.kept2))
        if spec.gate_temperature:
            gates = (self.gate1, self.gate2)
            return tuple(gated_sum(gate.take() / spec.gate_temperature) for gate in gates)
        if (factors := self._factors) is None:
            return ()
        return weighted_sum(*factors[:2]), weighted_sum(*factors[2:])

    @property
    def _factors(self) -> tuple[float, float, float, float] | None:
        """What the residual and the branch are multiplied with at each of the two joins."""
        is_post = self.spec.layout == "scaled_post"
        return self.spec.post_scales if is_post else self.spec.weights

    def add_per_layer_input(
        self, spec: LayerInputs, index: int, dim: int, context: LayerContext
    ) -> None:
        """The block is layer ``index`` of a model whose layers have inputs of their own."""
        self.layer_input = PerLayerInputLayer(spec, index, dim, context, self.spec.norm)

    @property
    def site(self) -> AttentionSite | None:
        """The attention's site, if the block attends."""
        return site_of_mixer(self.mixer)

    def at(self, place: tuple[int, int]) -> BlockLayer:
        """A plain, loaded block whose keys and values lie at ``place`` (group, row) of the cache:
        this one, or another with its weights."""
        mixer = self.mixer
        assert isinstance(mixer, AttentionLayer | ExtendedAttentionLayer)
        group, row = place
        if (mixer.site.group, mixer.site.layer) == place:
            return self
        block = copy(self)
        if isinstance(mixer, LoopedAttentionLayer):
            block.mixer = mixer.of_later_run(place)
            return block
        block.mixer = copy(mixer)
        block.mixer.site = replace(mixer.site, group=group, layer=row)
        return block

    def run(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """The residual after the block: [T, D]."""
        return added(*self.run_deferred(x_TD, None, batch, angles))

    def run_deferred(
        self,
        x_TD: Tensor,
        pending_TD: Tensor | None,
        batch: ForwardBatch,
        angles: Sequence[Angles],
    ) -> tuple[Tensor, Tensor | None]:
        """``run`` on x + pending; x itself may be changed. The sum of the outcomes is that of
        ``run``."""
        x_TD, pending_TD = self._run_steps(x_TD, pending_TD, batch, angles)
        if self.layer_input is not None:
            x_TD, pending_TD = self.layer_input.run(added(x_TD, pending_TD), batch), None
        if self._scale is not None:
            x_TD, pending_TD = added(x_TD, pending_TD), None
            x_TD *= self._scale
        return x_TD, pending_TD

    def _run_steps(  # noqa: C901  an interpreter: a branch for each word
        self, x: Tensor, pending: Tensor | None, batch: ForwardBatch, angles: Sequence[Angles]
    ) -> tuple[Tensor, Tensor | None]:
        stack: list[Tensor] = []
        scratch, h, late, num_joined = batch.scratch, x, None, 0
        for step, norm in self._steps:
            if norm is not None and step == "norm":
                h, pending = norm.add_run(x, pending), None
            elif norm is not None and step == "post":
                stack[-1] = norm.run(stack[-1])
            elif norm is not None and step == "renorm":
                x, pending = norm.add_run(x, pending), None
            elif step == "read":
                x, pending = added(x, pending), None
                h = x
            elif step == "mix":
                stack.append(self._mix(h, batch, angles))
            elif step == "feed":
                stack.append(self._feed(h, batch))
            elif step == "experts":
                stack.append(self.parallel_moe.run(h, x))
            elif step == "conv":
                assert isinstance(self.mixer, RelativeAttentionLayer)
                stack[-1] = self.mixer.convolve_ffn(stack[-1], batch)
            elif step == "sum":
                top = stack.pop()
                stack[-1] += top
            elif step == "defer":
                late, batch.scratch.deferred_TD = (
                    batch.scratch.deferred_TD,
                    self.deferred_moe.run(h),
                )
            elif step == "late":
                if not hands_on(self.spec):
                    late, scratch.deferred_TD = scratch.deferred_TD, None
                if late is not None:
                    x, pending = added(x, pending), late
            else:
                assert step == "add", step
                top = stack.pop()
                if self._joins:
                    x, pending = self._joins[num_joined](added(x, pending), top), None
                else:
                    pending = top if pending is None else pending.add_(top)
                num_joined += 1
        return x, pending

    def _mix(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        assert self.mixer is not None
        y = self.mixer.run(x_TD, batch, angles)
        return y if self.spec.residual == 1.0 else y * self.spec.residual

    def _feed(self, x_TD: Tensor, batch: ForwardBatch) -> Tensor:
        ffn = self.ffn
        y = ffn.run(x_TD, batch=batch) if isinstance(ffn, MoeLayer) else ffn.run(x_TD)
        return y if self.spec.residual == 1.0 else y * self.spec.residual

    def emit(self, program: ProgramBuilder, stream: ProgramStream, is_last: bool) -> None:
        """The block as operations on the stream. The last block gathers the selected rows once its
        mixer is done."""
        if type(self) is not BlockLayer:
            raise Unsupported(type(self).__name__)
        handles(
            self.spec, "mixer", "ffn", "norm", "layout", "residual", "out_scale", "deferred_moe",
            "parallel_moe", "weights", "post_norms", "post_scales", "norm_ranks",
        )  # fmt: skip
        if is_last and self.mixer is None:
            self._select(program, stream, [], NOWHERE)
        self._emit_steps(program, stream, is_last)
        if self.layer_input is not None:
            self.layer_input.emit(program, stream)
        if self._scale is not None:
            program.scale_rows(stream.residual, float(self._scale), stream.selected)

    def _emit_steps(  # noqa: C901
        self, program: ProgramBuilder, stream: ProgramStream, is_last: bool
    ) -> None:
        stack: list[_Outcome] = []
        h = stream.residual
        late, num_joined = NOWHERE, 0
        for number, (step, norm) in enumerate(self._steps):
            if norm is not None and step == "norm":
                h = norm.emit(program, stream.residual, program.buffer("h"), 0, stream.selected)
            elif norm is not None and step == "renorm":
                norm.emit(program, stream.residual, stream.residual, 0, stream.selected)
            elif norm is not None and step == "post":
                buffer = self._settle(program, stream, stack)
                norm.emit(program, buffer, buffer, 0, stream.selected)
            elif step == "read":
                h = stream.residual
            elif step == "mix":
                assert self.mixer is not None
                branches = emit_mixer(self.mixer, program, h)
                if is_last:
                    h = h if self._steps[number + 1][0] == "feed" else NOWHERE
                    branches, h = self._select(program, stream, branches, h)
                stack.append(self._mixed(program, branches))
            elif step == "feed":
                stack.append(self._fed(program, self.ffn, h, self.spec.residual))
            elif step == "experts":
                stack.append(self._fed(program, self.parallel_moe, h, 1.0, stream.residual))
            elif step == "sum":
                top = self._settle(program, stream, stack)
                stack.pop()
                below = stack[-1].buffer
                program.ops.add(x=top, y=below, dim=program.dim, selected=stream.selected)
            elif step == "defer":
                late, stream.deferred = stream.deferred, self._emit_deferred(program, stream, h)
            elif step == "late":
                if not hands_on(self.spec):
                    late, stream.deferred = stream.deferred, NOWHERE
                if late != NOWHERE:
                    residual, dim = stream.residual, program.dim
                    program.ops.add(x=late, y=residual, dim=dim, selected=stream.selected)
            elif step == "add":
                self._emit_add(program, stream, stack.pop(), num_joined)
                num_joined += 1
            else:
                raise Unsupported(f"step {step} of layout {self.spec.layout}")

    def _mixed(self, program: ProgramBuilder, branches: list[Branch]) -> _Outcome:
        return _Outcome(lambda target: program.add_branches(branches, target), self.spec.residual)

    @staticmethod
    def _fed(
        program: ProgramBuilder, layer: Module, h: int, scale: float, routed_by: int = NOWHERE
    ) -> _Outcome:
        if isinstance(layer, MoeLayer):
            moe = layer
            return _Outcome(lambda target: moe.emit(program, h, target, routed_by), scale)
        if not isinstance(layer, MlpLayer):
            raise Unsupported(type(layer).__name__)
        mlp = layer
        return _Outcome(lambda target: mlp.emit(program, h, target), scale)

    @staticmethod
    def _settle(program: ProgramBuilder, stream: ProgramStream, stack: list[_Outcome]) -> int:
        """The buffer of the top of the stack, which is filled now."""
        top = stack[-1]
        if top.buffer == NOWHERE:
            top.buffer = program.buffer(f"branch {len(stack)}")
            top.emit(Target(top.buffer, False, top.scale, stream.selected))
        return top.buffer

    def _emit_add(
        self, program: ProgramBuilder, stream: ProgramStream, top: _Outcome, num_joined: int
    ) -> None:
        """``residual = residual * factor + top * factor``."""
        weights = self._factors or (1.0, 1.0, 1.0, 1.0)
        kept, scale = weights[2 * num_joined : 2 * num_joined + 2] if num_joined < 2 else (1.0, 1.0)
        residual, selected = stream.residual, stream.selected
        if top.buffer == NOWHERE and (kept, scale) == (1.0, 1.0):
            top.emit(Target(residual, True, top.scale, selected))
            return
        if top.buffer == NOWHERE:
            top.buffer = program.buffer("branch 1")
            top.emit(Target(top.buffer, False, top.scale, selected))
        program.scale_rows(residual, kept, selected)
        program.ops.add(x=top.buffer, y=residual, dim=program.dim, scale=scale, selected=selected)

    def _emit_deferred(self, program: ProgramBuilder, stream: ProgramStream, h: int) -> int:
        """The buffer of what joins one block later."""
        names = ("deferred", "deferred too")
        target = program.buffer(names[stream.deferred == program.buffer(names[0])])
        self.deferred_moe.emit(program, h, Target(target, selected=stream.selected))
        return target

    @staticmethod
    def _select(
        program: ProgramBuilder, stream: ProgramStream, branches: list[Branch], h: int
    ) -> tuple[list[Branch], int]:
        """Gather the selected rows of the mixer's branches, of h and of the stream."""
        gathered = [
            replace(b, buffer=program.select(b.buffer, f"selected branch {i}", b.width))
            for i, b in enumerate(branches)
        ]
        is_residual = h == stream.residual
        stream.residual = program.select(stream.residual, "selected residual")
        if is_residual:
            h = stream.residual
        elif h != NOWHERE:
            h = program.select(h, "selected h")
        if stream.deferred != NOWHERE:
            stream.deferred = program.select(stream.deferred, "selected deferred")
        stream.others = [
            program.select(one, f"selected stream {i}") for i, one in enumerate(stream.others)
        ]
        stream.selected = True
        return gathered, h
