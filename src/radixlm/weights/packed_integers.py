"""Tensors of packed integers -> values, scales and zero points. Legend: O outputs, I inputs, G
groups of inputs, W words of 32 bits.

    gptq                 qweight [I * bits / 32, O]: consecutive inputs in words, the first lowest,
                         of 3, 5, 6 and 7 bits across words; qzeros [G, O * bits / 32]: consecutive
                         outputs; scales [G, O]; g_idx [I]
    awq                  qweight [I, O / 8]: outputs 0 2 4 6 1 3 5 7 of eight in a word, lowest
                         first; qzeros [G, O / 8] likewise; scales [G, O]
    compressed-tensors   weight_packed [O, I * bits / 32]: consecutive inputs, shifted by half their
                         range; weight_scale [O, G]; weight_zero_point [O * bits / 32, G] or int8
                         [O, G]; weight_shape; weight_g_idx [I]. Or weight in int8, [O, I]
    awq, version gemv    qweight [O, I / 8]: consecutive inputs; qzeros [O, G / 8] likewise, and
                         scales [O, G], both padded
"""

import torch
from torch import Tensor

from radixlm.base.record import Record
from radixlm.quant.quantized_weight import QuantizedWeight, kernel_group_size

CHUNK = 1 << 20  # numbers that are dequantized at once
_AWQ_ORDER = ((0, 2), (4, 6), (1, 3), (5, 7))  # outputs of each byte's lower and upper half


class Integers(Record):
    """weight = (value - zero) * scale. ``values_OI`` are uint8 below 1 << ``bits``; scales and zero
    points float32. ``group`` inputs share a scale, of the last group maybe fewer; with
    ``group_of_I`` each input names its own group. ``dtype``: in which the checkpoint's own library
    computes the weight."""

    values_OI: Tensor
    scale_OG: Tensor
    zero_OG: Tensor
    group: int
    bits: int
    group_of_I: Tensor | None = None
    dtype: torch.dtype = torch.float32

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight [O, I] in ``dtype``, computed in pieces."""
        num_out, num_in = self.values_OI.shape
        group_of = self.group_of_I
        if group_of is None:
            group_of = torch.arange(num_in) // self.group
        out = torch.empty(num_out, num_in, dtype=dtype)
        step = max(1, CHUNK // max(num_in, 1))
        for first in range(0, num_out, step):
            rows = slice(first, first + step)
            zero, scale = (
                t[rows].to(self.dtype)[:, group_of] for t in (self.zero_OG, self.scale_OG)
            )
            out[rows] = (self.values_OI[rows] - zero) * scale
        return out

    def to_quantized(self, quantizes_inputs: bool) -> QuantizedWeight | None:
        """The same weight in groups of one size, inputs in the order of their groups; None if the
        kernels have no such group size."""
        values, scale, zero, order = self.values_OI, self.scale_OG, self.zero_OG, None
        num_in, group = values.shape[1], min(self.group, values.shape[1])
        sequential = torch.arange(num_in) // group
        if self.group_of_I is not None and not torch.equal(self.group_of_I, sequential):
            order = self.group_of_I.argsort(stable=True)
            if not torch.equal(self.group_of_I[order], sequential):
                return None
            values = values[:, order]
        group_size = kernel_group_size(group, num_in)
        if not group_size:
            return None
        if num_in % group:
            group_of_small = torch.arange(0, num_in, group_size) // group
            scale, zero = scale[:, group_of_small], zero[:, group_of_small]
        bits = 4 if self.bits <= 4 else 8
        if shift := (1 << (bits - 1)) - (1 << (self.bits - 1)):  # keeps the middle in the middle
            values, zero = values + shift, zero + shift
        values = values.contiguous()
        return QuantizedWeight(values, scale, -zero * scale, bits, quantizes_inputs, order)


def unpack(words_RW: Tensor, bits: int) -> Tensor:
    """int32 [R, W] -> uint8 [R, W * 32 / bits], the lowest bits first."""
    if bits not in (4, 8):
        step = max(1, CHUNK // max(words_RW.shape[1], 1))
        return torch.cat([_unpack_stream(part, bits) for part in torch.split(words_RW, step)])
    bytes_ = _in_rows(words_RW).view(torch.uint8)
    if bits == 8:
        return bytes_
    out = torch.empty(*bytes_.shape, 2, dtype=torch.uint8)
    out[..., 0], out[..., 1] = bytes_ & 15, bytes_ >> 4
    return out.flatten(-2)


def _unpack_stream(words_RW: Tensor, bits: int) -> Tensor:
    """``unpack`` of any number of bits; numbers may lie across two words."""
    first_V = torch.arange(words_RW.shape[1] * 32 // bits) * bits
    word_V, shift_V = first_V // 32, first_V % 32
    padded = torch.nn.functional.pad(words_RW.long() & 0xFFFFFFFF, (0, 1))
    low, high = padded[:, word_V] >> shift_V, padded[:, word_V + 1] << (32 - shift_V)
    return ((low | high) & ((1 << bits) - 1)).to(torch.uint8)


def unpack_padded(words_RW: Tensor, bits: int) -> Tensor:
    """``unpack`` where no number lies across two words: the highest bits may be unused."""
    shifts = torch.arange(32 // bits, dtype=torch.int32) * bits
    return ((words_RW[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)


def unpack_awq(words_RW: Tensor) -> Tensor:
    """int32 [R, W] -> uint8 [8 W, R], outputs in their order."""
    words = _in_rows(words_RW.t())
    bytes_ = words.view(torch.uint8).view(*words.shape, 4).transpose(1, 2).contiguous()
    out = torch.empty(words.shape[0], 8, words.shape[1], dtype=torch.uint8)
    for byte, (low, high) in enumerate(_AWQ_ORDER):
        torch.bitwise_and(bytes_[:, byte], 15, out=out[:, low])
        torch.bitwise_right_shift(bytes_[:, byte], 4, out=out[:, high])
    return out.flatten(0, 1)


def _in_rows(words: Tensor) -> Tensor:
    """Contiguous rows; torch calls a single column contiguous with any stride."""
    if words.is_contiguous() and words.stride(1) == 1:
        return words
    return words.clone(memory_format=torch.contiguous_format)


def find_group_size(num_in: int, num_groups: int, known: tuple[int, ...]) -> int:
    """Inputs that share a scale: all if there is one group, else the known size that gives
    ``num_groups``; 0 if none does."""
    if num_groups == 1:
        return max(num_in, 1)
    return next((g for g in known if -(-num_in // g) == num_groups), 0)
