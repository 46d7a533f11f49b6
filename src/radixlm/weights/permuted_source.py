"""Integers in the order in which a GPU kernel reads them. Legend: O outputs, I inputs, G groups.

    marlin     qweight or B [I / 16, 2 O]: tiles of 16 x 16, permuted; scales or s [G, O], permuted
    gemv_fast  qweight int16 [O / 4, I]: four outputs interleaved; scales [G, O], scaled_zeros or
               qzeros [G, O], both padded: weight = value * scale + scaled zero
    qoq        qweight int8 [O, I / 2]; s1_scales [O]; either s1_szeros [O] (value * s1 - szero), or
               s2_scales and s2_zeros int8 [G, O] ((value * s2 + zero) * s1)

https://github.com/IST-DASLab/marlin, https://github.com/casper-hansen/AutoAWQ (gemv_fast.py),
https://github.com/mit-han-lab/omniserve (w4a8_linear.py).
"""

import torch
from torch import Tensor

from radixlm.quant.integers import IntegerQuant
from radixlm.quant.quantized_weight import QuantizedWeight
from radixlm.weights.packed_integers import unpack
from radixlm.weights.parts_source import PartsSource, find_parts
from radixlm.weights.source import TensorSource

_PARTS = (
    *("qweight", "B", "scales", "s", "scaled_zeros", "qzeros", "workspace"),
    *("s1_scales", "s1_szeros", "s2_scales", "s2_zeros"),
)


class PermutedSource(PartsSource):
    """Brings the integers into the order of their outputs and inputs."""

    def __init__(self, inner: TensorSource, quant: IntegerQuant, dtype: torch.dtype) -> None:
        parts = find_parts(inner, _PARTS)
        super().__init__(
            inner, {n: p for n, p in parts.items() if {"qweight", "B"} & p.keys()}, dtype
        )
        self.quantizes_inputs, self._groups = quant.quantizes_inputs, quant.groups

    def weight(self, name: str) -> QuantizedWeight:
        parts = self._parts[name]
        words = self.part(name, "B" if "B" in parts else "qweight")
        try:
            if words.dtype == torch.int32:
                values = unpack_marlin(words)
                scale = _marlin_scales(self.part(name, "s" if "s" in parts else "scales").float())
                offset = -8 * scale
            elif words.dtype == torch.int16:
                values = unpack_gemv_fast(words)
                zeros = "scaled_zeros" if "scaled_zeros" in parts else "qzeros"
                count = values.shape[1] // self._groups[0] if self._groups else 1
                scale, offset = (
                    self.part(name, p).float().t()[:, :count] for p in ("scales", zeros)
                )
            else:
                values = unpack_qoq(words)
                scale, offset = self._qoq_scales(name)
            values, scale, offset = (t.contiguous() for t in (values, scale, offset))
            return QuantizedWeight(values, scale, offset, 4, self.quantizes_inputs)
        except RuntimeError as error:  # a view of a wrong shape
            raise ValueError(f"{parts.get('B', parts.get('qweight'))}: {error}") from error

    def _qoq_scales(self, name: str) -> tuple[Tensor, Tensor]:
        first_O1 = self.part(name, "s1_scales").float()[:, None]
        if "s2_scales" not in self._parts[name]:
            return first_O1, -self.part(name, "s1_szeros").float()[:, None]
        second, zero = (_qoq_groups(self.part(name, part)) for part in ("s2_scales", "s2_zeros"))
        return second * first_O1, zero * first_O1


def unpack_marlin(words: Tensor) -> Tensor:
    """int32 [I / 16, 2 O] -> uint8 [O, I]."""
    rows, columns = words.shape[0], words.shape[1] // 2
    permuted = unpack(words, 4).view(-1, 1024)
    tiles = torch.empty_like(permuted)
    tiles[:, _marlin_order()] = permuted
    return tiles.view(rows, columns // 16, 16, 16).transpose(1, 2).reshape(-1, columns).t()


def _marlin_order() -> Tensor:
    """Where in four tiles of 16 x 16 each of 1024 permuted numbers belongs."""
    order = []
    for thread in range(32):
        column, row = thread // 4, 2 * (thread % 4)
        for tile in range(4):
            order += [
                256 * tile + 16 * (row + r) + column + 8 * half
                for half in (0, 1)
                for r in (0, 1, 8, 9)
            ]
    return torch.tensor(order).view(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()


def _marlin_scales(scales_GO: Tensor) -> Tensor:
    """[O, G] in the order of outputs."""
    if scales_GO.shape[0] > 1:
        order = [i + 8 * j for i in range(8) for j in range(8)]
    else:
        order = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    permuted = scales_GO.reshape(-1, len(order))
    out = torch.empty_like(permuted)
    out[:, order] = permuted
    return out.view(scales_GO.shape).t()


def unpack_gemv_fast(words: Tensor) -> Tensor:
    """int16 [O / 4, I] -> uint8 [O, I]."""
    num_in = words.shape[1]
    shifts = torch.tensor([0, 4, 8, 12], dtype=torch.int16)
    nibbles = ((words[..., None] >> shifts) & 15).to(torch.uint8)
    rows = nibbles.view(-1, num_in // 64, 4, 64).transpose(1, 2).reshape(-1, num_in // 32, 32)
    pairs = rows.view(-1, num_in // 32, 4, 2, 4).transpose(3, 4)
    return pairs.reshape(-1, num_in // 32, 4, 4, 2).transpose(2, 3).reshape(-1, num_in)


def unpack_qoq(bytes_: Tensor) -> Tensor:
    """int8 [O, I / 2] -> uint8 [O, I]."""
    num_out, half = bytes_.shape
    unsigned = bytes_.contiguous().view(torch.uint8)
    pairs = torch.stack((unsigned & 15, unsigned >> 4), -1)
    tiles = pairs.view(num_out // 32, half // 16, 8, 4, 2, 2, 4, 2)
    return tiles.permute(0, 7, 5, 2, 1, 4, 3, 6).reshape(num_out, 2 * half)


def _qoq_groups(values_GO: Tensor) -> Tensor:
    """float32 [O, G] in the order of outputs."""
    ordered = values_GO.view(-1, values_GO.shape[1] // 32, 8, 4).transpose(2, 3)
    return ordered.reshape(values_GO.shape).t().float()
