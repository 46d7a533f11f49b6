"""Feed-forward layers. Legend: T tokens, D model channels."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from radixlm.arch.spec import Mlp
from radixlm.base.record import replace
from radixlm.kernels.cpu.extension import native
from radixlm.kernels.cpu.linear import act_code
from radixlm.layers.context import LayerContext
from radixlm.layers.module import Module
from radixlm.layers.norm import NormLayer
from radixlm.layers.program import NOWHERE, ProgramBuilder, Target, Unsupported, handles, struct
from radixlm.quant.param import Param, Shard


class MlpLayer(Module):
    """down(act(gate) * up), or down(act(up)); ``up`` holds gate's rows above up's."""

    def __init__(self, spec: Mlp, dim: int, context: LayerContext) -> None:
        self.spec = spec
        parts = (spec.inner, spec.inner) if spec.gated else (spec.inner,)
        rows = sum(parts)
        is_poly = spec.act == "poly_norm"
        # the activation is a step of its own
        self._is_apart = bool(spec.sparsity or spec.limit or is_poly)
        gate_act = spec.act if spec.gated and not self._is_apart else ""
        group, self._groups = context.ranks.tp, context.attention_groups
        own = context.evenly(dim, rows, len(parts), group)
        after = context.evenly(spec.inner, dim, group=group)
        self.inner = spec.inner  # channels between the two layers
        if own.rows and spec.sub_norm is None and not spec.sparsity and not is_poly:
            self.inner = own.rows[0][1] - own.rows[0][0]
            after = replace(after, group=group, inputs=own.outputs)
            own = replace(own, outputs=())
        elif not gate_act:
            own = context.evenly(dim, rows, group=group)
        self.up = context.linear(dim, rows, spec.bias, Shard(0, parts), gate_act, own)
        bias = spec.bias or spec.down_bias
        self.down = context.linear(spec.inner, dim, bias, Shard(1), place=after)
        kernels = context.kernels
        self._activate, self._activate_gated = kernels.activate, kernels.activate_gated
        if spec.sub_norm is not None:
            self.sub_norm = NormLayer(spec.sub_norm, (spec.inner,), context.kernels, context.device)
        if spec.act == "xielu":
            self.act = XieluLayer()
        if is_poly:
            self.poly = PolyNormLayer()
        if spec.out_scale:
            self.out_scale = Param((1,), "float32")

    def finish(self) -> None:
        self._scale = self.out_scale.take() if self.spec.out_scale else None

    def run(self, x_TD: Tensor) -> Tensor:
        """The feed-forward branch: [T, D]."""
        return self._run(x_TD) if self._groups is None else self._groups.run(self._run, x_TD)

    def _run(self, x_TD: Tensor) -> Tensor:
        h = self.up.run(x_TD)
        if self.spec.act == "poly_norm":
            gate, up = h.chunk(2, -1)
            h = self.poly.run(gate) * up
        elif self._is_apart:
            if self.spec.sparsity:
                gate, up = h.chunk(2, -1)
                h = torch.cat((gaussian_top_k(gate, self.spec.sparsity), up), -1)
            h = self._activate_gated(h, self.spec.act, self.spec.limit, self.spec.limit_after)
        elif self.spec.act == "xielu":
            h = self.act.run(h)
        elif not self.spec.gated:
            h = self._activate(h, self.spec.act)
        y = self.down.run(h if self.spec.sub_norm is None else self.sub_norm.run(h))
        return y if self._scale is None else (y * self._scale).to(y.dtype)

    def emit(self, program: ProgramBuilder, source: int, target: Target) -> None:
        """The same as operations of a program."""
        with program.of_all_groups(self._groups, target, source) as (into, (x,)):
            self._emit(program, x, into)

    def _emit(self, program: ProgramBuilder, source: int, target: Target) -> None:
        spec, selected = self.spec, target.selected
        if spec.act == "poly_norm":
            raise Unsupported("Mlp.act poly_norm")
        handles(
            spec, "inner", "act", "gated", "bias", "down_bias", "sub_norm", "sparsity", "limit",
            "limit_after",
        )  # fmt: skip
        up = program.buffer(f"up of {spec.inner}", self.inner)  # as many buffers on all ranks
        is_xielu = spec.act == "xielu"
        name = f"{spec.act}_mul" if spec.gated else None if is_xielu else spec.act
        act = act_code(name, spec.gated)
        if self._is_apart:
            self._emit_apart(program, source, up, act, selected)
        else:
            program.linear(self.up.packed, source, up, selected=selected, act=act)
        if is_xielu:
            self.act.emit(program, up, self.inner, selected)
        if spec.sub_norm is not None:
            self.sub_norm.emit(program, up, up, selected=selected)
        residual = target.buffer if target.adds else NOWHERE
        program.linear(self.down.packed, up, target.buffer, residual, target.scale, selected)

    def _emit_apart(
        self, program: ProgramBuilder, source: int, target: int, act: int, selected: bool
    ) -> None:
        """The activation behind the limits of its gate."""
        spec, ext = self.spec, native()
        both = program.project(self.up, source, "gate and up", selected)
        if spec.sparsity:
            share = normal_quantile(spec.sparsity)
            program.ops.above_normal(y=both, dim=self.inner, deviations=share, selected=selected)
        limit = ext.GateLimit(spec.limit, spec.limit_after)
        args = struct("ActArgs", dim=self.inner, act=act, gated=1, limit=limit)
        program.ops.activation(x=both, y=target, args=args, selected=selected)


def normal_quantile(share: float) -> float:
    """How many standard deviations above the mean the ``share`` of a normal distribution ends."""
    return math.sqrt(2.0) * torch.erfinv(torch.tensor(2 * share - 1)).item()


def gaussian_top_k(gate_TI: Tensor, share: float) -> Tensor:
    """What exceeds the normal quantile ``share`` of each token's gate channels, else 0."""
    deviations = normal_quantile(share)
    limit = gate_TI.mean(-1, keepdim=True) + deviations * gate_TI.std(
        -1, keepdim=True, correction=0
    )
    return F.relu(gate_TI - limit)


class XieluLayer(Module):
    """xIELU (arXiv:2411.13010): a square above zero, an exponential below, both learned."""

    def __init__(self) -> None:
        self.alpha_p, self.alpha_n = Param((1,), "float32"), Param((1,), "float32")
        self.beta, self.eps = Param((), "float32"), Param((), "float32")

    def finish(self) -> None:
        self._beta, self._eps = self.beta.take(), self.eps.take()
        self._above = F.softplus(self.alpha_p.take())
        self._below = self._beta + F.softplus(self.alpha_n.take())

    def run(self, x: Tensor) -> Tensor:
        """Element by element, a new tensor."""
        below = (torch.expm1(torch.minimum(x, self._eps)) - x) * self._below
        return torch.where(x > 0, self._above * x * x, below) + self._beta * x

    def emit(self, program: ProgramBuilder, buffer: int, width: int, selected: bool) -> None:
        """In place, of ``width`` numbers a row."""
        coefficients = struct(
            "Xielu", above=float(self._above), below=float(self._below), eps=float(self._eps),
            beta=float(self._beta),
        )  # fmt: skip
        program.ops.xielu(y=buffer, dim=width, coefficients=coefficients, selected=selected)


class PolyNormLayer(Module):
    """PolyNorm (arXiv:2411.03884): a learned sum of the normalized cube, square and input."""

    def __init__(self) -> None:
        self.weight, self.bias = Param((3,), "float32"), Param((1,), "float32")

    def finish(self) -> None:
        self._weights, self._bias = self.weight.take().tolist(), float(self.bias.take())

    def run(self, x_TI: Tensor) -> Tensor:
        """A new tensor. Each row is normalized by itself."""
        x = x_TI.float()
        out = torch.full_like(x, self._bias)
        for weight, power in zip(self._weights, (x * x * x, x * x, x), strict=True):
            out += weight * power * torch.rsqrt(power.square().mean(-1, keepdim=True) + 1e-6)
        return out.to(x_TI.dtype)
