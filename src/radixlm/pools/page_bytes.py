"""PageBytes: whole pages of all pools as rows of bytes, for tiers that keep them elsewhere.

A page of space 0 (the full page table) is the page's part of every pool of that space, one pool
after another, each [layers, bytes of a layer]; then those of the draft model. Space 1 is that of
window layers or of recurrent states. Bytes go unchanged, whatever the dtype.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import addressof, c_char
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixlm.base.errors import InvariantError
from radixlm.base.record import Record
from radixlm.pools.pool import KvPool
from radixlm.pools.state import StatePool

Bytes = NDArray[np.uint8]
Pages = NDArray[np.int32]
Rows = Sequence[Bytes]


class _Part(Record, eq=False):
    """A tensor of a pool as uint8 [layers, pages, row], and where it stands in a page's bytes."""

    data_LPR: Tensor
    host_LPR: Bytes | None  # the same memory, where the host has it
    start: int
    end: int

    def of(self, row: Bytes) -> Bytes:
        """This part of a page's bytes, [layers, row] (a view)."""
        return row[self.start : self.end].reshape(len(self.data_LPR), -1)

    def copy(
        self, pages: Pages, rows: Rows, at: NDArray[np.uint64] | None, *, to_pool: bool,
        is_team: bool,
    ) -> None:  # fmt: skip
        """Copies this part of pages to or from their rows, in memory. ``at``: the rows' addresses,
        for the kernels; ``is_team``: by all of their threads, where the thread of the steps calls.
        """
        pool = self.host_LPR
        assert pool is not None
        layers, _, size = pool.shape
        if at is not None and pool.strides[1:] == (size, 1):
            sys.modules["radixlm._cpu"].copy_pages(
                self.data_LPR.data_ptr(), layers, pool.strides[0], size, pages.ctypes.data,
                at.ctypes.data, len(rows), self.start, to_pool, is_team,
            )  # fmt: skip
            return
        for row, page in zip(rows, pages.tolist(), strict=True):
            if to_pool:
                np.copyto(pool[:, page], self.of(row))
            else:
                np.copyto(self.of(row), pool[:, page])


class PageBytes:
    """The pools of one rank: ``pools``: (space, pool); ``drafts``: a draft model's, in space 0.

    ``filled``: the draft model's pages that have entries (``ModelDrafter.filled_pages``); a page's
    last byte tells it."""

    def __init__(
        self,
        pools: Sequence[tuple[int, KvPool]],
        states: StatePool | None = None,
        drafts: Sequence[KvPool] = (),
    ) -> None:
        self.filled: Callable[[], set[int]] | None = None
        tensors: tuple[list[Tensor], list[Tensor]] = ([], [])
        for space, pool in (*pools, *((0, pool) for pool in drafts)):
            tensors[space].extend(_tensors(pool))
        if states is not None:
            tensors[1].extend(t[None] for layer in states.layers for t in layer)
        self._parts = tuple(map(_parts, tensors))
        self._has_flag = bool(drafts)
        self._num_bytes = tuple(parts[-1].end if parts else 0 for parts in self._parts)
        device = next((t.device for ts in tensors for t in ts), torch.device("cpu"))
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        shapes = [[f"{list(t.shape)} {t.dtype}" for t in ts] for ts in tensors]
        self.layout = "; ".join(", ".join(_without_pages(s) for s in some) for some in shapes)

    def nbytes(self, space: int) -> int:
        """Bytes of one page, 0 for a space that this rank has nothing of."""
        return self._num_bytes[space] + (space == 0 and self._has_flag)

    @property
    def page_bytes(self) -> tuple[int, int]:
        return self.nbytes(0), self.nbytes(1)

    def fence(self) -> Any:
        """A mark behind all work that this thread has launched, for ``read`` and ``write``."""
        if self._stream is None:
            return None
        return torch.cuda.current_stream(self._device).record_event()

    @property
    def is_on_host(self) -> bool:
        """Whether the pools are in memory, where steps have ended when their launch returns."""
        return self._stream is None

    def read(
        self, space: int, pages: Pages, out: Rows, fence: Any = None, *, is_team: bool = False
    ) -> None:
        """Copies each page into its row of ``out``, uint8 [nbytes]. ``is_team``: by all threads of
        the kernels, where the thread of the steps calls."""
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                self._read_device(space, pages, out, fence)
        else:
            self._copy(space, pages, out, to_pool=False, is_team=is_team)
        if space == 0 and self._has_flag:
            filled = self.filled() if self.filled is not None else ()
            for row, page in zip(out, pages.tolist(), strict=True):
                row[-1] = page in filled

    def write(
        self, space: int, pages: Pages, data: Rows, fence: Any = None, *, is_team: bool = False
    ) -> None:
        """The inverse of ``read``; when it returns, later steps see the pages."""
        if data and {row.shape for row in data} != {(self.nbytes(space),)}:
            raise InvariantError(f"rows for pages of {self.nbytes(space)} bytes have other sizes")
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                self._write_device(space, pages, data, fence)
        else:
            self._copy(space, pages, data, to_pool=True, is_team=is_team)
        if space == 0 and self._has_flag and self.filled is not None:
            filled = self.filled()
            for row, page in zip(data, pages.tolist(), strict=True):
                (filled.add if row[-1] else filled.discard)(page)

    def spans(self) -> list[tuple[int, int]]:
        """(address, bytes) of each layer of each pool; none of a pool on a device."""
        return [
            (layer.data_ptr(), layer.numel())
            for parts in self._parts
            for part in parts
            if part.host_LPR is not None
            for layer in part.data_LPR
        ]

    def pieces(self, space: int, page: int) -> list[tuple[int, int]]:
        """(address, length) of a page's parts in memory, in the order of its bytes; without the
        flag of a draft model."""
        return [
            (part.data_LPR[layer, page].data_ptr(), part.data_LPR.shape[2])
            for part in self._parts[space]
            for layer in range(part.data_LPR.shape[0])
        ]

    def _copy(self, space: int, pages: Pages, rows: Rows, *, to_pool: bool, is_team: bool) -> None:
        pages, at = np.ascontiguousarray(pages), None
        if "radixlm._cpu" in sys.modules:
            with suppress(TypeError):  # a row that is read only, or not contiguous
                # a seventh of the time of ``__array_interface__``
                at = np.array([addressof(c_char.from_buffer(row.data)) for row in rows], np.uint64)
        for part in self._parts[space]:
            part.copy(pages, rows, at, to_pool=to_pool, is_team=is_team)

    def _read_device(self, space: int, pages: Pages, out: Rows, fence: Any) -> None:
        if fence is not None:
            fence.wait(self._stream)
        index = torch.from_numpy(pages.astype(np.int64)).to(self._device)
        for part in self._parts[space]:
            rows = part.data_LPR.index_select(1, index).transpose(0, 1).flatten(1)
            for row, found in zip(out, rows.cpu().numpy(), strict=True):
                row[part.start : part.end] = found

    def _write_device(self, space: int, pages: Pages, data: Rows, fence: Any) -> None:
        if fence is not None:
            fence.wait(self._stream)
        index = torch.from_numpy(pages.astype(np.int64)).to(self._device)
        for part in self._parts[space]:
            layers, _, row = part.data_LPR.shape
            rows = torch.from_numpy(np.stack([one[part.start : part.end] for one in data]))
            rows = rows.to(self._device).view(len(pages), layers, row).transpose(0, 1)
            part.data_LPR.index_copy_(1, index, rows.contiguous())
        assert self._stream is not None
        self._stream.synchronize()


def _tensors(pool: KvPool) -> list[Tensor]:
    """The tensors of a pool, [layers, pages, ...]."""
    return [tensor for tensor in pool.tensors if tensor.numel()]


def _parts(tensors: Sequence[Tensor]) -> tuple[_Part, ...]:
    parts: list[_Part] = []
    at = 0
    for tensor in tensors:
        data = tensor.view(torch.uint8).flatten(2)
        end = at + data.shape[0] * data.shape[2]
        host = data.numpy() if data.device.type == "cpu" else None
        parts.append(_Part(data, host, at, end))
        at = end
    return tuple(parts)


def _without_pages(shape: str) -> str:
    """A tensor's shape without its second number, that of pages."""
    first, _, rest = shape.split(", ", 2)
    return f"{first}, *, {rest}"
