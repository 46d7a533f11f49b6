"""LoRA adapters (arXiv:2106.09685) in a step whose tokens may use different ones: a linear layer's
outcome gets ``y += scale * (B (A x) + bias)``. A layer that joins several modules (q, k, v) has a
part for each of them that an adapter changes.

Legend: T packed tokens, S sequences, L adapters loaded, I input channels, O output channels,
N merged outputs, R rank (the largest; smaller ones are padded with zeros).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixlm.base.record import Record

AdapterPart: TypeAlias = "LoraPart | TableRows"
Parts = Mapping[int, Sequence[AdapterPart]]  # of one adapter, by the number of the layer (site)


class LoraPart(Record, eq=False):
    """What an adapter adds to some outputs y of a linear layer, from ``first`` on: ``scale * (B (A
    x) + bias)``. A is [R, I], B [O, R], in bfloat16, float16 or float32.

    With ``gain_O`` (DoRA, arXiv:2402.09353) they become ``gain * (y - own + that) + own``, where
    ``own_O`` is the layer's own bias. The vectors are float32 [O]. ``block``: which expert or
    head it is of, where a layer has one map for each."""

    a_RI: Tensor
    b_OR: Tensor
    scale: float
    first: int = 0
    bias_O: Tensor | None = None
    gain_O: Tensor | None = None
    own_O: Tensor | None = None
    block: int = 0

    @property
    def rank(self) -> int:
        return int(self.a_RI.shape[0])

    @property
    def num_bytes(self) -> int:
        return sum(
            tensor.nbytes for tensor in (self.a_RI, self.b_OR, *self.vectors) if tensor is not None
        )

    @property
    def vectors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Bias, gain and the layer's own bias."""
        return self.bias_O, self.gain_O, self.own_O

    @property
    def content(self) -> tuple[tuple[float | str, ...], list[Tensor]]:
        """What a digest is made of: its place and scale, and its tensors."""
        tensors = [t for t in (self.a_RI, self.b_OR, *self.vectors[:2]) if t is not None]
        return (self.block, self.first, self.scale.hex()), tensors

    def cut(self, ranges: Sequence[tuple[int, int]]) -> list[LoraPart]:
        """The part of a layer that has these ranges of its outputs only, one after another."""
        found, at = [], 0
        for begin, end in ranges:
            low, high = max(begin, self.first), min(end, self.first + len(self.b_OR))
            own = slice(low - self.first, high - self.first)
            if low < high:
                bias_O, gain_O, own_O = (None if v is None else v[own] for v in self.vectors)
                first, scale = at + low - begin, self.scale
                found.append(
                    LoraPart(
                        self.a_RI, self.b_OR[own], scale, first, bias_O, gain_O, own_O, self.block
                    )
                )
            at += end - begin
        return found

    def to(self, device: torch.device) -> LoraPart:
        bias_O, gain_O, own_O = (None if v is None else v.to(device) for v in self.vectors)
        a_RI, b_OR = self.a_RI.to(device), self.b_OR.to(device)
        return LoraPart(a_RI, b_OR, self.scale, self.first, bias_O, gain_O, own_O, self.block)


class TableRows(Record, eq=False):
    """Rows of a token table that take the place of the model's: ``rows_ND``, float32, of the
    tokens ``ids_N``; of all tokens without them."""

    ids_N: Tensor | None
    rows_ND: Tensor

    @property
    def num_bytes(self) -> int:
        return int(self.rows_ND.nbytes)

    @property
    def content(self) -> tuple[tuple[float | str, ...], list[Tensor]]:
        return (), [self.rows_ND, *([] if self.ids_N is None else [self.ids_N])]

    def to(self, device: torch.device) -> TableRows:
        ids_N = None if self.ids_N is None else self.ids_N.to(device)
        return TableRows(ids_N, self.rows_ND.to(device))

    def find(self, ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """(places in ``ids_T``, their rows [M, D])."""
        if self.ids_N is None:
            return torch.arange(len(ids_T), device=ids_T.device), self.rows_ND[ids_T]
        places, rows = (ids_T[:, None] == self.ids_N).nonzero(as_tuple=True)
        return places, self.rows_ND[rows]


class LoraLayout(Record):
    """What the kernels know of a model before adapters come: the device, ``sites`` of linear
    layers, ``dtype`` of activations. In recorded steps at most ``max_adapters`` meet, of at most
    ``max_rank``."""

    where: torch.device = torch.device("cpu")
    sites: frozenset[int] = frozenset()
    dtype: torch.dtype = torch.float32
    max_adapters: int = 8
    max_rank: int = 64


PLAIN_LAYOUT = LoraLayout()


class PackedAdapter(Protocol):
    """An adapter as the kernels keep it."""

    parts: Parts


class LoraRows(Protocol):
    """The tokens of a step that have adapters."""

    num_tokens: int

    def has(self, site: int) -> bool:
        """Whether an adapter of the step changes this layer."""

    def changed_T(self, site: int) -> Tensor:
        """Which tokens have an adapter that changes this layer, bool [T]."""

    def select(self, rows_R: Tensor) -> LoraRows:
        """These tokens alone."""

    def add_(self, site: int, x_TI: Tensor, y_TO: Tensor, block: int = 0) -> None:
        """Add to the layer's outcome y what the adapters give of its input x. Tokens without an
        adapter keep their y."""

    def add_heads_(self, site: int, x_THI: Tensor, y_THO: Tensor) -> None:
        """The same of a layer with a map for each head."""

    def add_embeds_(self, site: int, ids_T: Tensor, y_TD: Tensor, scale: float) -> None:
        """The same of a token table, whose input are rows of the identity: A's columns ``ids``."""


class LoraSlots(Protocol):
    """Adapters of steps that are recorded as graphs: what such a step reads of them is in fixed
    places. ``ints``: int32, which rows have which slot's adapter."""

    num_slots: int
    ints: Tensor

    def takes(self, adapter: PackedAdapter) -> bool:
        """Whether recorded steps can run the adapter."""

    def put(self, slot: int, adapter: PackedAdapter) -> None:
        """Launch the writes that give an adapter the slot."""

    def fill(self, slot_T: NDArray[np.int32], host: Tensor) -> None:
        """Write ``ints`` of a step to a buffer of the host. ``slot_T``: -1 for no adapter."""

    def rows(self, num_tokens: int) -> LoraRows:
        """The tokens of a step, while it is recorded."""


class ReferenceAdapter:
    """The parts as they are."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts


class ReferenceLoraRows:
    """Adapter by adapter, in float32."""

    def __init__(self, adapters: Sequence[PackedAdapter], adapter_T: Tensor) -> None:
        self.num_tokens = int(adapter_T.shape[0])
        self._adapters, self._adapter_T = adapters, adapter_T
        self._rows: dict[int, Tensor] = {}  # of an adapter's tokens; to find them waits for a GPU

    def has(self, site: int) -> bool:
        return any(site in adapter.parts for adapter in self._adapters)

    def changed_T(self, site: int) -> Tensor:
        having = [i for i, adapter in enumerate(self._adapters) if site in adapter.parts]
        return torch.isin(self._adapter_T, torch.tensor(having, device=self._adapter_T.device))

    def select(self, rows_R: Tensor) -> LoraRows:
        numbers_R = torch.where(rows_R < 0, -1, self._adapter_T[rows_R])
        return type(self)(self._adapters, numbers_R.contiguous())

    def add_heads_(self, site: int, x_THI: Tensor, y_THO: Tensor) -> None:
        for head in range(x_THI.shape[1]):
            ReferenceLoraRows.add_(self, site, x_THI[:, head], y_THO[:, head], head)

    def add_(self, site: int, x_TI: Tensor, y_TO: Tensor, block: int = 0) -> None:
        for part, rows_M in self._parts(site):
            if not isinstance(part, LoraPart) or part.block != block:
                continue
            delta_MO = x_TI[rows_M].float() @ part.a_RI.float().T @ part.b_OR.float().T
            if part.bias_O is not None:
                delta_MO += part.bias_O
            outputs = slice(part.first, part.first + delta_MO.shape[1])
            y_MO = y_TO[rows_M, outputs].float()
            if part.own_O is not None:
                y_MO = y_MO - part.own_O
            y_MO = y_MO + delta_MO * part.scale
            if part.gain_O is not None:
                y_MO = y_MO * part.gain_O
            if part.own_O is not None:
                y_MO = y_MO + part.own_O
            y_TO[rows_M, outputs] = y_MO.to(y_TO.dtype)

    def add_embeds_(self, site: int, ids_T: Tensor, y_TD: Tensor, scale: float) -> None:
        for part, rows_M in self._parts(site):
            if isinstance(part, TableRows):
                places_K, rows_KD = part.find(ids_T[rows_M])
                y_TD[rows_M[places_K]] = (rows_KD * scale).to(y_TD.dtype)
                continue
            h_RM = part.a_RI[:, ids_T[rows_M]].float()
            delta_MD = torch.zeros(len(rows_M), y_TD.shape[1], device=y_TD.device)
            for h_M, b_O in zip(h_RM, part.b_OR.float().T, strict=True):
                delta_MD += h_M[:, None] * b_O  # in this order, whatever the number of rows
            y_MD = y_TD[rows_M].float() + delta_MD * (part.scale * scale)
            y_TD[rows_M] = y_MD.to(y_TD.dtype)

    def _parts(self, site: int) -> Iterator[tuple[AdapterPart, Tensor]]:
        for index, adapter in enumerate(self._adapters):
            parts = adapter.parts.get(site, ())
            if parts and index not in self._rows:
                self._rows[index] = (self._adapter_T == index).nonzero()[:, 0]
            for part in parts:
                yield part, self._rows[index]


def pack_adapter(parts: Parts, layout: LoraLayout = PLAIN_LAYOUT) -> PackedAdapter:
    """An adapter ready to run: its parts by the numbers of the layers."""
    return ReferenceAdapter(parts)


def lora_rows(
    adapters: Sequence[PackedAdapter], adapter_T: Tensor, where: torch.device | None = None
) -> LoraRows:
    """The tokens of a step. ``adapter_T``: int32 on the host, index into ``adapters`` or -1;
    ``where``: the device of the step, None for the host. What is made of it may be kept while the
    tokens of steps keep their adapters."""
    return ReferenceLoraRows(adapters, adapter_T.to(where))


def lora_slots(layout: LoraLayout, max_tokens: int) -> LoraSlots | None:
    """Slots of adapters for recorded steps of at most ``max_tokens``; None where the kernels choose
    on the host what to do."""
    return None
