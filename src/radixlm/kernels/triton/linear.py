"""Linear maps on a GPU, and registers the ops of this package that pack weights.

    16 bit floats       cuBLAS
    int8wo, int4-, w4a8- Triton for few rows; dequantized once and cuBLAS for many
    w8a8                Triton up to 16 rows; torch's product of integers for more
    fp8                 Triton up to 16 rows, gated up to 64; torch's scaled product for more
    fp8-128             Triton below 256 rows; torch's, where it is right on this GPU, above

Legend: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from radixlm.kernels.ops import fp8 as reference_fp8
from radixlm.kernels.ops import linear as reference
from radixlm.kernels.ops.quantized import FORMATS, QuantScales
from radixlm.kernels.triton import activation, embedding, moe, moe_route
from radixlm.kernels.triton import gemm_tile as kinds
from radixlm.kernels.triton.gemm import INVARIANT_ROWS, QUANTIZED_X, Packed, fits, product
from radixlm.kernels.triton.gemm_fp8 import quantize_groups, quantize_rows
from radixlm.kernels.triton.gemm_int import dequantize, scaled
from radixlm.kernels.triton.gemm_pack import dequantize as unpack_weights
from radixlm.kernels.triton.gemm_pack import owned, pack
from radixlm.kernels.triton.mode import FLOATS, runs_on
from radixlm.kernels.triton.ops import register_triton

log = logging.getLogger(__name__)

FEW_ROWS = 64  # up to here weights are dequantized inside the product
INTEGER_ROWS = 16  # torch's product of integers takes more
FP8_ROWS = 16  # torch's product by rows is the faster one from here, unless the weights are gated
BLOCKWISE_ROWS = 256  # torch's blockwise product is the faster one from here
_HOPPER = (9, 0)


class PlainLinear(reference.ReferenceLinear):
    """Weights in their own dtype; the bias is in it too, so that a call is one kernel."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        weight_OI = owned(weight_OI)
        bias_O = None if bias_O is None else bias_O.to(weight_OI.dtype)
        super().__init__(weight_OI, bias_O)
        self._packed: Packed | None = None

    def keep_batch_invariant(self) -> None:
        """From now on compute every row by one kernel with one tile."""
        bias = None if self.bias_O is None else self.bias_O.float()[None]
        num_out, num_in = self.weight_OI.shape
        self._packed = Packed(kinds.PLAIN, self.weight_OI[None], None, bias, num_out, num_in)

    def run(self, x_TI: Tensor) -> Tensor:
        """See PackedLinear."""
        if self._packed is not None:
            y = _run_invariant(self._packed, _flat(x_TI))
            return y.view(*x_TI.shape[:-1], self.out_features)
        return super().run(x_TI)


class TritonGated(reference.Gated):
    """A linear map and the kernel of its activation."""

    def run(self, x_TI: Tensor) -> Tensor:
        """See PackedLinear."""
        return activation.activate_gated(self.inner.run(x_TI), self._act)

    def run_changed(self, x_TI: Tensor, change: Callable[[Tensor], None]) -> Tensor:
        h_T2O = self.inner.run(x_TI)
        change(h_T2O)
        return activation.activate_gated(h_T2O, self._act)


class QuantizedLinear:
    """Packed weights of any format; ``run`` chooses a product by the number of rows."""

    def __init__(self, packed: Packed, dtype: torch.dtype, fmt: str) -> None:
        self.packed, self._dtype, self.fmt = packed, dtype, fmt
        self.out_features = packed.width
        self._bias = None if packed.bias is None else packed.bias[0]
        self._product = _RUN_BY_KIND.get(packed.kind, _run_dequantized)
        if packed.kind == kinds.FP8_BLOCK:
            has_blockwise(
                packed.data.device
            )  # synchronizes, which is not possible while a graph is captured

    def keep_batch_invariant(self) -> None:
        """From now on compute every row by one kernel with one tile."""
        self._product = _run_invariant_of

    def run(self, x_TI: Tensor) -> Tensor:
        """[T, O] in the dtype of x."""
        y = self._product(self, _flat(x_TI))
        return y if x_TI.ndim == 2 else y.view(*x_TI.shape[:-1], self.out_features)

    def rows(self, ids_T: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        """Rows ``ids`` of an 8 bit weight times ``scale``: a quantized token table."""
        assert self.packed.scale is not None
        values = self.packed.data[0][ids_T].float()
        return (values * (self.packed.scale[0][ids_T] * scale)[:, None]).to(dtype)

    def unpack(self) -> Tensor:
        """The weight [O, I] in the dtype that it was given in."""
        return unpack_weights(self.packed)[0].to(self._dtype)

    def finished(self, y_TO: Tensor) -> Tensor:
        """The result of a product, gated if the weights are."""
        return activation.gated_pairs(y_TO, self.packed.act) if self.packed.act else y_TO

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """The bias of torch's products."""
        return None if self._bias is None else self._bias.to(dtype)


def _flat(x: Tensor) -> Tensor:
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _run_invariant(packed: Packed, x: Tensor) -> Tensor:
    values, scale = moe.quantized(x, packed)
    return product(values, packed, scale, x.dtype, INVARIANT_ROWS)


def _run_invariant_of(linear: QuantizedLinear, x: Tensor) -> Tensor:
    return _run_invariant(linear.packed, x)


def _run_dequantized(linear: QuantizedLinear, x: Tensor) -> Tensor:
    """Dequantize the weights: inside the product, or for many rows once before it."""
    if x.shape[0] <= FEW_ROWS and fits(linear.fmt, x.dtype):
        return product(x, linear.packed, None, x.dtype)
    weight = dequantize(linear.packed, x.dtype)
    return linear.finished(F.linear(x, weight, linear.bias(x.dtype)))


def _run_w8a8(linear: QuantizedLinear, x: Tensor) -> Tensor:
    packed = linear.packed
    values, scale = quantize_rows(x, torch.int8)
    is_aligned = packed.num_in % 8 == 0 and packed.num_out % 8 == 0
    if x.shape[0] <= INTEGER_ROWS or not is_aligned:
        return product(values, packed, scale, x.dtype)
    sums = torch._int_mm(values, packed.data[0].t())
    return linear.finished(scaled(sums, scale, packed, x.dtype))


def _run_fp8(linear: QuantizedLinear, x: Tensor) -> Tensor:
    packed = linear.packed
    values, scale = quantize_rows(x)
    is_aligned = packed.num_in % 16 == 0 and packed.num_out % 16 == 0
    few_rows = FEW_ROWS if packed.act else FP8_ROWS
    # torch's product by rows writes bfloat16 only
    if x.shape[0] <= few_rows or x.dtype != torch.bfloat16 or not (is_aligned and x.is_cuda):
        return product(values, packed, scale, x.dtype)
    return linear.finished(by_rows(values, scale, packed, linear.bias(x.dtype)))


def by_rows(values: Tensor, scale: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """torch's product of e4m3 with a scale a row of each side, in bfloat16."""
    assert packed.scale is not None
    return torch._scaled_mm(
        values, packed.data[0].t(), scale[:, None], packed.scale, bias,
        out_dtype=torch.bfloat16, use_fast_accum=False,
    )  # fmt: skip


def _run_fp8_blocks(linear: QuantizedLinear, x: Tensor) -> Tensor:
    packed = linear.packed
    values, scale = quantize_groups(x)
    if (
        x.shape[0] >= BLOCKWISE_ROWS
        and not packed.act
        and x.dtype == torch.bfloat16
        and packed.num_in % kinds.FP8_GROUP == packed.num_out % kinds.FP8_GROUP == 0
        and has_blockwise(x.device)
    ):
        assert packed.scale is not None
        y = blockwise(values, scale, packed.data[0], packed.scale[0])
        bias = linear.bias(y.dtype)
        return y if bias is None else y.add_(bias)
    return product(values, packed, scale, x.dtype)


_RUN_BY_KIND = {
    kinds.W8A8: _run_w8a8,
    kinds.FP8: _run_fp8,
    kinds.FP8_BLOCK: _run_fp8_blocks,
}


def blockwise(values: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """torch's product of e4m3 with scales by 1 x 128 and 128 x 128, in bfloat16. Its scales of
    activations lie column by column."""
    return F.scaled_mm(
        values, weight.t(),
        scale.t().contiguous().t(), F.ScalingType.BlockWise1x128,
        weight_scale.t(), F.ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )  # fmt: skip


@functools.cache
def has_blockwise(device: torch.device) -> bool:
    """Whether torch has a correct blockwise product on this GPU; tested once."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != _HOPPER:
        return False
    x = torch.randn(256, 512, device=device)
    weight = torch.randn(384, 512, device=device) * torch.arange(1, 385, device=device)[:, None]
    values, scale = quantize_groups(x)
    weight_values, weight_scale = reference_fp8.quantize_blocks(weight)
    want = (
        reference_fp8.fake_quantize_x(x, kinds.FP8_GROUP)
        @ (weight_values.float() * reference_fp8.spread(weight_scale, 384, 512)).t()
    )
    try:
        got = blockwise(values, scale, weight_values, weight_scale)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        log.info("no blockwise fp8 product in torch here: %s", str(error).partition("\n")[0])
        return False
    is_right = bool((got.float() - want).norm() < 1e-2 * want.norm())
    if not is_right:
        log.warning(
            "torch's blockwise fp8 product is wrong on this GPU; the Triton kernel runs instead"
        )
    return is_right


class PlainTied(PlainLinear):
    """One matrix as token table and output head."""

    def rows(self, ids_T: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        """See kernels/ops/embedding.py."""
        return embedding.embedding(ids_T, self.weight_OI, scale, dtype)


def _takes(weight: Tensor, fmt: str) -> bool:
    known = fmt in FORMATS or fmt in reference_fp8.FORMATS
    is_fit = fits(fmt, weight.dtype) or fmt not in QUANTIZED_X
    return bool(fmt) and known and is_fit and runs_on(weight) and weight.dtype in FLOATS


def _stored(
    values_OI: Tensor, bias_O: Tensor | None, fmt: str, scales: QuantScales, act: str = ""
) -> QuantizedLinear:
    """Integers of a checkpoint."""
    scale, offset = scales
    bias = None if bias_O is None else bias_O[None]
    each = (scale[None], None if offset is None else offset[None])
    packed = pack(values_OI[None], bias, fmt, act, each)
    return QuantizedLinear(packed, torch.bfloat16, fmt)


def pack_linear(
    weight_OI: Tensor, bias_O: Tensor | None, fmt: str, scales: QuantScales | None = None
) -> reference.PackedLinear:
    """See kernels/ops/linear.py."""
    if scales is not None:
        if not runs_on(weight_OI):
            return reference.pack_linear(weight_OI, bias_O, fmt, scales)
        return _stored(weight_OI, bias_O, fmt, scales)
    if not fmt:
        return PlainLinear(weight_OI, bias_O)
    if not _takes(weight_OI, fmt):
        return reference.pack_linear(weight_OI, bias_O, fmt)
    bias = None if bias_O is None else bias_O[None]
    return QuantizedLinear(pack(weight_OI[None], bias, fmt), weight_OI.dtype, fmt)


def pack_gated(
    weight_OI: Tensor, bias_O: Tensor | None, fmt: str, act: str, scales: QuantScales | None = None
) -> reference.PackedLinear:
    """See kernels/ops/linear.py."""
    if scales is not None:
        if not (runs_on(weight_OI) and act in activation.CODES):
            return TritonGated(pack_linear(weight_OI, bias_O, fmt, scales), act)
        return _stored(weight_OI, bias_O, fmt, scales, act)
    # Interleaved blocks would shut out torch's blockwise product, which prompts need.
    if not _takes(weight_OI, fmt) or act not in activation.CODES or fmt == reference_fp8.FORMATS[1]:
        return TritonGated(pack_linear(weight_OI, bias_O, fmt), act)
    bias = None if bias_O is None else bias_O[None]
    return QuantizedLinear(pack(weight_OI[None], bias, fmt, act), weight_OI.dtype, fmt)


def pack_tied(table_VD: Tensor, fmt: str = "") -> reference.TiedTable:
    """See kernels/ops/linear.py."""
    if not fmt:
        return PlainTied(table_VD, None)
    if fmt not in ("int8wo", "w8a8") or not _takes(table_VD, fmt):
        return reference.pack_tied(table_VD, fmt)
    return QuantizedLinear(pack(table_VD[None], None, fmt), table_VD.dtype, fmt)


for _op, _function in {
    "pack_linear": pack_linear,
    "pack_gated": pack_gated,
    "pack_tied": pack_tied,
    "route": moe_route.route,
    "pack_experts": moe.pack_experts,
}.items():
    register_triton(_op, _function)
