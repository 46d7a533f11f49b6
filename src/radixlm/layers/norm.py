"""RMS and layer norms. Legend: T tokens, D channels."""

from collections.abc import Callable

import torch
from torch import Tensor

from radixlm.arch.spec import Norm
from radixlm.kernels.cpu.linear import act_code
from radixlm.kernels.dispatch import Kernels
from radixlm.layers.context import LayerContext
from radixlm.layers.module import Module
from radixlm.layers.placement import HeadCut
from radixlm.layers.program import ProgramBuilder, Unsupported, handles_norm, struct
from radixlm.quant.param import Param


class NormLayer(Module):
    """``run(x)`` normalises; ``add_run(x, delta)`` first adds delta, if any, to x in place."""

    def __init__(
        self, spec: Norm, shape: tuple[int, ...], kernels: Kernels, device: torch.device
    ) -> None:
        """``shape`` is (D,), or (H, D) where every head has weights of its own."""
        assert not (spec.kind == "rms" and spec.bias), "no RMS norm with a bias exists"
        self.spec, self.shape = spec, shape
        self._kernels, self._device = kernels, device
        if spec.affine:
            self.weight = Param(shape, "float32")
        if spec.bias:
            self.bias = Param(shape, "float32")

    def cut_heads(self, cut: HeadCut, is_kv: bool) -> None:
        """Keep the weights of this rank's heads alone, of a shape (H, D)."""
        for param in self.own_params().values():
            self.shape = cut.cut(param, is_kv).shape

    def finish(self) -> None:
        spec = self.spec
        self._args: tuple[object, ...]
        self._norm: Callable[..., Tensor]
        if spec.affine:
            self.weight_D = self.weight.take()
            if spec.offset:
                self.weight_D = self.weight_D + spec.offset
        else:
            self.weight_D = torch.ones(self.shape, device=self._device)
        self.bias_D = self.bias.take() if spec.bias else None
        self._add_norm: Callable[..., Tensor] = self._add_then_norm
        if spec.scales_input:
            self._norm, self._args = self._scale_then_norm, ()
        elif spec.kind == "none":
            self._norm, self._args = torch.clone, ()
        elif spec.kind == "rms":
            self._norm, self._add_norm = self._kernels.rms_norm, self._kernels.add_rms_norm
            self._args = (self.weight_D, spec.eps)
        else:
            self._norm, self._add_norm = self._kernels.layer_norm, self._kernels.add_layer_norm
            self._args = (self.weight_D, self.bias_D, spec.eps)

    def _scale_then_norm(self, x_TD: Tensor) -> Tensor:
        scaled_TD = (x_TD * self.weight_D).to(x_TD.dtype)
        return self._kernels.rms_norm(scaled_TD, torch.ones_like(self.weight_D), self.spec.eps)

    def _add_then_norm(self, x_TD: Tensor, delta_TD: Tensor) -> Tensor:
        x_TD += delta_TD
        return self._norm(x_TD)

    def run(self, x_TD: Tensor) -> Tensor:
        """norm(x), a new tensor."""
        return self._norm(x_TD, *self._args)

    def add_run(self, x_TD: Tensor, delta_TD: Tensor | None) -> Tensor:
        """``x += delta`` in place, where there is any; norm(x), a new tensor."""
        if delta_TD is None:
            return self._norm(x_TD, *self._args)
        return self._add_norm(x_TD, delta_TD, *self._args)

    def emit(
        self,
        program: ProgramBuilder,
        source: int,
        target: int,
        offset: int = 0,
        selected: bool = False,
    ) -> int:
        """``target = norm(source)``, of the D numbers from ``offset`` of each row; the target."""
        handles_norm(self.spec)
        args = struct(
            "NormArgs", weight=program.hold(self.weight_D), bias=program.hold(self.bias_D),
            dim=self.shape[-1], eps=self.spec.eps, layer_norm=int(self.spec.kind == "layer"),
        )  # fmt: skip
        program.ops.norm(x=source, y=target, args=args, offset=offset, selected=selected)
        self._emit_behind(program, target, selected)
        return target

    def _emit_behind(self, program: ProgramBuilder, target: int, selected: bool) -> None:
        """What follows the norm of whole rows."""

    def emit_heads(
        self, program: ProgramBuilder, buffer: int, source: int, target: int, heads: int
    ) -> None:
        """The norm of each of ``heads`` runs of D numbers; ``source`` and ``target`` are offsets in
        the buffer's rows."""
        handles_norm(self.spec)
        if self.spec.kind != "rms":
            raise Unsupported("a layer norm of heads")
        width = self.shape[-1]
        args = struct(
            "HeadNormArgs", heads=heads, width=width, weight=program.hold(self.weight_D),
            per_head_weights=self.weight_D.numel() > width, eps=self.spec.eps, gates_last=True,
        )  # fmt: skip
        program.ops.head_norm(x=buffer, y=buffer, args=args, x_offset=source, y_offset=target)


class GatedNormLayer(NormLayer):
    """A norm whose output is gated by itself: y * sigmoid(up(silu(down(y))))."""

    def __init__(self, spec: Norm, dim: int, rank: int, context: LayerContext) -> None:
        super().__init__(spec, (dim,), context.kernels, context.device)
        self.down, self.up = context.plain_linear(dim, rank), context.plain_linear(rank, dim)

    def run(self, x_TD: Tensor) -> Tensor:
        return self._gated(super().run(x_TD))

    def add_run(self, x_TD: Tensor, delta_TD: Tensor | None) -> Tensor:
        return self._gated(super().add_run(x_TD, delta_TD))

    def _emit_behind(self, program: ProgramBuilder, target: int, selected: bool) -> None:
        low = program.buffer("low-rank gate", self.down.out_features)
        opened, act = program.buffer("opened"), act_code("silu", False)
        program.linear(self.down.packed, target, low, selected=selected, act=act)
        program.linear(self.up.packed, low, opened, selected=selected)
        program.gate(opened, target, (1, self.shape[-1]), "SIGMOID", selected=selected)

    def _gated(self, y_TD: Tensor) -> Tensor:
        low_TR = self._kernels.activate(self.down.run(y_TD), "silu")
        opened = self._kernels.sigmoid(self.up.run(low_TR).float())
        return (y_TD * opened).to(y_TD.dtype)
