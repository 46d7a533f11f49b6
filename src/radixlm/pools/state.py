"""Pool of the states of recurrent layers: one row for each page of the window space.

A page's row holds the states of all layers after the page's last computed token. The row of a full
page is thus a snapshot that the prefix cache may share. The first token of a page reads the row of
the page before and writes its own.

Legend: P pages, S sequences, T packed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixlm.arch.spec import State
from radixlm.base.record import Record
from radixlm.pools.memory import pool_tensor

Ids = NDArray[np.int64]


class Segment(Record):
    """Sequences that advance by the same number of tokens, each from the states of page ``source``
    to those of ``target``. ``rows``: the tokens [B * L], sequence by sequence."""

    rows: Tensor | slice
    num_sequences: int
    source: Tensor
    target: Tensor


class StatePool:
    """The states of every recurrent layer; page 0 stays zero, the state before any token."""

    def __init__(
        self,
        layers: Sequence[tuple[State, ...]],
        num_pages: int,
        page_size: int,
        recurrent_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_pages, self.page_size, self.device = num_pages, page_size, device
        self.layers = [
            [
                pool_tensor(
                    (num_pages, *shape),
                    recurrent_dtype if is_recurrent else torch.float32,
                    device,
                )
                for shape, is_recurrent in states
            ]
            for states in layers
        ]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensors in self.layers for tensor in tensors)

    def read(self, layer: int, pages: Tensor) -> list[Tensor]:
        """The states of a layer at ``pages``, in float32."""
        return [tensor[pages].float() for tensor in self.layers[layer]]

    def write(self, layer: int, pages: Tensor, states: Sequence[Tensor]) -> None:
        """The inverse of ``read``; fewer states write only the first ones."""
        for tensor, state in zip(self.layers[layer], states, strict=False):
            tensor[pages] = state.to(tensor.dtype)

    def copy_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy the states of whole pages, all layers; all reads happen before any write."""
        for tensors in self.layers:
            for tensor in tensors:
                tensor[list(target)] = tensor[list(source)]

    def zero_null_page(self) -> None:
        """After a step with a row of the dummy slot, which has written there."""
        for tensors in self.layers:
            for tensor in tensors:
                tensor[0] = 0

    def begin(self, table_SP: Ids, starts_S: Ids, counts_S: Ids) -> StateStep:
        """How the step's sequences advance: ``starts`` tokens were computed, ``counts`` are new,
        ``table`` are their pages."""
        step = _Segments(self.page_size, self.device)
        return StateStep(self, step.of(table_SP, starts_S, counts_S))


def state_nbytes(layers: Sequence[tuple[State, ...]], recurrent_dtype: torch.dtype) -> int:
    """Bytes of one page's states over all layers."""
    return sum(
        math.prod(shape) * (recurrent_dtype.itemsize if is_recurrent else 4)
        for states in layers
        for shape, is_recurrent in states
    )


class StateStep(Record):
    """One step: the pool and the segments, to be run in order."""

    pool: StatePool
    segments: tuple[Segment, ...]


class _Segments:
    """Decodes share one segment. A longer run of tokens is split at the end of the last page that
    it fills, so that the states there are kept."""

    def __init__(self, page_size: int, device: torch.device) -> None:
        self._page_size, self._device = page_size, device

    def of(self, table_SP: Ids, starts_S: Ids, counts_S: Ids) -> tuple[Segment, ...]:
        firsts = np.concatenate(([0], np.cumsum(counts_S)))[:-1]
        singles = np.flatnonzero(counts_S == 1)
        segments = []
        if len(singles):
            ends = starts_S[singles] + 1
            source = self._pages(table_SP[singles], starts_S[singles])
            target = self._pages(table_SP[singles], ends)
            segments.append(self._segment(firsts[singles], len(singles), source, target))
        for s in np.flatnonzero(counts_S > 1).tolist():
            start, first = int(starts_S[s]), int(firsts[s])
            end = start + int(counts_S[s])
            whole = end // self._page_size * self._page_size
            cuts = [start, whole, end] if start < whole < end else [start, end]
            for begin, stop in pairwise(cuts):
                pages = self._pages(table_SP[[s, s]], np.array([begin, stop]))
                rows = slice(first + begin - start, first + stop - start)
                segments.append(self._segment(rows, 1, pages[:1], pages[1:]))
        return tuple(segments)

    def _pages(self, table_SP: Ids, ends_S: Ids) -> Ids:
        """The page with the states after ``ends`` tokens; the null page for 0."""
        columns = np.maximum(ends_S - 1, 0) // self._page_size
        pages = table_SP[np.arange(len(ends_S)), columns]
        return np.where(ends_S > 0, pages, 0).astype(np.int64)

    def _segment(self, rows: Ids | slice, count: int, source: Ids, target: Ids) -> Segment:
        def to_device(ids: Ids) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(ids)).to(self._device)

        where = rows if isinstance(rows, slice) else to_device(rows)
        return Segment(where, count, to_device(source), to_device(target))
