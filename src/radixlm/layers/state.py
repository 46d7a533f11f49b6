"""Mixers that keep a state of fixed size instead of keys and values.

``run`` projects all tokens of the step at once, then takes them through the recurrence segment by
segment (``pools/state.Segment``). In a program states are read and written in their pool, run by
run (csrc/common/api.h: StateRun).

Legend: T packed tokens, B sequences of a segment, L tokens of each, D model channels; further
letters as in ``kernels/ops/state``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from radixlm.arch.spec import Activation, Norm, StateMixer
from radixlm.kernels.cpu.extension import native
from radixlm.kernels.cpu.linear import ACT_CODE
from radixlm.kernels.dispatch import Kernels
from radixlm.kernels.ops import state as ops
from radixlm.layers.context import LayerContext
from radixlm.layers.module import Module
from radixlm.layers.norm import NormLayer
from radixlm.layers.program import (
    Branch,
    ProgramBuilder,
    Unsupported,
    handles_norm,
    struct,
)
from radixlm.layers.rope import Angles
from radixlm.pools.state import StateStep
from radixlm.quant.param import Param
from radixlm.step.batch import ForwardBatch

ScanInput = tuple[int, int, int]  # buffer, offset, numbers from one head to the next


def split_last(x: Tensor, *sizes: int) -> Tensor:
    """x with its last axis in parts of ``sizes``."""
    return x.reshape(*x.shape[:-1], *sizes)


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

    def emit(
        self,
        program: ProgramBuilder,
        source: int,
        target: int,
        state: int,
        offset: int,
        act: str = "",
        times: int = -1,
        gate: int = -1,
    ) -> None:
        """As an operation: of the channels at ``offset`` of the source's rows, times those at
        ``times`` first and those at ``gate`` last, where these are not -1. ``state``: address."""
        channels, width = self.weight_CW.shape
        if width > native().MAX_CONV:
            raise Unsupported(f"a convolution of {width} tokens")
        weight_WC = self.weight_CW.T.contiguous()
        args = struct(
            "ConvArgs", channels=channels, width=width, act=ACT_CODE[act] if act else 0,
            weight=program.hold(weight_WC), bias=program.hold(self.bias_C), state=state,
        )  # fmt: skip
        program.ops.conv(x=source, y=target, args=args, offset=offset, times=times, gate=gate)


class StateLayer(Module):
    """The base of state mixers; subclasses define ``_project``, ``_advance`` and ``_finish``."""

    def __init__(self, spec: StateMixer, dim: int, context: LayerContext, row: int) -> None:
        self.spec, self.row, self.dim = spec, row, dim
        self._context = context

    def _norm(self, spec: Norm, width: int) -> NormLayer:
        return NormLayer(spec, (width,), self._context.kernels, self._context.device)

    def _activate(self, x_BLC: Tensor, act: Activation) -> Tensor:
        """``act`` by the kernel, as float32."""
        return self._context.kernels.activate(x_BLC.flatten(0, 1), act).view(x_BLC.shape)

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
        """The inputs of the recurrence and of ``_finish``, a row a token."""
        raise NotImplementedError

    def _advance(self, inputs: list[Tensor], states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Outputs [B, L, ...] and the states after them, of inputs [B, L, ...]."""
        raise NotImplementedError

    def _finish(self, out: Tensor, inputs: list[Tensor]) -> Tensor:
        """[T, D] of the recurrence's outputs."""
        raise NotImplementedError

    def emit(self, program: ProgramBuilder, source: int) -> list[Branch]:
        """The same as operations of a program, up to the output projection."""
        raise Unsupported(type(self).__name__)


class GatedNorm(Module):
    """RMS norm in groups of channels with a gate before or after it."""

    def __init__(
        self, norm: Norm, width: int, groups: int, act: str, gate_after: bool, kernels: Kernels
    ) -> None:
        self.weight, self._kernels = Param((width,), "float32"), kernels
        self._eps, self._groups, self._act, self._gate_after = norm.eps, groups, act, gate_after
        self._offset, self._norm = norm.offset, norm

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

    def emit(self, program: ProgramBuilder, buffer: int, heads: tuple[int, int], gate: int) -> None:
        """In place of ``heads`` (count, width) of a buffer, gated by another from its beginning."""
        handles_norm(self._norm)
        args = struct(
            "HeadNormArgs", heads=heads[0], width=heads[1], weight=program.hold(self.weight_C),
            per_head_weights=self.weight_C.numel() > heads[1], eps=self._eps,
            act=getattr(native().Gate, self._act.upper()), gates_last=self._gate_after,
        )  # fmt: skip
        program.ops.head_norm(x=buffer, y=buffer, args=args, gate=gate)


def emit_scan(
    program: ProgramBuilder, inputs: Sequence[ScanInput], target: int, kind: str, **fields: object
) -> None:
    """A recurrence over a state. ``inputs``: q, k, v, decay, beta; ``fields``: csrc: ScanArgs."""
    ext = native()
    args = struct("ScanArgs", kind=getattr(ext.ScanKind, kind), **fields)
    program.ops.scan(inputs=[ext.ScanSource(*one) for one in inputs], y=target, args=args)


def emit_decay(
    program: ProgramBuilder, source: int, offset: int, step: int, log: int, **fields: object
) -> None:
    """Time steps and decays of a recurrence. ``fields``: csrc: DecayArgs."""
    args = struct("DecayArgs", **{"low": 0.0, "high": float("inf"), **fields})
    program.ops.decay(x=source, offset=offset, step=step, log=log, args=args)
