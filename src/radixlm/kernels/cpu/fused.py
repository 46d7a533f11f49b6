"""Registers ops that combine C++ kernels: gated projections, a tied table, linear maps by head,
experts. Single kernels are registered by ``kernels/cpu/ops.py``.

They take float32 only; other dtypes, and shapes without a kernel, go to the torch reference.
Legend: T tokens, H heads, K KV heads or chosen experts, D channels, I inner channels.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from radixlm.arch.spec import Moe
from radixlm.kernels.cpu import activation as cpu_activation
from radixlm.kernels.cpu import linear as cpu_linear
from radixlm.kernels.cpu import moe as cpu_moe
from radixlm.kernels.cpu import rope as cpu_rope
from radixlm.kernels.cpu.heads import HeadLinear
from radixlm.kernels.cpu.ops import NativeLinear, pack_linear
from radixlm.kernels.dispatch import implements
from radixlm.kernels.ops import activation as reference_activation
from radixlm.kernels.ops import linear as reference_linear
from radixlm.kernels.ops import moe as reference_moe
from radixlm.kernels.ops import rope as reference_rope
from radixlm.kernels.ops.activation import NO_LIMIT, GateLimit
from radixlm.kernels.ops.quantized import QuantScales, expert_scales

NAME = "native"


class _Arange:
    """int32 0, 1, 2 ..., reused between calls."""

    numbers = torch.arange(4096, dtype=torch.int32)

    @classmethod
    def upto(cls, count: int) -> Tensor:
        if cls.numbers.shape[0] < count:
            cls.numbers = torch.arange(2 * count, dtype=torch.int32)
        return cls.numbers


@implements("rope", name=NAME, device="cpu")
def rope(x_THD: Tensor, cos_sin_T2R: Tensor, interleaved: bool) -> None:
    """See kernels/ops/rope.py."""
    if x_THD.dtype != torch.float32 or x_THD.stride(2) != 1:
        reference_rope.rope(x_THD, cos_sin_T2R, interleaved)
    else:
        cpu_rope.apply(x_THD, None, cos_sin_T2R, None, interleaved)


@implements("sigmoid", name=NAME, device="cpu")
def sigmoid(x: Tensor) -> Tensor:
    """See kernels/ops/activation.py."""
    if x.dtype != torch.float32:
        return reference_activation.sigmoid(x)
    rows = x.contiguous().view(-1, x.shape[-1])
    y = cpu_activation.activate(rows, "silu").div_(rows)  # x * sigmoid(x) / x
    return torch.where(rows == 0, 0.5, y).view(x.shape)


@implements("softcap", name=NAME, device="cpu")
def softcap(x: Tensor, cap: float) -> Tensor:
    """See kernels/ops/activation.py."""
    if x.dtype != torch.float32:
        return reference_activation.softcap(x, cap)
    rows = (x / cap).contiguous().view(-1, x.shape[-1])
    return cpu_activation.activate(rows, "tanh").mul_(cap).view(x.shape)


@implements("route", name=NAME, device="cpu")
def route(logits_TE: Tensor, correction_E: Tensor | None, spec: Moe) -> tuple[Tensor, Tensor]:
    """See kernels/ops/moe.py."""
    return reference_moe.route(logits_TE, correction_E, spec, sigmoid)


class FusedGated:
    """``act(gate) * up`` inside the kernel of the joined projection."""

    def __init__(self, packed: cpu_linear.PackedLinear, dtype: torch.dtype, act: str) -> None:
        """``dtype``: that of ``unpack``."""
        self.packed, self._dtype = packed, dtype
        self.out_features = packed.out_features
        self._run = self.packed.handle.run
        self._act_name, self._act = act, cpu_linear.act_code(f"{act}_mul", True)

    def run(self, x_TI: Tensor) -> Tensor:
        """[T, O / 2], float32."""
        if x_TI.stride(1) != 1 and x_TI.shape[1] > 1:
            x_TI = x_TI.contiguous()
        rows, width = x_TI.shape[0], self.out_features
        out = torch.empty(rows, width)
        self._run(
            x_TI.data_ptr(), x_TI.stride(0), rows, out.data_ptr(), width, 0, 0, 1.0, self._act, 0, 0
        )
        return out

    def run_changed(self, x_TI: Tensor, change: Callable[[Tensor], None]) -> Tensor:
        x_TI, (rows, width) = x_TI.contiguous(), (x_TI.shape[0], 2 * self.out_features)
        h = torch.empty(rows, width)
        self._run(
            x_TI.data_ptr(), x_TI.stride(0), rows, h.data_ptr(), width, 0, 0, 1.0,
            cpu_linear.APART, 0, 0,
        )  # fmt: skip
        change(h)
        return cpu_activation.act_mul(h, f"{self._act_name}_mul")

    def unpack(self) -> Tensor:
        """[gate; up] again."""
        return unpack_paired(self.packed).to(self._dtype)


def unpack_paired(packed: cpu_linear.PackedLinear) -> Tensor:
    """Rows of a paired weight in their original order, float32 [N, K]."""
    plain = packed.native_handle(packed.padded, False, None)
    lanes = torch.empty(packed.padded, packed.num_in)
    plain.embed(
        _Arange.upto(packed.padded).data_ptr(),
        packed.padded,
        lanes.data_ptr(),
        packed.num_in,
        1.0,
    )
    owner = packed.lanes(torch.arange(1, packed.num_out + 1))
    return lanes[torch.argsort(owner)[-packed.num_out :]]


@implements("pack_gated", name=NAME, device="cpu")
def pack_gated(
    weight_OI: Tensor, bias_O: Tensor | None, fmt: str, act: str, scales: QuantScales | None = None
) -> reference_linear.PackedLinear:
    """See kernels/ops/linear.py."""
    if not cpu_linear.can_pack(weight_OI, fmt) or act not in cpu_linear.GATED_CODE:
        return reference_linear.Gated(pack_linear(weight_OI, bias_O, fmt, scales), act)
    if scales is not None:
        packed = cpu_linear.pack_quantized(weight_OI, scales, bias_O, fmt, is_paired=True)
        return FusedGated(packed, torch.bfloat16, act)
    packed = cpu_linear.pack(weight_OI, bias_O, fmt, is_paired=True)
    return FusedGated(packed, weight_OI.dtype, act)


class NativeTied(NativeLinear):
    """The packed head; its rows are looked up in the packed panels."""

    def rows(self, ids_T: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        """See kernels/ops/embedding.py."""
        return self.packed.embed(ids_T.int().contiguous(), scale).to(dtype)


@implements("pack_tied", name=NAME, device="cpu")
def pack_tied(table_VD: Tensor, fmt: str = "") -> reference_linear.TiedTable:
    """See kernels/ops/linear.py."""
    if table_VD.dtype not in cpu_linear.NATIVE_FORMAT:
        return reference_linear.pack_tied(table_VD, fmt)
    return NativeTied(cpu_linear.pack(table_VD, None, fmt), table_VD.dtype)


@implements("pack_head_linear", name=NAME, device="cpu")
def pack_head_linear(weight_HOI: Tensor) -> reference_linear.HeadLinear:
    """See kernels/ops/linear.py."""
    if weight_HOI.dtype not in cpu_linear.NATIVE_FORMAT:
        return reference_linear.pack_head_linear(weight_HOI)
    return HeadLinear([cpu_linear.pack(weight, None) for weight in weight_HOI])


@implements("pack_experts", name=NAME, device="cpu")
def pack_experts(
    up_E2ID: Tensor,
    down_EDI: Tensor,
    up_bias_E2I: Tensor | None,
    down_bias_ED: Tensor | None,
    act: str,
    fmts: tuple[str, str] = ("", ""),
    scales: reference_moe.ExpertScales = (None, None),
    limit: GateLimit = NO_LIMIT,
    is_gated: bool = True,
) -> reference_moe.PackedExperts:
    """See kernels/ops/moe.py. ``is_gated`` False: up [E, I, D] alone."""
    can_pack = all(
        stored is not None or weight.dtype in cpu_linear.NATIVE_FORMAT
        for weight, stored in zip((up_E2ID, down_EDI), scales, strict=True)
    )
    codes = cpu_linear.GATED_CODE if is_gated else cpu_linear.ACT_CODE
    if not can_pack or act not in codes:
        weights = up_E2ID, down_EDI, up_bias_E2I, down_bias_ED
        if not is_gated:
            return reference_moe.UngatedExperts(*weights, act)
        return reference_moe.pack_experts(*weights, act, fmts, scales, limit)
    ups = _pack_each(up_E2ID, up_bias_E2I, fmts[0], scales[0], is_gated)
    downs = _pack_each(down_EDI, down_bias_ED, fmts[1], scales[1], False)
    return cpu_moe.Experts(ups, downs, act, is_gated, limit)


def _pack_each(
    weight_EOI: Tensor,
    bias_EO: Tensor | None,
    fmt: str,
    scales: QuantScales | None,
    is_paired: bool,
) -> list[cpu_linear.PackedLinear]:
    packed = []
    for expert, weight_OI in enumerate(weight_EOI):
        bias_O = None if bias_EO is None else bias_EO[expert]
        stored = expert_scales(scales, expert)
        if stored is not None:
            packed.append(cpu_linear.pack_quantized(weight_OI, stored, bias_O, fmt, is_paired))
        else:
            packed.append(cpu_linear.pack(weight_OI.contiguous(), bias_O, fmt, is_paired))
    return packed
