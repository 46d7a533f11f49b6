"""Low-rank adapters, as in ``kernels/ops/lora.py`` (whose legend holds): float32 rows, adapters of
any float type that are read once for all of their rows. A row has the same bits in any batch."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from radixlm.kernels.cpu.checks import int32, rows_of
from radixlm.kernels.cpu.extension import DTYPE_CODE, address, native
from radixlm.kernels.ops.lora import (
    PLAIN_LAYOUT,
    LoraLayout,
    LoraPart,
    PackedAdapter,
    Parts,
    ReferenceLoraRows,
    TableRows,
)


class NativeAdapter:
    """The parts, and the extension's view of their memory."""

    def __init__(self, parts: Parts, layout: LoraLayout = PLAIN_LAYOUT) -> None:
        self.parts = parts
        self.handle: Any = native().LoraAdapter()
        self.tables = frozenset(  # sites that the extension does not know
            site for site, of in parts.items() if any(isinstance(one, TableRows) for one in of)
        )
        self.blocked = frozenset(  # sites with maps of several experts or heads
            site for site, of in parts.items() if any(getattr(one, "block", 0) for one in of)
        )
        self._keep: list[tuple[Tensor | None, ...]] = []  # the extension knows addresses alone
        for site, of_site in parts.items():
            for part in (one for one in of_site if isinstance(one, LoraPart)):
                a_RI, b_OR = part.a_RI.contiguous(), part.b_OR.contiguous()
                if a_RI.dtype != b_OR.dtype:
                    a_RI, b_OR = a_RI.float(), b_OR.float()
                vectors = [None if v is None else v.float().contiguous() for v in part.vectors]
                self._keep.append((a_RI, b_OR, *vectors))
                self.handle.add(
                    site, a_RI.data_ptr(), b_OR.data_ptr(), [address(v) for v in vectors],
                    DTYPE_CODE[a_RI.dtype], part.rank, part.first, b_OR.shape[0], part.scale,
                    part.block,
                )  # fmt: skip


class NativeLoraRows(ReferenceLoraRows):
    """Rows grouped by adapter; tasks are made once for each layer and kept."""

    def __init__(
        self,
        adapters: Sequence[PackedAdapter],
        adapter_T: Tensor,
        where: torch.device | None = None,
    ) -> None:
        super().__init__(adapters, adapter_T)
        self._numbers = int32(adapter_T, "adapter_T")
        native_ones = [cast(NativeAdapter, adapter) for adapter in adapters]
        self._tables = frozenset().union(*(one.tables for one in native_ones))
        self._blocked = frozenset().union(*(one.blocked for one in native_ones))
        handles = [one.handle for one in native_ones]
        self._batch = native().LoraBatch(handles, self._numbers.data_ptr(), self.num_tokens)

    @property
    def address(self) -> int:
        """What a step program is given."""
        return int(self._batch.address)

    def has(self, site: int) -> bool:
        return bool(self._batch.has(site)) or site in self._tables

    def add_(
        self, site: int, x_TI: Tensor, y_TO: Tensor, block: int = 0, num_threads: int = 0
    ) -> None:
        """See kernels/ops/lora.py. ValueError for matrices of other numbers of rows."""
        if len(x_TI) != self.num_tokens or len(y_TO) != self.num_tokens:
            raise ValueError(f"expected {self.num_tokens} rows, got {len(x_TI)} and {len(y_TO)}")
        # the extension would add the maps of all blocks
        if block or site in self._blocked or not _are_plain(x_TI, y_TO):
            super().add_(site, x_TI, y_TO, block)
            return
        x, ldx = rows_of(x_TI, "x")
        y, ldy = rows_of(y_TO, "y")
        self._batch.add_to(site, x, ldx, x_TI.shape[1], y, ldy, 0, 0, num_threads)

    def add_heads_(self, site: int, x_THI: Tensor, y_THO: Tensor) -> None:
        """See kernels/ops/lora.py."""
        if not _are_plain(x_THI, y_THO):
            super().add_heads_(site, x_THI, y_THO)
            return
        (ldx, x_head, _), (ldy, y_head, _) = x_THI.stride(), y_THO.stride()
        x, y = x_THI.data_ptr(), y_THO.data_ptr()
        self._batch.add_to(site, x, ldx, x_THI.shape[2], y, ldy, x_head, y_head, 0)


def _are_plain(*tensors: Tensor) -> bool:
    return all(one.dtype == torch.float32 and one.stride(-1) == 1 for one in tensors)
