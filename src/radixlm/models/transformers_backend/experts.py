"""Experts of a Hugging Face model on our kernels: those whose weights stand in two tables, where
ours give the same numbers for some random rows, small and large.

Legend: T tokens, K chosen experts, E experts, D channels, I inner.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import product

import torch
from torch import Tensor, nn

from radixlm.base.errors import CheckpointError
from radixlm.base.record import Record
from radixlm.kernels.dispatch import REFERENCES, Kernels
from radixlm.kernels.ops.moe import PackedExperts

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "swiglu_oai")
_TAKES = (
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),
)
_TABLES = {"gate_up_proj", "down_proj"}
_LARGE = 1e3  # inputs that reach what clamps


class Tables(Record):
    """The weights as our kernels take them, gate above up; biases None without."""

    up_E2ID: Tensor
    down_EDI: Tensor
    up_bias_E2I: Tensor | None
    down_bias_ED: Tensor | None

    def expert(self, x_D: Tensor, expert: int, act: str) -> Tensor:
        """What one expert makes of a row, in float32."""
        inner = self.up_E2ID[expert].float() @ x_D
        if self.up_bias_E2I is not None:
            inner = inner + self.up_bias_E2I[expert].float()
        out: Tensor = self.down_EDI[expert].float() @ REFERENCES["activate_gated"](inner, act)
        return out if self.down_bias_ED is None else out + self.down_bias_ED[expert].float()


class _Experts(nn.Module):
    """All experts of a layer."""

    def __init__(self, packed: PackedExperts, num_experts: int, takes: Sequence[str]) -> None:
        super().__init__()
        self.num_experts = num_experts
        self._packed, self._takes = packed, takes[1:]

    def forward(self, hidden_states: Tensor, *given: Tensor, **named: Tensor) -> Tensor:
        """As hidden_states [..., D], from ids and weights [T, K]."""
        ids, weights = (*given, *(named[name] for name in self._takes[len(given) :]))
        if ids.numel() and int(ids.max()) >= self.num_experts:
            raise CheckpointError("a router names an expert that there is not")
        rows_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        return self._packed.run(rows_TD, weights, ids).view(hidden_states.shape)


def experts_of(module: nn.Module, kernels: Kernels) -> nn.Module | None:
    """Ours in the place of a module of experts; None if it is none, or of another kind."""
    takes = tuple(inspect.signature(type(module).forward).parameters)[1:]
    held = {name: one.data for name, one in module.named_parameters()}
    biases = {f"{name}_bias" for name in _TABLES}
    if takes not in _TAKES or not (set(held) == _TABLES or set(held) == _TABLES | biases):
        return None
    if any(one.ndim != (2 if name in biases else 3) for name, one in held.items()):
        return None
    for is_turned, is_woven in product((False, True), repeat=2):
        tables = _tables(held, is_turned, is_woven)
        if tables is None:
            continue
        for act in ACTIVATIONS:
            if all(_is_equal(module, tables, act, size) for size in (1.0, _LARGE)):
                return _Experts(_packed(tables, act, kernels), len(tables.up_E2ID), takes)
    return None


def _tables(held: Mapping[str, Tensor], is_turned: bool, is_woven: bool) -> Tables | None:
    """Views of the weights if inputs stand before outputs, if rows of gate and up take turns; None
    where the shapes say otherwise."""
    up, down = held["gate_up_proj"], held["down_proj"]
    if is_turned:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    if up.shape != (len(down), 2 * down.shape[2], down.shape[1]):
        return None
    up_bias = held.get("gate_up_proj_bias")
    if is_woven:
        up = torch.cat((up[:, ::2], up[:, 1::2]), 1)
        up_bias = None if up_bias is None else torch.cat((up_bias[:, ::2], up_bias[:, 1::2]), 1)
    return Tables(up, down, up_bias, held.get("down_proj_bias"))


def _packed(tables: Tables, act: str, kernels: Kernels) -> PackedExperts:
    biases = (
        None if one is None else one.float() for one in (tables.up_bias_E2I, tables.down_bias_ED)
    )
    up, down = tables.up_E2ID.contiguous(), tables.down_EDI.contiguous()
    return kernels.pack_experts(up, down, *biases, act, ("", ""))


def _is_equal(module: nn.Module, tables: Tables, act: str, size: float) -> bool:
    """Whether the first and the last expert make the same of random rows, by both."""
    dtype, dim, last = tables.up_E2ID.dtype, tables.up_E2ID.shape[2], len(tables.up_E2ID) - 1
    draw = torch.Generator().manual_seed(0)
    rows_TD = (torch.randn(3, dim, generator=draw) * size).to(dtype)
    ids_TK = torch.tensor([[0, last], [last, 0], [0, last]])
    weights_TK = torch.rand(3, 2, generator=draw).to(dtype)
    theirs_TD = module(rows_TD, ids_TK, weights_TK).float()
    ours_TD = torch.stack(
        [
            sum(
                (w * tables.expert(x_D, e, act) for e, w in zip(es, ws, strict=True)),
                torch.zeros(dim),
            )
            for x_D, es, ws in zip(
                rows_TD.float(), ids_TK.tolist(), weights_TK.float().tolist(), strict=True
            )
        ]
    )
    close = 1e-4 if dtype == torch.float32 else 3e-2
    return float((ours_TD - theirs_TD).abs().max()) <= close * float(theirs_TD.abs().max())
