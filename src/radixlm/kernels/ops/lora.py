"""LoRA adapters (arXiv:2106.09685) in a step whose sequences may use different ones: ``y += scale *
B (A x)``. A merged projection (q, k, v or gate, up) has a part of A and of B for each of its
outputs.

Legend: T packed tokens, S sequences, L adapters loaded, I input channels, O output channels,
N merged outputs, R rank (the largest; smaller ones are padded with zeros).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from radixlm.base.record import Record


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
