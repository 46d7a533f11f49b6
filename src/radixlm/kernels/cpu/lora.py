"""Low-rank adapters, as in ``kernels/ops/lora.py`` (whose legend holds): float32 rows, adapters of
any float type that are read once for all of their rows. A row has the same bits in any batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from radixlm.kernels.cpu.checks import int32, rows_of, vector
from radixlm.kernels.cpu.extension import DTYPE_CODE, address, native
from radixlm.kernels.dispatch import implements
from radixlm.kernels.ops import lora as reference
from radixlm.kernels.ops.lora import AdapterRows

NAME = "native"
_WEIGHTS = (torch.float32, torch.bfloat16, torch.float16)


def _takes(x: Tensor, weight: Tensor) -> bool:
    fits = x.dtype == torch.float32 and x.stride(-1) == 1 and weight.dtype in _WEIGHTS
    return fits and weight.is_contiguous() and x.numel() > 0 and weight.numel() > 0


class _Step:
    """The sequences of a step as the extension reads them; it checks their numbers itself."""

    def __init__(self, rows: AdapterRows, num_tokens: int, num_adapters: int) -> None:
        self._adapter = int32(rows.adapter_S, "adapter_S")
        self._starts = int32(rows.query_start_S1, "query_start_S1")
        self._ranks = None if rows.rank_L is None else int32(rows.rank_L, "rank_L")
        num_sequences = self._adapter.numel()
        if self._starts.numel() != num_sequences + 1:
            raise ValueError(f"query_start_S1: expected {num_sequences + 1} numbers")
        if self._ranks is not None and self._ranks.numel() != num_adapters:
            raise ValueError(f"rank_L: expected {num_adapters} numbers")
        self.packed = (
            self._adapter.data_ptr(), self._starts.data_ptr(), num_sequences, num_tokens,
            num_adapters, address(self._ranks),
        )  # fmt: skip


@implements("lora_shrink", name=NAME, device="cpu")
def lora_shrink(x_TI: Tensor, a_LNRI: Tensor, rows: AdapterRows, num_threads: int = 0) -> Tensor:
    """See kernels/ops/lora.py. ValueError for an adapter or a token that is not there."""
    num_adapters, parts, rank, num_in = a_LNRI.shape
    if x_TI.shape[1] != num_in:
        raise ValueError(f"x: expected {num_in} channels, got {tuple(x_TI.shape)}")
    if not _takes(x_TI, a_LNRI):
        return reference.lora_shrink(x_TI, a_LNRI, rows)
    h_TNR = torch.zeros(x_TI.shape[0], parts, rank)
    step = _Step(rows, x_TI.shape[0], num_adapters)
    x, ldx = rows_of(x_TI, "x")
    native().lora_shrink(
        step.packed, x, ldx, a_LNRI.data_ptr(), DTYPE_CODE[a_LNRI.dtype], (parts, rank, num_in),
        h_TNR.data_ptr(), num_threads,
    )  # fmt: skip
    return h_TNR


@implements("lora_expand_", name=NAME, device="cpu")
def lora_expand_(
    y_TO: Tensor, h_TNR: Tensor, b_LOR: Tensor, scale_L: Tensor, widths_N: Sequence[int],
    rows: AdapterRows, num_threads: int = 0,
) -> None:  # fmt: skip
    """See kernels/ops/lora.py. ValueError as above, and for shapes that do not fit together."""
    num_adapters, num_out, rank = b_LOR.shape
    tokens, widths = y_TO.shape[0], list(widths_N)
    if sum(widths) != num_out or any(w < 0 for w in widths) or y_TO.shape[1] != num_out:
        raise ValueError(f"y {tuple(y_TO.shape)}, b {tuple(b_LOR.shape)} and {widths} do not fit")
    if h_TNR.shape != (tokens, len(widths), rank):
        raise ValueError(f"h: expected {(tokens, len(widths), rank)}, got {tuple(h_TNR.shape)}")
    if not _takes(y_TO, b_LOR) or h_TNR.dtype != torch.float32:
        reference.lora_expand_(y_TO, h_TNR, b_LOR, scale_L, widths_N, rows)
        return
    step, h_TNR = _Step(rows, tokens, num_adapters), h_TNR.contiguous()
    scale = vector(scale_L, num_adapters, "scale_L")
    y, ldy = rows_of(y_TO, "y")
    native().lora_expand(
        step.packed, y, ldy, h_TNR.data_ptr(), b_LOR.data_ptr(), DTYPE_CODE[b_LOR.dtype],
        (num_out, rank), widths, address(scale), num_threads,
    )  # fmt: skip
