"""Registers the kernels of this package for the ops of ``kernels/ops``.

They take float32 activations only; other dtypes, and shapes without a kernel, go to the torch
reference of the op.
"""

from __future__ import annotations

import torch
from torch import Tensor

from radixlm.kernels.cpu import activation, linear, norm, rope
from radixlm.kernels.cpu.lora import NativeAdapter, NativeLoraRows
from radixlm.kernels.dispatch import implements
from radixlm.kernels.ops import activation as reference_activation
from radixlm.kernels.ops import embedding as reference_embedding
from radixlm.kernels.ops import linear as reference_linear
from radixlm.kernels.ops import norm as reference_norm
from radixlm.kernels.ops import rope as reference_rope
from radixlm.kernels.ops.quantized import QuantScales

NAME = "native"


def _is_plain(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.is_contiguous() and x.numel() > 0


def _rows(x: Tensor) -> Tensor:
    return x.view(-1, x.shape[-1])


@implements("rms_norm", name=NAME, device="cpu")
def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See kernels/ops/norm.py."""
    if not _is_plain(x_TD) or weight_D.dtype != torch.float32:
        return reference_norm.rms_norm(x_TD, weight_D, eps)
    return norm.rms_norm(_rows(x_TD), weight_D, eps).view(x_TD.shape)


@implements("add_rms_norm", name=NAME, device="cpu")
def add_rms_norm(x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See kernels/ops/norm.py."""
    if not (_is_plain(x_TD) and _is_plain(delta_TD)) or weight_D.dtype != torch.float32:
        return reference_norm.add_rms_norm(x_TD, delta_TD, weight_D, eps)
    return norm.add_rms_norm(_rows(delta_TD), _rows(x_TD), weight_D, eps)[0].view(x_TD.shape)


@implements("layer_norm", name=NAME, device="cpu")
def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
    """See kernels/ops/norm.py."""
    if not _is_plain(x_TD) or weight_D.dtype != torch.float32:
        return reference_norm.layer_norm(x_TD, weight_D, bias_D, eps)
    bias = None if bias_D is None else bias_D.float()
    return norm.layer_norm(_rows(x_TD), weight_D, bias, eps).view(x_TD.shape)


@implements("add_layer_norm", name=NAME, device="cpu")
def add_layer_norm(
    x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float
) -> Tensor:
    """See kernels/ops/norm.py."""
    if not (_is_plain(x_TD) and _is_plain(delta_TD)) or weight_D.dtype != torch.float32:
        return reference_norm.add_layer_norm(x_TD, delta_TD, weight_D, bias_D, eps)
    bias = None if bias_D is None else bias_D.float()
    normed = norm.add_layer_norm(_rows(delta_TD), _rows(x_TD), weight_D, bias, eps)[0]
    return normed.view(x_TD.shape)


def _is_row_view(x: Tensor, is_dense: bool) -> bool:
    dense = x.shape[1] == 1 or x.stride(1) == x.shape[2]
    return (
        x.dtype == torch.float32 and x.numel() > 0 and x.stride(2) == 1 and (dense or not is_dense)
    )


@implements("prepare_qk", name=NAME, device="cpu")
def prepare_qk(
    q_THD: Tensor,
    k_TKD: Tensor,
    norm: reference_rope.QkNorm | None,
    cos_sin_T2R: Tensor | None,
    interleaved: bool,
) -> None:
    """See kernels/ops/rope.py."""
    is_row = norm is not None and norm.kind == "row"
    if not (_is_row_view(q_THD, is_row) and _is_row_view(k_TKD, True)):
        reference_rope.prepare_qk(q_THD, k_TKD, norm, cos_sin_T2R, interleaved)
        return
    rope.prepare(q_THD, k_TKD, norm, cos_sin_T2R, None, interleaved)


@implements("activate", name=NAME, device="cpu")
def activate(x_TI: Tensor, act: str) -> Tensor:
    """See kernels/ops/activation.py."""
    if not _is_plain(x_TI) or act not in linear.ACT_CODE:
        return reference_activation.activate(x_TI, act)
    return activation.activate(_rows(x_TI), act).view(x_TI.shape)


@implements("activate_gated", name=NAME, device="cpu")
def activate_gated(x_T2I: Tensor, act: str, limit: float = 0.0, cuts_after: bool = False) -> Tensor:
    """See kernels/ops/activation.py."""
    cut = (limit, cuts_after)
    if not _is_plain(x_T2I) or act not in linear.GATED_CODE:
        return reference_activation.activate_gated(x_T2I, act, *cut)
    return activation.act_mul(_rows(x_T2I), f"{act}_mul", cut).view(*x_T2I.shape[:-1], -1)


@implements("embedding", name=NAME, device="cpu")
def embedding(ids_T: Tensor, table_VD: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """See kernels/ops/embedding.py. The scale is rounded to ``dtype`` there, so float32 only."""
    known = table_VD.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if dtype != torch.float32 or not known or not table_VD.is_contiguous() or ids_T.ndim != 1:
        return reference_embedding.embedding(ids_T, table_VD, scale, dtype)
    return activation.embedding(ids_T, table_VD, scale)


class NativeLinear:
    """``PackedLinear`` of the op: any leading dimensions, activations in float32 inside."""

    def __init__(self, packed: linear.PackedLinear, dtype: torch.dtype) -> None:
        self.packed, self._dtype = packed, dtype
        self.out_features = packed.out_features

    def run(self, x_TI: Tensor) -> Tensor:
        """[T, O] in the dtype of x."""
        x = x_TI.to(torch.float32)
        if x.ndim != 2 or (x.shape[1] > 1 and x.stride(1) != 1):
            x = x.reshape(-1, x.shape[-1])
        y = self.packed.run(x).to(x_TI.dtype)
        return y if x_TI.ndim == 2 else y.view(*x_TI.shape[:-1], self.out_features)

    def part(self, begin: int, end: int) -> NativeLinear:
        """The outputs ``begin`` to ``end``, of the same memory."""
        return NativeLinear(self.packed.part(begin, end), self._dtype)

    def unpack(self) -> Tensor:
        """The weight [O, I] in its original dtype."""
        return self.packed.unpack(self._dtype)


@implements("pack_linear", name=NAME, device="cpu")
def pack_linear(
    weight_OI: Tensor, bias_O: Tensor | None, fmt: str, scales: QuantScales | None = None
) -> reference_linear.PackedLinear:
    """See kernels/ops/linear.py; formats of kernels/cpu/linear.py."""
    if scales is not None:
        return NativeLinear(linear.pack_quantized(weight_OI, scales, bias_O, fmt), torch.bfloat16)
    if not linear.can_pack(weight_OI, fmt):
        return reference_linear.pack_linear(weight_OI, bias_O, fmt)
    return NativeLinear(linear.pack(weight_OI.detach(), bias_O, fmt), weight_OI.dtype)


# not by decorators: kernels/cpu/lora.py is also imported where the extension is missing
implements("pack_adapter", name=NAME, device="cpu")(NativeAdapter)
implements("lora_rows", name=NAME, device="cpu")(NativeLoraRows)
