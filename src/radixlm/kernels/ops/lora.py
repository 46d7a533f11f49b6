"""LoRA adapters (arXiv:2106.09685) in a step whose tokens may use different ones: a linear layer's
outcome gets ``y += scale * (B (A x) + bias)``. A layer that joins several modules (q, k, v) has a
part for each of them that an adapter changes.

Legend: T packed tokens, S sequences, L adapters loaded, I input channels, O output channels,
N merged outputs, R rank (the largest; smaller ones are padded with zeros).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from radixlm.base.record import Record

Parts = Mapping[int, Sequence["LoraPart"]]  # of one adapter, by the number of the layer (site)


class LoraPart(Record, eq=False):
    """What an adapter adds to some outputs of a linear layer, from ``first`` on: ``scale * (B (A x)
    + bias)``. A is [R, I], B [O, R], in bfloat16, float16 or float32, the bias float32 [O]."""

    a_RI: Tensor
    b_OR: Tensor
    scale: float
    first: int = 0
    bias_O: Tensor | None = None

    @property
    def rank(self) -> int:
        return int(self.a_RI.shape[0])

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        bias = 0 if self.bias_O is None else self.bias_O.nbytes
        return self.a_RI.nbytes + self.b_OR.nbytes + bias

    def to(self, device: torch.device) -> LoraPart:
        """The part on another device."""
        bias_O = None if self.bias_O is None else self.bias_O.to(device)
        return LoraPart(self.a_RI.to(device), self.b_OR.to(device), self.scale, self.first, bias_O)


class PackedAdapter(Protocol):
    """An adapter as the kernels keep it."""

    parts: Parts


class LoraRows(Protocol):
    """The tokens of a step that have adapters."""

    num_tokens: int

    def has(self, site: int) -> bool:
        """Whether an adapter of the step changes this layer."""
        ...

    def add_(self, site: int, x_TI: Tensor, y_TO: Tensor) -> None:
        """Add to the layer's outcome y what the adapters give of its input x. Tokens without an
        adapter keep their y."""
        ...


class ReferenceAdapter:
    """The parts as they are."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts


class ReferenceLoraRows:
    """Adapter by adapter, in float32."""

    def __init__(self, adapters: Sequence[PackedAdapter], adapter_T: Tensor) -> None:
        self.num_tokens = int(adapter_T.shape[0])
        self._rows = [(one, (adapter_T == i).nonzero()[:, 0]) for i, one in enumerate(adapters)]

    def has(self, site: int) -> bool:
        return any(site in adapter.parts for adapter, _ in self._rows)

    def add_(self, site: int, x_TI: Tensor, y_TO: Tensor) -> None:
        for adapter, rows_M in self._rows:
            x_MI = x_TI[rows_M].float()
            for part in adapter.parts.get(site, ()):
                delta_MO = x_MI @ part.a_RI.float().T @ part.b_OR.float().T
                if part.bias_O is not None:
                    delta_MO += part.bias_O
                outputs = slice(part.first, part.first + delta_MO.shape[1])
                y_MO = y_TO[rows_M, outputs].float() + delta_MO * part.scale
                y_TO[rows_M, outputs] = y_MO.to(y_TO.dtype)


def pack_adapter(parts: Parts) -> PackedAdapter:
    """An adapter ready to run: its parts by the numbers of the layers."""
    return ReferenceAdapter(parts)


def lora_rows(adapters: Sequence[PackedAdapter], adapter_T: Tensor) -> LoraRows:
    """The tokens of a step. ``adapter_T``: int32, index into ``adapters`` or -1. What is made of it
    may be kept while the tokens of steps keep their adapters."""
    return ReferenceLoraRows(adapters, adapter_T)


class AdapterRows(Record):
    """Which adapter each sequence of the step uses; -1: none. ``rank_L``: the actual rank of each
    adapter, so that a kernel need not read its padding."""

    adapter_S: Tensor  # int32
    query_start_S1: Tensor  # int32, first token of each sequence
    max_query_len: int
    rank_L: Tensor | None = None  # int32


def lora_shrink(x_TI: Tensor, a_LNRI: Tensor, rows: AdapterRows) -> Tensor:
    """``A x`` of each token's adapter, float32 [T, N, R]; zeros without one."""
    h_TNR = torch.zeros(x_TI.shape[0], *a_LNRI.shape[1:3], device=x_TI.device)
    for adapter, first, end in _spans(rows):
        h_TNR[first:end] = torch.einsum(
            "ti,nri->tnr", x_TI[first:end].float(), a_LNRI[adapter].float()
        )
    return h_TNR


def lora_expand_(
    y_TO: Tensor,
    h_TNR: Tensor,
    b_LOR: Tensor,
    scale_L: Tensor,
    widths_N: Sequence[int],
    rows: AdapterRows,
) -> None:
    """``y += scale * B h`` in place; output n is the next ``widths_N[n]`` channels of y and rows
    of B. Tokens without an adapter keep their y."""
    for adapter, first, end in _spans(rows):
        parts_h = h_TNR[first:end].unbind(1)
        parts_b = b_LOR[adapter].float().split_with_sizes(list(widths_N))
        delta = torch.cat([h @ b.T for h, b in zip(parts_h, parts_b, strict=True)], -1)
        part = y_TO[first:end]
        part.copy_(part.float() + delta * scale_L[adapter])


def _spans(rows: AdapterRows) -> list[tuple[int, int, int]]:
    starts = rows.query_start_S1.tolist()
    spans = zip(rows.adapter_S.tolist(), starts[:-1], starts[1:], strict=True)
    return [span for span in spans if span[0] >= 0]
