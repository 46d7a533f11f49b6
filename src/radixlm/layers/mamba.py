"""Mamba and Mamba 2 (arXiv:2312.00752, 2405.21060). Legend as in ``layers/state``."""

import torch
from torch import Tensor

from radixlm.arch.spec import Mamba1, Mamba2
from radixlm.kernels.ops.activation import silu, softplus
from radixlm.layers.context import LayerContext
from radixlm.layers.program import NOWHERE, Branch, ProgramBuilder, handles
from radixlm.layers.state import (
    ConvLayer,
    GatedNorm,
    StateLayer,
    emit_decay,
    emit_scan,
    split_last,
)
from radixlm.quant.param import Param
from radixlm.step.batch import ForwardBatch


class Mamba1Layer(StateLayer):
    """in -> conv -> time step, b, c -> scan -> gate -> out."""

    spec: Mamba1

    def __init__(self, spec: Mamba1, dim: int, context: LayerContext, row: int) -> None:
        super().__init__(spec, dim, context, row)
        self.inp = context.linear(dim, 2 * spec.inner, spec.bias)
        self.conv = ConvLayer(spec.inner, spec.width, spec.conv_bias)
        self._make_steps()
        self.a_log = Param((spec.inner, spec.state), "float32")
        self.d = Param((spec.inner,), "float32")
        self.out = context.linear(spec.inner, dim, spec.bias)
        if spec.norm is not None:
            self.dt_norm = self._norm(spec.norm, spec.rank)
            self.b_norm = self._norm(spec.norm, spec.state)
            self.c_norm = self._norm(spec.norm, spec.state)

    def _make_steps(self) -> None:
        """What makes time steps, b and c of the channels."""
        spec, context = self.spec, self._context
        self.x_proj = context.plain_linear(spec.inner, spec.rank + 2 * spec.state)
        self.dt_proj = context.plain_linear(spec.rank, spec.inner, True)

    def finish(self) -> None:
        self._a = -torch.exp(self.a_log.take())
        self._d = self.d.take()

    def _project(self, x_TD: Tensor, batch: ForwardBatch) -> list[Tensor]:
        return list(self.inp.run(x_TD).chunk(2, -1))

    def _advance(self, inputs: list[Tensor], states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        spec = self.spec
        x, conv = self.conv.run(inputs[0], states[0])
        x = self._activate(x, spec.act)
        batch, length = x.shape[:2]
        flat = self.x_proj.run(x.reshape(-1, spec.inner))
        dt, b, c = (
            t.contiguous() for t in flat.split_with_sizes((spec.rank, spec.state, spec.state), -1)
        )
        if spec.norm is not None:
            dt, b, c = self.dt_norm.run(dt), self.b_norm.run(b), self.c_norm.run(c)
        dt = softplus(self.dt_proj.run(dt))
        dt, b, c = (t.view(batch, length, -1) for t in (dt, b, c))
        y, state = self._context.kernels.selective_scan(x, dt, self._a, b, c, states[1])
        return y + x * self._d, [conv, state]

    def _finish(self, out: Tensor, inputs: list[Tensor]) -> Tensor:
        return self.out.run(out * silu(inputs[1]))

    def emit(self, program: ProgramBuilder, source: int) -> list[Branch]:
        """See ``StateLayer``."""
        spec = self.spec
        handles(
            spec, "inner", "state", "rank", "width", "conv_bias", "bias", "norm", "heads", "act"
        )
        rank, size, inner, heads = spec.rank, spec.state, spec.inner, spec.heads
        both = program.project(self.inp, source, "state in")
        mixed = program.buffer("mixed", inner)
        self.conv.emit(program, both, mixed, program.state(self.row, 0), 0, spec.act)
        flat, step = self._emit_steps(program, mixed)
        emit_decay(program, step, 0, step, NOWHERE, dim=inner)
        out, each, width = program.buffer("state out", inner), rank + 2 * size, inner // heads
        inputs = [
            (flat, rank + size, each), (flat, rank, each), (mixed, 0, width), (step, 0, width)
        ]  # fmt: skip
        emit_scan(
            program, inputs, out, "SELECTIVE", heads=heads, keys=size, values=width,
            a=program.hold(self._a.contiguous()), skip=program.hold(self._d),
            state=program.state(self.row, 1),
        )  # fmt: skip
        program.gate(both, out, (1, inner), "SILU", offset=inner)
        return [Branch(out, inner, self.out)]

    def _emit_steps(self, program: ProgramBuilder, mixed: int) -> tuple[int, int]:
        """Buffers of [time step's source, b, c] of each head, and of time steps."""
        rank, size = self.spec.rank, self.spec.state
        flat = program.project(self.x_proj, mixed, "state steps")
        if self.spec.norm is not None:
            self.dt_norm.emit(program, flat, flat)
            self.b_norm.emit(program, flat, flat, rank)
            self.c_norm.emit(program, flat, flat, rank + size)
        return flat, program.project(self.dt_proj, flat, "steps")


class HeadedMamba1Layer(Mamba1Layer):
    """Mamba whose channels are split into heads, each with its own scan."""

    def _make_steps(self) -> None:
        spec, context = self.spec, self._context
        assert spec.norm is None, "no Mamba of several heads norms them"
        width, rows = spec.inner // spec.heads, spec.rank + 2 * spec.state
        self.x_projs = [context.plain_linear(width, rows) for _ in range(spec.heads)]
        self.dt_projs = [context.plain_linear(spec.rank, width, True) for _ in range(spec.heads)]

    def _advance(self, inputs: list[Tensor], states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        spec = self.spec
        x, conv = self.conv.run(inputs[0], states[0])
        x = self._activate(x, spec.act)
        runs = (x.chunk(spec.heads, -1), self._a.chunk(spec.heads), states[1].chunk(spec.heads, 1))
        outs, after = [], []
        for head, (run, a, before) in enumerate(zip(*runs, strict=True)):
            flat = self.x_projs[head].run(run.flatten(0, 1).contiguous())
            dt, b, c = flat.split_with_sizes((spec.rank, spec.state, spec.state), -1)
            dt = softplus(self.dt_projs[head].run(dt.contiguous()))
            dt, b, c = (t.reshape(*run.shape[:2], -1) for t in (dt, b, c))
            y, state = self._context.kernels.selective_scan(run, dt, a, b, c, before)
            outs.append(y)
            after.append(state)
        return torch.cat(outs, -1) + x * self._d, [conv, torch.cat(after, 1)]

    def _emit_steps(self, program: ProgramBuilder, mixed: int) -> tuple[int, int]:
        spec = self.spec
        each = spec.rank + 2 * spec.state
        flat = program.buffer("state steps", spec.heads * each)
        step = program.buffer("steps", spec.inner)
        program.heads([one.packed for one in self.x_projs], mixed, flat)
        program.heads([one.packed for one in self.dt_projs], flat, step, each)
        return flat, step


class Mamba2Layer(StateLayer):
    """in -> conv -> scan a head -> gated norm -> out."""

    spec: Mamba2

    def __init__(self, spec: Mamba2, dim: int, context: LayerContext, row: int) -> None:
        super().__init__(spec, dim, context, row)
        rows = spec.inner + spec.conv_channels + spec.heads
        self.inp = context.linear(dim, rows, spec.bias)
        self.conv = ConvLayer(spec.conv_channels, spec.width, spec.conv_bias)
        for name in ("a_log", "d", "dt_bias"):
            setattr(self, name, Param((spec.heads,), "float32"))
        if spec.norm is not None:
            groups, is_after = spec.norm_groups, spec.gate_after_norm
            kernels = context.kernels
            self.norm = GatedNorm(spec.norm, spec.inner, groups, "silu", is_after, kernels)
        self.out = context.linear(spec.inner, dim, spec.out_bias)

    def finish(self) -> None:
        params = vars(self)
        self._a = -torch.exp(params["a_log"].take())
        self._d, self._dt_bias = params["d"].take(), params["dt_bias"].take()

    def _project(self, x_TD: Tensor, batch: ForwardBatch) -> list[Tensor]:
        spec = self.spec
        gate, conv, dt = self.inp.run(x_TD).split_with_sizes(
            (spec.inner, spec.conv_channels, spec.heads), -1
        )
        return [conv, dt, gate]

    def _advance(self, inputs: list[Tensor], states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        spec = self.spec
        mixed, conv = self.conv.run(inputs[0], states[0])
        groups = spec.groups * spec.state
        mixed = self._activate(mixed, spec.act)
        x, b, c = mixed.split_with_sizes((spec.inner, groups, groups), -1)
        dt = softplus(inputs[1] + self._dt_bias).clamp(*spec.dt_limit)
        x = split_last(x, spec.heads, spec.head_dim)
        b, c = (
            split_last(t, spec.groups, spec.state).repeat_interleave(spec.heads // spec.groups, 2)
            for t in (b, c)
        )
        y, state = self._context.kernels.decayed_attention(
            x * dt[..., None], dt * self._a, b, c, states[1]
        )
        return (y + x * self._d[:, None]).flatten(2), [conv, state]

    def _finish(self, out: Tensor, inputs: list[Tensor]) -> Tensor:
        gate = inputs[2]
        return self.out.run(
            out * silu(gate) if self.spec.norm is None else self.norm.run(out, gate)
        )

    def emit(self, program: ProgramBuilder, source: int) -> list[Branch]:
        """See ``StateLayer``."""
        spec, inner = self.spec, self.spec.inner
        handles(
            spec, "heads", "head_dim", "state", "groups", "width", "norm", "norm_groups",
            "gate_after_norm", "conv_bias", "bias", "out_bias", "dt_limit", "act",
        )  # fmt: skip
        both = program.project(self.inp, source, "state in")
        mixed = program.buffer("mixed", spec.conv_channels)
        self.conv.emit(program, both, mixed, program.state(self.row, 0), inner, spec.act)
        step, log = program.buffer("steps", spec.heads), program.buffer("decays", spec.heads)
        low, high = spec.dt_limit
        emit_decay(
            program, both, inner + spec.conv_channels, step, log, dim=spec.heads, low=low,
            high=high, bias=program.hold(self._dt_bias), rate=program.hold(self._a),
        )  # fmt: skip
        keys = inner + spec.groups * spec.state
        inputs = [
            (mixed, keys, spec.state), (mixed, inner, spec.state), (mixed, 0, spec.head_dim),
            (log, 0, 1), (step, 0, 1),
        ]  # fmt: skip
        out = program.buffer("state out", inner)
        emit_scan(
            program, inputs, out, "DECAYED", heads=spec.heads, keys=spec.state,
            values=spec.head_dim, repeats=spec.heads // spec.groups,
            skip=program.hold(self._d), state=program.state(self.row, 1),
        )  # fmt: skip
        if spec.norm is None:
            program.gate(both, out, (1, inner), "SILU")
        else:
            self.norm.emit(program, out, (spec.norm_groups, inner // spec.norm_groups), both)
        return [Branch(out, inner, self.out)]
