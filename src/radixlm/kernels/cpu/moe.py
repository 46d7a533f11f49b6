"""Experts of a layer. Legend: T tokens, E experts, K chosen ones, D channels."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from radixlm.kernels.cpu.checks import expect, rows_of
from radixlm.kernels.cpu.extension import native
from radixlm.kernels.cpu.linear import PackedLinear, act_code
from radixlm.kernels.cpu.lora import NativeLoraRows
from radixlm.kernels.ops.activation import NO_LIMIT, GateLimit
from radixlm.kernels.ops.moe import ExpertAdapters


class Experts:
    """``down(act(gate) * up)`` of every expert, or ``down(act(up))``; gated ``ups`` are paired
    weights. Rows are grouped by expert without padding; a token sums its experts in the order of
    the choice."""

    takes_adapters = True

    def __init__(
        self,
        ups: Sequence[PackedLinear],
        downs: Sequence[PackedLinear],
        act: str,
        is_gated: bool = True,
        limit: GateLimit = NO_LIMIT,
    ) -> None:
        if not all(up.is_paired == is_gated for up in ups):
            raise ValueError("gated experts, and no others, need paired gate and up weights")
        self._weights = (tuple(ups), tuple(downs))  # the extension knows addresses only
        self.num_experts, self.num_in, self.dim = len(ups), ups[0].num_in, downs[0].num_out
        code = act_code(f"{act}_mul" if is_gated else act, is_gated)
        ext = native()
        self.handle = ext.Experts(
            [up.handle for up in ups], [down.handle for down in downs], code, ext.GateLimit(*limit)
        )

    def run(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        ids_TK: Tensor,
        lora: ExpertAdapters | None = None,
        num_threads: int = 0,
        part: Any = None,
    ) -> Tensor:
        """Sum over the chosen experts of weight * expert(x): float32 [T, D], from any float x. Ids
        must be within the experts: they are not checked. ``part``: an ExpertPart, where these are
        a part of the experts."""
        rows = None if lora is None else cast(NativeLoraRows, lora.rows).address
        x_TD = x_TD.float().contiguous()
        x, ldx = rows_of(x_TD, "x", (len(ids_TK), self.num_in))
        out = torch.empty(x_TD.shape) if part else torch.empty(x_TD.shape[0], self.dim)
        ids = ids_TK.to(torch.int32).contiguous()
        weights = weights_TK.to(torch.float32).contiguous()
        expect(weights, torch.float32, ids.shape, "weights")
        self.handle.run(
            x, ldx, x_TD.shape[0], ids.data_ptr(), weights.data_ptr(), ids.shape[1],
            out.data_ptr(), out.shape[1], num_threads, rows or 0, -1 if lora is None else lora.site,
            part,
        )  # fmt: skip
        return out

    def form(self, slot: int) -> str:
        """The formats and sizes of one expert."""
        return str([(one[slot].fmt, one[slot].format_code, *(t.shape for t in one[slot].tensors()))
                    for one in self._weights])  # fmt: skip

    def slot_tensors(self, slot: int) -> list[Tensor]:
        """The memory of one expert."""
        return [tensor for one in self._weights for tensor in one[slot].tensors()]

    def combine(
        self, out_ND: Tensor, place_TK: Tensor, weights_TK: Tensor, num_threads: int = 0
    ) -> Tensor:
        """The weighted sum of the outcomes at each token's places, in the order of the choice:
        float32 [T, D], with the bits of ``run``."""
        out_ND = out_ND.float().contiguous()
        place, weights = place_TK.int().contiguous(), weights_TK.float().contiguous()
        y = torch.empty(len(place), self.dim)
        self.handle.combine(
            out_ND.data_ptr(), place.data_ptr(), weights.data_ptr(), *place.shape, y.data_ptr(),
            num_threads,
        )  # fmt: skip
        return y
