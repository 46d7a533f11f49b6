"""What the writers of a C++ program share: its buffers, linear maps, norms, gates.

Buffers hold a row a token, by name and width; what has gone before is overwritten.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from radixlm.arch.spec import LogNScaling
from radixlm.attention.cpu import CpuPool
from radixlm.base.record import Record
from radixlm.kernels.cpu.extension import address, native
from radixlm.kernels.cpu.linear import PackedLinear
from radixlm.kernels.ops.linear import GatherLinear
from radixlm.layers.linear import Linear
from radixlm.layers.logn_scaling import logn_scales
from radixlm.layers.norm import NormLayer
from radixlm.pools.state import StatePool

NOWHERE = -1  # no buffer
MOST_POSITIONS = 1 << 20  # rows of a table of queries' growth
GATES = {
    "sigmoid": 0,
    "silu": 1,
    "softplus": 2,
    "sigmoid2": 3,
    "plain": 4,
}  # csrc/common/api.h: Gate


def packed_of(linear: object) -> PackedLinear | None:
    """The C++ weight behind a packed linear; None if something else runs it."""
    inner = linear.inner if isinstance(linear, GatherLinear) else linear
    packed = getattr(inner, "packed", None)
    return packed if isinstance(packed, PackedLinear) else None


class Branch(Record):
    """What a mixer gives before its output projection: ``width`` numbers of a buffer's rows."""

    buffer: int
    width: int
    out: Linear


class Norming(Record):
    """How heads are normed: by the mean of squares, or by their sum; ``scale`` joins."""

    eps: float
    scale: float = 1.0
    is_sum: bool = False
    act: str = "sigmoid"
    gates_last: bool = True


class ProgramOps:
    """One program that is being written. ``keep`` holds what it knows by address only."""

    def __init__(
        self, dim: int, pools: list[CpuPool], states: StatePool | None, max_positions: int
    ) -> None:
        self.program: Any = native().Program()
        self.pools, self.states, self.dim = pools, states, dim
        self.num_positions = min(max_positions, MOST_POSITIONS)
        self.keep: list[object] = [pools, states]
        self._scratch: dict[tuple[str, int], int] = {}
        self._growth: dict[LogNScaling, Tensor] = {}
        self.grown_positions = sys.maxsize  # longest sequence that queries' growth is known of

    def buffer(self, name: str, width: int = 0) -> int:
        """The buffer of a name and width, ``dim`` by default."""
        key = (name, width or self.dim)
        if key not in self._scratch:
            self._scratch[key] = self.program.buffer(key[1])
        return self._scratch[key]

    def held(self, tensor: Tensor | None) -> int:
        """The address of a tensor that lives as long as the program."""
        self.keep.append(tensor)
        return address(tensor)

    def linear(
        self, linear: object, source: int, target: int, residual: int = NOWHERE,
        scale: float = 1.0, is_picked: bool = False, act: int = 0,
    ) -> int:  # fmt: skip
        """``target = act(linear(source)) * scale + residual``; the target."""
        packed = packed_of(linear)
        assert packed is not None
        self.keep.append(packed)
        source = self.in_order(linear, source, is_picked)
        self.program.linear(source, target, packed.handle, residual, scale, act, is_picked)
        return target

    def project(self, layer: Linear, source: int, name: str, is_picked: bool = False) -> int:
        """A layer's outcome, in a buffer of its own."""
        return self.linear(
            layer.packed, source, self.buffer(name, layer.out_features), is_picked=is_picked
        )

    def in_order(self, linear: object, source: int, is_picked: bool) -> int:
        """The inputs in the order of the weight's columns."""
        if not isinstance(linear, GatherLinear):
            return source
        index_J = linear.index_J.int().contiguous()
        width = int(index_J.shape[0])
        target = self.buffer("in order", width)
        self.program.columns(source, target, self.held(index_J), width, is_picked)
        return target

    def norm(self, layer: NormLayer, source: int, name: str, is_picked: bool = False) -> int:
        """Of whole rows, into the buffer of a name."""
        target = self.buffer(name)
        self._norm(layer, source, target, self.dim, 0, is_picked)
        return target

    def norm_in_place(
        self, layer: NormLayer, buffer: int, dim: int, offset: int = 0, is_picked: bool = False
    ) -> None:
        """Of ``dim`` numbers from ``offset`` of each row."""
        self._norm(layer, buffer, buffer, dim, offset, is_picked)

    def _norm(
        self, layer: NormLayer, source: int, target: int, dim: int, offset: int, is_picked: bool
    ) -> None:
        weight, bias = self.held(layer.weight_D), self.held(layer.bias_D)
        eps, is_layer_norm = layer.spec.eps, layer.spec.kind == "layer"
        self.program.norm(
            source, NOWHERE, target, weight, bias, dim, eps, is_layer_norm, is_picked, offset
        )

    def norm_heads(
        self, source: tuple[int, int], target: tuple[int, int], heads: tuple[int, int],
        weight: Tensor | None, how: Norming, gate: tuple[int, int] = (NOWHERE, 0),
    ) -> None:  # fmt: skip
        """RMS norms of ``heads`` (count, width). Places are (buffer, offset)."""
        has_own = weight is not None and weight.numel() > heads[1]
        offsets = (source[1], target[1], gate[1])
        self.program.head_norm(
            source[0], target[0], offsets, gate[0], heads, self.held(weight), has_own,
            (how.eps, how.scale, how.is_sum), GATES[how.act], how.gates_last,
        )  # fmt: skip

    def add(self, source: int, target: int, scale: float, is_picked: bool) -> None:
        """``target += source * scale``."""
        self.program.add(source, target, self.dim, scale, is_picked)

    def scale(self, buffer: int, scale: float, is_picked: bool) -> None:
        """Whole rows times a number."""
        if scale != 1.0:
            self.program.scale(buffer, 0, self.dim, scale, 0.0, False, is_picked)

    def grow_queries(self, how: LogNScaling, buffer: int, heads: tuple[int, int, int]) -> None:
        """``heads``: count, width, numbers from one to the next."""
        self.grown_positions = self.num_positions
        if how not in self._growth:
            self._growth[how] = logn_scales(how, torch.arange(self.num_positions))
        self.program.grow_rows(buffer, self.held(self._growth[how]), *heads)
