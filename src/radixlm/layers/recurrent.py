"""Short convolutions, linear attention with fixed decays, gated linear recurrences; and which layer
a state mixer's record has. Legend as in ``layers/state``."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from radixlm.arch.spec import (
    CenteredConv,
    DeltaNet,
    Lightning,
    Mamba1,
    Mamba2,
    RgLru,
    ShortConv,
    StateMixer,
)
from radixlm.kernels.cpu.linear import act_code
from radixlm.kernels.ops.activation import sigmoid
from radixlm.layers.context import LayerContext
from radixlm.layers.delta_net import DeltaNetLayer, TappedDeltaNetLayer
from radixlm.layers.mamba import HeadedMamba1Layer, Mamba1Layer, Mamba2Layer
from radixlm.layers.module import Module
from radixlm.layers.program import NOWHERE, Branch, ProgramBuilder, handles
from radixlm.layers.rope import Angles
from radixlm.layers.state import ConvLayer, StateLayer, emit_decay, emit_scan
from radixlm.quant.param import Param, Shard
from radixlm.step.batch import ForwardBatch


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

    def emit(self, program: ProgramBuilder, source: int) -> list[Branch]:
        """See ``StateLayer``."""
        handles(self.spec, "channels", "width", "bias")
        channels = self.spec.channels
        both = program.project(self.inp, source, "state in")
        out = program.buffer("state out", channels)
        state = program.state(self.row, 0)
        self.conv.emit(program, both, out, state, 2 * channels, times=0, gate=channels)
        return [Branch(out, channels, self.out)]


class CenteredConvLayer(Module):
    """out(c * conv(b * x)), the convolution over neighbours on both sides."""

    def __init__(self, spec: CenteredConv, dim: int, context: LayerContext) -> None:
        self.inp = context.linear(dim, 3 * spec.channels, spec.bias)
        self.conv = ConvLayer(spec.channels, spec.width, spec.bias)
        self.out = context.linear(spec.channels, dim, spec.bias)

    def run(self, x_TD: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """The mixer's branch: [T, D]."""
        b_TC, c_TC, x_TC = self.inp.run(x_TD).float().chunk(3, -1)
        gated_TC, weight_CW = b_TC * x_TC, self.conv.weight_CW
        starts_S1 = batch.query_start_S1.long()
        row_T = torch.arange(len(x_TD), device=x_TD.device)
        text_T = torch.repeat_interleave(starts_S1.diff())
        out_TC = torch.zeros_like(gated_TC)
        for tap in range(weight_CW.shape[1]):
            near_T = row_T + tap - weight_CW.shape[1] // 2
            is_inside_T = (near_T >= starts_S1[text_T]) & (near_T < starts_S1[text_T + 1])
            near_TC = gated_TC[near_T.clamp(0, len(x_TD) - 1)] * is_inside_T[:, None]
            out_TC += near_TC * weight_CW[:, tap]
        if self.conv.bias_C is not None:
            out_TC += self.conv.bias_C
        return self.out.run((c_TC * out_TC).to(x_TD.dtype))


class LightningLayer(StateLayer):
    """qkv -> linear attention with fixed decays -> norm -> gate -> out."""

    spec: Lightning

    def __init__(self, spec: Lightning, dim: int, context: LayerContext, row: int) -> None:
        super().__init__(spec, dim, context, row)
        width = spec.heads * spec.head_dim
        self.qkv = context.linear(dim, 3 * width, shard=Shard(0, (width,) * 3))
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
        return self.out.run(self.norm.run(out) * sigmoid(inputs[1]))

    def emit(self, program: ProgramBuilder, source: int) -> list[Branch]:
        """See ``StateLayer``."""
        spec, width, heads = self.spec, self.spec.head_dim, self.spec.heads
        handles(spec, "heads", "head_dim", "decays", "norm", "act")
        qkv, act = program.buffer("state in", 3 * heads * width), act_code(spec.act, False)
        program.linear(self.qkv.packed, source, qkv, act=act)
        gate = program.project(self.gate, source, "state gate")
        ones, decays = program.buffer("steps", heads), program.buffer("decays", heads)
        emit_decay(  # time steps of 1, so that decays are the layer's own
            program, qkv, 0, ones, decays, dim=heads, low=1.0, high=1.0,
            rate=program.hold(self._decays),
        )  # fmt: skip
        parts = [(qkv, part * width, 3 * width) for part in range(3)]
        out = program.buffer("state out", heads * width)
        emit_scan(
            program, [*parts, (decays, 0, 1), (ones, 0, 1)], out, "DECAYED", heads=heads,
            keys=width, values=width, state=program.state(self.row, 0),
        )  # fmt: skip
        self.norm.emit(program, out, out)
        program.gate(gate, out, (1, heads * width), "SIGMOID")
        return [Branch(out, heads * width, self.out)]


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
            sigmoid(torch.cat(halves, -1)).view(x.shape)
            for halves in zip(*(gate.chunk(2, -1) for gate in gates), strict=True)
        )
        log = self._log * kept
        # the first token of a sequence joins in full
        size = torch.where(inputs[2] > 0, 1.0, torch.sqrt(-torch.expm1(2 * log)))
        h, state = self._context.kernels.decayed_sum(log, x * opened * size, states[1])
        return h, [conv, state]

    def _finish(self, out: Tensor, inputs: list[Tensor]) -> Tensor:
        return self.out.run(out * inputs[1])

    def emit(self, program: ProgramBuilder, source: int) -> list[Branch]:
        """See ``StateLayer``."""
        spec, wide, block = self.spec, self.spec.channels, self.spec.channels // self.spec.heads
        handles(spec, "channels", "heads", "width", "act")
        x = program.project(self.x, source, "state in")
        y = program.project(self.y, source, "state gate", act=act_code(spec.act, False))
        mixed, gates = program.buffer("mixed", wide), program.buffer("gates", 2 * wide)
        self.conv.emit(program, x, mixed, program.state(self.row, 0), 0)
        program.heads(self._gates, mixed, gates)
        log = program.hold(self._log)
        program.ops.rg_lru(x=mixed, gates=gates, log=log, dim=wide, head=block)
        out, nothing = program.buffer("state out", wide), (NOWHERE, 0, 0)
        inputs = [nothing, nothing, (gates, 0, 2 * block), (gates, block, 2 * block)]
        emit_scan(
            program, inputs, out, "CHANNELS", heads=spec.heads, keys=1, values=block,
            state=program.state(self.row, 1),
        )  # fmt: skip
        program.gate(y, out, (1, wide), "IDENTITY")
        return [Branch(out, wide, self.out)]


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
    if isinstance(spec, DeltaNet) and spec.tap_rank:
        return TappedDeltaNetLayer(spec, dim, context, row)
    kind = next(layer for record, layer in _KINDS.items() if isinstance(spec, record))
    return kind(spec, dim, context, row)
