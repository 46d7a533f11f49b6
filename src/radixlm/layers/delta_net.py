"""The gated delta rule (arXiv:2412.06464, 2510.26692). Legend as in ``layers/state``."""

import torch
from torch import Tensor

from radixlm.arch.spec import DeltaNet
from radixlm.kernels.ops.activation import sigmoid, softplus
from radixlm.layers.context import LayerContext
from radixlm.layers.program import NOWHERE, Branch, ProgramBuilder, handles, struct
from radixlm.layers.state import (
    ConvLayer,
    GatedNorm,
    StateLayer,
    emit_decay,
    emit_scan,
    split_last,
)
from radixlm.quant.param import Param, Shard
from radixlm.step.batch import ForwardBatch

UNIT_EPS = 1e-6


class DeltaNetLayer(StateLayer):
    """q, k, v -> conv -> delta rule -> gated norm -> out."""

    spec: DeltaNet

    def __init__(self, spec: DeltaNet, dim: int, context: LayerContext, row: int) -> None:
        super().__init__(spec, dim, context, row)
        values = spec.v_heads * spec.v_dim
        keys = spec.k_heads * spec.k_dim
        self.qkv = context.linear(dim, spec.qkv_channels, shard=Shard(0, (keys, keys, values)))
        self._make_conv(dim)
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

    def _make_conv(self, dim: int) -> None:
        self.conv = ConvLayer(self.spec.conv_channels, self.spec.width, False)

    def finish(self) -> None:
        self._a, self._dt_bias = torch.exp(self.a_log.take()), self.dt_bias.take()

    def _project(self, x_TD: Tensor, batch: ForwardBatch) -> list[Tensor]:
        if self.spec.channel_decay and self.spec.low_rank:
            decay = self.f_b.run(self.f_a.run(x_TD))
            gate = self.g_b.run(self.g_a.run(x_TD))
        else:
            decay, gate = self.decay.run(x_TD), self.gate.run(x_TD)
        return [self.qkv.run(x_TD), decay, self.beta.run(x_TD), gate]

    def _convolved(self, inputs: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, keys and values [B, L, channels], and the convolution's new state."""
        return self.conv.run(inputs[0], state)

    def _advance(self, inputs: list[Tensor], states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        spec = self.spec
        mixed, conv = self._convolved(inputs, states[0])
        keys = spec.k_heads * spec.k_dim
        values = spec.v_heads * spec.v_dim
        q, k, v = self._activate(mixed, spec.act).split_with_sizes((keys, keys, values), -1)
        q, k = (
            unit(split_last(t, spec.k_heads, spec.k_dim)).repeat_interleave(
                spec.v_heads // spec.k_heads, 2
            )
            for t in (q, k)
        )
        v = split_last(v, spec.v_heads, spec.v_dim)
        opened = split_last(inputs[1] + self._dt_bias, spec.v_heads, -1)
        if spec.decay_floor:
            decays = spec.decay_floor * sigmoid(self._a[:, None] * opened)
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

    def emit(self, program: ProgramBuilder, source: int) -> list[Branch]:
        """See ``StateLayer``."""
        spec = self.spec
        handles(
            spec, "k_heads", "v_heads", "k_dim", "v_dim", "width", "norm", "beta_scale",
            "gate_act", "channel_decay", "low_rank", "decay_floor", "act",
        )  # fmt: skip
        keys, values = spec.k_heads * spec.k_dim, spec.v_heads * spec.v_dim
        qkv = program.project(self.qkv, source, "state in")
        mixed = program.buffer("mixed", spec.conv_channels)
        self.conv.emit(program, qkv, mixed, program.state(self.row, 0), 0, spec.act)
        for offset, scale in ((0, spec.k_dim**-0.5), (keys, 1.0)):
            args = struct(
                "HeadNormArgs", heads=spec.k_heads, width=spec.k_dim, eps=UNIT_EPS, scale=scale,
                is_sum=True, gates_last=True,
            )  # fmt: skip
            program.ops.head_norm(x=mixed, y=mixed, args=args, x_offset=offset, y_offset=offset)
        log, gate = self._emit_decays_and_gate(program, source)
        beta = program.project(self.beta, source, "shares")
        program.ops.scale(y=beta, offset=0, dim=spec.v_heads, scale=spec.beta_scale, sigmoid=True)
        decays = spec.k_dim if spec.channel_decay else 1
        inputs = [
            (mixed, 0, spec.k_dim), (mixed, keys, spec.k_dim), (mixed, 2 * keys, spec.v_dim),
            (log, 0, decays), (beta, 0, 1),
        ]  # fmt: skip
        out = program.buffer("state out", values)
        emit_scan(
            program, inputs, out, "DELTA", heads=spec.v_heads, keys=spec.k_dim,
            values=spec.v_dim, decays=decays, repeats=spec.v_heads // spec.k_heads,
            state=program.state(self.row, 1),
        )  # fmt: skip
        self.norm.emit(program, out, (spec.v_heads, spec.v_dim), gate)
        return [Branch(out, values, self.out)]

    def _emit_decays_and_gate(self, program: ProgramBuilder, source: int) -> tuple[int, int]:
        """Buffers of the decays, logarithms of a head or factors of each channel, and of the
        gate."""
        spec = self.spec
        count = spec.v_heads * (spec.k_dim if spec.channel_decay else 1)
        if spec.channel_decay and spec.low_rank:
            low = program.project(self.f_a, source, "low rank")
            decay = program.project(self.f_b, low, "decays")
            low = program.project(self.g_a, source, "low rank")
            gate = program.project(self.g_b, low, "state gate")
        else:
            decay = program.project(self.decay, source, "decays")
            gate = program.project(self.gate, source, "state gate")
        rates = self._a if spec.decay_floor else -self._a
        rates = rates.repeat_interleave(count // spec.v_heads)
        emit_decay(
            program, decay, 0, NOWHERE, decay, dim=count, bias=program.hold(self._dt_bias),
            rate=program.hold(rates), floor=spec.decay_floor, is_factor=int(spec.channel_decay),
        )  # fmt: skip
        return decay, gate


class TappedDeltaNetLayer(DeltaNetLayer):
    """A delta net that convolves its values alone, with taps made of the token."""

    def _make_conv(self, dim: int) -> None:
        spec, context = self.spec, self._context
        self.tap_in = context.plain_linear(dim, spec.tap_rank)
        self.tap_out = context.plain_linear(spec.tap_rank, spec.conv_channels * spec.width, True)

    def _project(self, x_TD: Tensor, batch: ForwardBatch) -> list[Tensor]:
        opened = self._context.kernels.activate(self.tap_in.run(x_TD), "silu")
        taps = self.tap_out.run(opened).view(len(x_TD), -1, self.spec.width)
        return [*super()._project(x_TD, batch), taps]

    def _convolved(self, inputs: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        """See ``DeltaNetLayer``."""
        channels = self.spec.conv_channels
        whole_BCM = torch.cat((state, inputs[0][..., -channels:].transpose(1, 2)), -1)
        windows = whole_BCM.unfold(-1, self.spec.width, 1).transpose(1, 2)
        values = (windows * inputs[4]).sum(-1)
        kept = whole_BCM[..., whole_BCM.shape[-1] - state.shape[-1] :].contiguous()
        return torch.cat((inputs[0][..., :-channels], values), -1), kept


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)
