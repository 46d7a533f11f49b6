"""Run the experts of a Hugging Face model on the kernels: those whose weights are two tables, if
the kernel gives the same numbers for random rows, small and large.

Legend: T tokens, K chosen experts, E experts, D channels, I inner.
"""

import inspect
from collections.abc import Mapping, Sequence
from itertools import product

import torch
from torch import Tensor, nn

from radixlm.base.errors import CheckpointError
from radixlm.base.record import Record
from radixlm.kernels.dispatch import REFERENCES, Kernels
from radixlm.kernels.generator import seeded
from radixlm.kernels.ops.moe import PackedExperts

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "swiglu_oai")
_SIGNATURES = (
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),
)
_TABLES = {"gate_up_proj", "down_proj"}
_LARGE = 1e3  # inputs large enough to reach clamps


class Tables(Record):
    """The weights as the kernels read them, gate rows above up rows."""

    up_E2ID: Tensor
    down_EDI: Tensor
    up_bias_E2I: Tensor | None
    down_bias_ED: Tensor | None

    def expert(self, x_D: Tensor, expert: int, act: str) -> Tensor:
        """One expert's output for a row, in float32."""
        inner = self.up_E2ID[expert].float() @ x_D
        if self.up_bias_E2I is not None:
            inner = inner + self.up_bias_E2I[expert].float()
        out: Tensor = self.down_EDI[expert].float() @ REFERENCES["activate_gated"](inner, act)
        return out if self.down_bias_ED is None else out + self.down_bias_ED[expert].float()


class _Experts(nn.Module):
    """All experts of a layer."""

    def __init__(self, packed: PackedExperts, num_experts: int, names: Sequence[str]) -> None:
        super().__init__()
        self.num_experts = num_experts
        self._packed, self._names = packed, names[1:]

    def forward(self, hidden_states: Tensor, *args: Tensor, **named: Tensor) -> Tensor:
        """Like hidden_states [..., D]; the ids and weights are [T, K]."""
        ids, weights = (*args, *(named[name] for name in self._names[len(args) :]))
        if ids.numel() and int(ids.max()) >= self.num_experts:
            raise CheckpointError("a router names an expert that does not exist")
        rows_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        return self._packed.run(rows_TD, weights, ids).view(hidden_states.shape)


def replace_experts(module: nn.Module, kernels: Kernels) -> nn.Module | None:
    """The replacement of a module of experts; None for other modules."""
    names = tuple(inspect.signature(type(module).forward).parameters)[1:]
    weights = {name: one.data for name, one in module.named_parameters()}
    biases = {f"{name}_bias" for name in _TABLES}
    if names not in _SIGNATURES or not (
        set(weights) == _TABLES or set(weights) == _TABLES | biases
    ):
        return None
    if any(one.ndim != (2 if name in biases else 3) for name, one in weights.items()):
        return None
    for is_transposed, is_interleaved in product((False, True), repeat=2):
        tables = _tables(weights, is_transposed, is_interleaved)
        if tables is None:
            continue
        for act in ACTIVATIONS:
            if all(_is_equal(module, tables, act, size) for size in (1.0, _LARGE)):
                return _Experts(_packed(tables, act, kernels), len(tables.up_E2ID), names)
    return None


def _tables(
    weights: Mapping[str, Tensor], is_transposed: bool, is_interleaved: bool
) -> Tables | None:
    """Views of the weights, whose inputs may come before the outputs (``is_transposed``) and whose
    gate and up rows may alternate; None if the shapes do not fit."""
    up, down = weights["gate_up_proj"], weights["down_proj"]
    if is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    if up.shape != (len(down), 2 * down.shape[2], down.shape[1]):
        return None
    up_bias = weights.get("gate_up_proj_bias")
    if is_interleaved:
        up = torch.cat((up[:, ::2], up[:, 1::2]), 1)
        up_bias = None if up_bias is None else torch.cat((up_bias[:, ::2], up_bias[:, 1::2]), 1)
    return Tables(up, down, up_bias, weights.get("down_proj_bias"))


def _packed(tables: Tables, act: str, kernels: Kernels) -> PackedExperts:
    biases = (
        None if one is None else one.float() for one in (tables.up_bias_E2I, tables.down_bias_ED)
    )
    up, down = tables.up_E2ID.contiguous(), tables.down_EDI.contiguous()
    return kernels.pack_experts(up, down, *biases, act, ("", ""))


def _is_equal(module: nn.Module, tables: Tables, act: str, size: float) -> bool:
    """Whether the first and the last expert give the same for random rows in both forms."""
    dtype, dim, last = tables.up_E2ID.dtype, tables.up_E2ID.shape[2], len(tables.up_E2ID) - 1
    draw = seeded(0)
    rows_TD = (torch.randn(3, dim, generator=draw) * size).to(dtype)
    ids_TK = torch.tensor([[0, last], [last, 0], [0, last]])
    weights_TK = torch.rand(3, 2, generator=draw).to(dtype)
    want_TD = module(rows_TD, ids_TK, weights_TK).float()
    got_TD = torch.stack(
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
    return float((got_TD - want_TD).abs().max()) <= close * float(want_TD.abs().max())
