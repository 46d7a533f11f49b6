"""Mixers that keep a state of fixed size instead of keys and values.

``run`` projects all tokens of the step at once, then takes them through the recurrence segment by
segment (``pools/state.Segment``). Legend: T packed tokens, B sequences of a segment, L tokens of
each, D model channels; further letters as in ``kernels/ops/state``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from radixlm.arch.spec import (
    DeltaNet,
    Lightning,
    Mamba1,
    Mamba2,
    Norm,
    RgLru,
    ShortConv,
    StateMixer,
)
from radixlm.kernels.dispatch import Kernels
from radixlm.kernels.ops import state as ops
from radixlm.layers.context import LayerContext
from radixlm.layers.module import Module
from radixlm.layers.norm import NormLayer
from radixlm.layers.rope import Angles
from radixlm.pools.state import StateStep
from radixlm.quant.param import Param
from radixlm.step.batch import ForwardBatch


def split_last(x: Tensor, *sizes: int) -> Tensor:
    """x with its last axis in parts of ``sizes``."""
    return x.reshape(*x.shape[:-1], *sizes)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x). The bits do not depend on a number's place, as those of torch's own do, which
    computes the last few of many otherwise than the rest."""
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x)))


class ConvLayer(Module):
    """The weights of a causal convolution a channel."""

    def __init__(self, channels: int, width: int, bias: bool) -> None:
        self.weight = Param((channels, 1, width), "float32")
        if bias:
            self.bias = Param((channels,), "float32")
        self._has_bias = bias

    def finish(self) -> None:
        self.weight_CW = self.weight.take()[:, 0].contiguous()
        self.bias_C = self.bias.take() if self._has_bias else None

    def run(self, x_BLC: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Output [B, L, C] and the new state."""
        return ops.causal_conv(x_BLC, state, self.weight_CW, self.bias_C)


class StateLayer(Module):
    """What all have in common; a kind defines ``_project``, ``_advance`` and ``_finish``."""

    def __init__(self, spec: StateMixer, dim: int, context: LayerContext, row: int) -> None:
        self.spec, self.row, self.dim = spec, row, dim
        self._context = context

    def _norm(self, spec: Norm, width: int) -> NormLayer:
        return NormLayer(spec, (width,), self._context.kernels, self._context.device)

    def _silu(self, x_BLC: Tensor) -> Tensor:
        """Element by element, by the kernel."""
        activate = self._context.kernels.activate
        return activate(x_BLC.flatten(0, 1), "silu").view(x_BLC.shape)

    def run(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """The mixer's branch: [T, D]."""
        step: StateStep = batch.states
        inputs = self._project(x_TD, batch)
        out: Tensor | None = None
        for segment in step.segments:
            parts = [
                t[segment.rows].float().view(segment.num_sequences, -1, *t.shape[1:])
                for t in inputs
            ]
            before = step.pool.read(self.row, segment.source)
            y_BLC, after = self._advance(parts, before)
            step.pool.write(self.row, segment.target, after)
            if out is None:
                out = x_TD.new_empty(x_TD.shape[0], *y_BLC.shape[2:])
            out[segment.rows] = y_BLC.flatten(0, 1).to(x_TD.dtype)
        assert out is not None, "a step without tokens"
        return self._finish(out, inputs)

    def _project(self, x_TD: Tensor, batch: ForwardBatch) -> list[Tensor]:
        """What the recurrence and ``_finish`` need of each token."""
        raise NotImplementedError

    def _advance(self, inputs: list[Tensor], states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Outputs [B, L, ...] and the states behind, of inputs [B, L, ...]."""
        raise NotImplementedError

    def _finish(self, out: Tensor, inputs: list[Tensor]) -> Tensor:
        """[T, D] of the recurrence's outputs."""
        raise NotImplementedError


class ShortConvLayer(StateLayer):
    """out(c * conv(b * x))."""

    spec: ShortConv

    def __init__(self, spec: ShortConv, dim: int, context: LayerContext, row: int) -> None:
        super().__init__(spec, dim, context, row)
        self.inp = context.linear(dim, 3 * spec.channels, spec.bias)
        self.conv = ConvLayer(spec.channels, spec.width, spec.bias)
        self.out = context.linear(spec.channels, dim, spec.bias)

    def _project(self, x_TD: Tensor, batch: ForwardBatch) -> list[Tensor]:
        b, c, x = self.inp.run(x_TD).chunk(3, -1)
        return [b * x, c]

    def _advance(self, inputs: list[Tensor], states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        y, state = self.conv.run(inputs[0], states[0])
        return y, [state]

    def _finish(self, out: Tensor, inputs: list[Tensor]) -> Tensor:
        return self.out.run(inputs[1] * out)


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
        x = F.silu(x)
        batch, length = x.shape[:2]
        flat = self.x_proj.run(x.reshape(-1, spec.inner))
        dt, b, c = (
            t.contiguous() for t in flat.split_with_sizes((spec.rank, spec.state, spec.state), -1)
        )
        if spec.norm is not None:
            dt, b, c = self.dt_norm.run(dt), self.b_norm.run(b), self.c_norm.run(c)
        dt = F.softplus(self.dt_proj.run(dt))
        dt, b, c = (t.view(batch, length, -1) for t in (dt, b, c))
        y, state = self._context.kernels.selective_scan(x, dt, self._a, b, c, states[1])
        return y + x * self._d, [conv, state]

    def _finish(self, out: Tensor, inputs: list[Tensor]) -> Tensor:
        return self.out.run(out * F.silu(inputs[1]))


class HeadedMamba1Layer(Mamba1Layer):
    """Mamba whose channels are runs, each with a scan of its own."""

    def _make_steps(self) -> None:
        spec, context = self.spec, self._context
        assert spec.norm is None, "no Mamba of several heads norms them"
        width, rows = spec.inner // spec.heads, spec.rank + 2 * spec.state
        self.x_projs = [context.plain_linear(width, rows) for _ in range(spec.heads)]
        self.dt_projs = [context.plain_linear(spec.rank, width, True) for _ in range(spec.heads)]

    def _advance(self, inputs: list[Tensor], states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        spec = self.spec
        x, conv = self.conv.run(inputs[0], states[0])
        x = F.silu(x)
        runs = (x.chunk(spec.heads, -1), self._a.chunk(spec.heads), states[1].chunk(spec.heads, 1))
        outs, after = [], []
        for head, (run, a, before) in enumerate(zip(*runs, strict=True)):
            flat = self.x_projs[head].run(run.flatten(0, 1).contiguous())
            dt, b, c = flat.split_with_sizes((spec.rank, spec.state, spec.state), -1)
            dt = F.softplus(self.dt_projs[head].run(dt.contiguous()))
            dt, b, c = (t.reshape(*run.shape[:2], -1) for t in (dt, b, c))
            y, state = self._context.kernels.selective_scan(run, dt, a, b, c, before)
            outs.append(y)
            after.append(state)
        return torch.cat(outs, -1) + x * self._d, [conv, torch.cat(after, 1)]


class GatedNorm(Module):
    """RMS norm in groups of channels with a gate before or behind it."""

    def __init__(
        self, norm: Norm, width: int, groups: int, act: str, gate_after: bool, kernels: Kernels
    ) -> None:
        self.weight, self._kernels = Param((width,), "float32"), kernels
        self._eps, self._groups, self._act, self._gate_after = norm.eps, groups, act, gate_after
        self._offset = norm.offset

    def finish(self) -> None:
        self.weight_C = self.weight.take() + self._offset

    def run(self, x: Tensor, gate: Tensor) -> Tensor:
        """Like x, whose last axis is normalised."""
        flat = gate.float().contiguous().view(-1, gate.shape[-1])
        if self._act == "silu":
            opened = self._kernels.activate(flat, "silu").view(gate.shape)
        else:
            opened = self._kernels.sigmoid(flat).view(gate.shape)
        h = x.float() if self._gate_after else x.float() * opened
        grouped = split_last(h, self._groups, -1)
        grouped = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self._eps)
        h = grouped.flatten(-2) * self.weight_C
        result: Tensor = h * opened if self._gate_after else h
        return result.to(x.dtype)


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
        self.out = context.linear(spec.inner, dim, spec.bias)

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
        mixed = self._silu(mixed)
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
            out * F.silu(gate) if self.spec.norm is None else self.norm.run(out, gate)
        )


class DeltaNetLayer(StateLayer):
    """q, k, v -> conv -> delta rule -> gated norm -> out."""

    spec: DeltaNet

    def __init__(self, spec: DeltaNet, dim: int, context: LayerContext, row: int) -> None:
        super().__init__(spec, dim, context, row)
        values = spec.v_heads * spec.v_dim
        self.qkv = context.linear(dim, spec.conv_channels)
        self.conv = ConvLayer(spec.conv_channels, spec.width, False)
        decays = spec.v_heads * (spec.k_dim if spec.channel_decay else 1)
        self.beta = context.plain_linear(dim, spec.v_heads)
        if spec.channel_decay and spec.low_rank:
            self.f_a = context.plain_linear(dim, spec.v_dim)
            self.f_b = context.plain_linear(spec.v_dim, decays)
            self.g_a = context.plain_linear(dim, spec.v_dim)
            self.g_b = context.plain_linear(spec.v_dim, values)
        else:
            self.decay = context.plain_linear(dim, decays)
            self.gate = context.linear(dim, values)
        self.a_log = Param((spec.v_heads,), "float32")
        self.dt_bias = Param((decays,), "float32")
        self.norm = GatedNorm(spec.norm, spec.v_dim, 1, spec.gate_act, True, context.kernels)
        self.out = context.linear(values, dim)

    def finish(self) -> None:
        self._a, self._dt_bias = torch.exp(self.a_log.take()), self.dt_bias.take()

    def _project(self, x_TD: Tensor, batch: ForwardBatch) -> list[Tensor]:
        if self.spec.channel_decay and self.spec.low_rank:
            decay = self.f_b.run(self.f_a.run(x_TD))
            gate = self.g_b.run(self.g_a.run(x_TD))
        else:
            decay, gate = self.decay.run(x_TD), self.gate.run(x_TD)
        return [self.qkv.run(x_TD), decay, self.beta.run(x_TD), gate]

    def _advance(self, inputs: list[Tensor], states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        spec = self.spec
        mixed, conv = self.conv.run(inputs[0], states[0])
        keys = spec.k_heads * spec.k_dim
        values = spec.v_heads * spec.v_dim
        q, k, v = self._silu(mixed).split_with_sizes((keys, keys, values), -1)
        q, k = (
            _unit(split_last(t, spec.k_heads, spec.k_dim)).repeat_interleave(
                spec.v_heads // spec.k_heads, 2
            )
            for t in (q, k)
        )
        v = split_last(v, spec.v_heads, spec.v_dim)
        opened = split_last(inputs[1] + self._dt_bias, spec.v_heads, -1)
        if spec.decay_floor:
            decays = spec.decay_floor * torch.sigmoid(self._a[:, None] * opened)
        else:
            decays = -self._a[:, None] * softplus(opened)
        beta = self._context.kernels.sigmoid(inputs[2].flatten(0, 1)).view(inputs[2].shape)
        beta = beta * spec.beta_scale
        y, state = self._context.kernels.delta_rule(
            q * spec.k_dim**-0.5, k, v, decays, beta, states[1]
        )
        return y, [conv, state]

    def _finish(self, out: Tensor, inputs: list[Tensor]) -> Tensor:
        return self.out.run(self.norm.run(out, inputs[3].view(out.shape)).flatten(1))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class LightningLayer(StateLayer):
    """qkv -> linear attention with fixed decays -> norm -> gate -> out."""

    spec: Lightning

    def __init__(self, spec: Lightning, dim: int, context: LayerContext, row: int) -> None:
        super().__init__(spec, dim, context, row)
        width = spec.heads * spec.head_dim
        self.qkv = context.linear(dim, 3 * width)
        self.gate = context.linear(dim, width)
        self.norm = self._norm(spec.norm, width)
        self.out = context.linear(width, dim)
        self._decays = torch.tensor(spec.decays, device=context.device)

    def _project(self, x_TD: Tensor, batch: ForwardBatch) -> list[Tensor]:
        return [self.qkv.run(x_TD), self.gate.run(x_TD)]

    def _advance(self, inputs: list[Tensor], states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        spec = self.spec
        mixed = self._context.kernels.activate(inputs[0].flatten(0, 1), spec.act)
        heads = mixed.view(*inputs[0].shape[:2], spec.heads, 3, spec.head_dim)
        q, k, v = heads.unbind(3)
        decays = self._decays.expand(*q.shape[:3])
        y, state = self._context.kernels.decayed_attention(v, decays, k, q, states[0])
        return y.flatten(2), [state]

    def _finish(self, out: Tensor, inputs: list[Tensor]) -> Tensor:
        return self.out.run(self.norm.run(out) * torch.sigmoid(inputs[1]))


class RgLruLayer(StateLayer):
    """x -> conv -> gated recurrence; y -> act; out of their product."""

    spec: RgLru

    def __init__(self, spec: RgLru, dim: int, context: LayerContext, row: int) -> None:
        super().__init__(spec, dim, context, row)
        wide, block = spec.channels, spec.channels // spec.heads
        self.x = context.linear(dim, wide, True)
        self.y = context.linear(dim, wide, True)
        self.conv = ConvLayer(wide, spec.width, True)
        for name in ("input_gate", "recurrent_gate"):
            setattr(self, name, Param((spec.heads, block, block), "float32"))
            setattr(self, name + "_bias", Param((spec.heads, block), "float32"))
        self.recurrent_param = Param((wide,), "float32")
        self.out = context.linear(wide, dim, True)

    def finish(self) -> None:
        params = vars(self)
        names = ("input_gate", "recurrent_gate")
        weights_HOI = torch.cat([params[name].take().transpose(1, 2) for name in names], 1)
        biases_HO = torch.cat([params[name + "_bias"].take() for name in names], 1)
        pack = self._context.kernels.pack_linear
        self._gates = [
            pack(weight.contiguous(), bias.contiguous(), "")
            for weight, bias in zip(weights_HOI, biases_HO, strict=True)
        ]
        self._log = -8.0 * F.softplus(self.recurrent_param.take())

    def _project(self, x_TD: Tensor, batch: ForwardBatch) -> list[Tensor]:
        y = self._context.kernels.activate(self.y.run(x_TD), self.spec.act)
        return [self.x.run(x_TD), y, (batch.positions_T == 0)[:, None]]

    def _advance(self, inputs: list[Tensor], states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        x, conv = self.conv.run(inputs[0], states[0])
        blocks = x.flatten(0, 1).chunk(self.spec.heads, -1)
        gates = [
            gate.run(block.contiguous()) for gate, block in zip(self._gates, blocks, strict=True)
        ]
        opened, kept = (
            torch.sigmoid(torch.cat(halves, -1)).view(x.shape)
            for halves in zip(*(gate.chunk(2, -1) for gate in gates), strict=True)
        )
        log = self._log * kept
        # the first token of a sequence joins in full
        size = torch.where(inputs[2] > 0, 1.0, torch.sqrt(-torch.expm1(2 * log)))
        h, state = self._context.kernels.decayed_sum(log, x * opened * size, states[1])
        return h, [conv, state]

    def _finish(self, out: Tensor, inputs: list[Tensor]) -> Tensor:
        return self.out.run(out * inputs[1])


_KINDS: dict[type, type[StateLayer]] = {
    ShortConv: ShortConvLayer,
    Mamba1: Mamba1Layer,
    Mamba2: Mamba2Layer,
    DeltaNet: DeltaNetLayer,
    Lightning: LightningLayer,
    RgLru: RgLruLayer,
}


def make_state_layer(spec: StateMixer, dim: int, context: LayerContext, row: int) -> StateLayer:
    """The layer of a state mixer's record; ``row`` is its place in the state pool."""
    if isinstance(spec, Mamba1) and spec.heads > 1:
        return HeadedMamba1Layer(spec, dim, context, row)
    return _KINDS[type(spec)](spec, dim, context, row)
