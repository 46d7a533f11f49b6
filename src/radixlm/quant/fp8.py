"""Checkpoints in 8 bit floats (e4m3) with a scale for each tensor, row or block: fp8, fbgemm_fp8,
modelopt (``quant/fp4.py``), and compressed-tensors of type float."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from radixlm.arch.quant_methods import FP8_FLAGS
from radixlm.kernels.dispatch import Kernels
from radixlm.kernels.ops.fp8 import BLOCK, FORMATS, fake_quantize_weight
from radixlm.kernels.ops.linear import PackedLinear
from radixlm.quant.checkpoint import StoredQuant, block_sizes
from radixlm.quant.param import Param
from radixlm.quant.scheme import OnlineQuantScheme, Scheme

BY_ROW, BY_BLOCK = FORMATS
MX_BLOCK = (1, 32)  # of MXFP8: rows and inputs that share a scale
_SAMPLE_ROWS = 64
_MAX_CHANGE = 0.01  # relative, of weights that were 8 bit floats before; others change by 0.025


class Fp8Quant(StoredQuant):
    """``fmt``: the format of kernels/ops/fp8.py that keeps the numbers. ``block``: rows and inputs
    that share a scale, if scales are a matrix."""

    fmt: str = BY_ROW
    block: tuple[int, int] = (BLOCK, BLOCK)
    source: ClassVar[str] = "radixlm.weights.fp8_source:Fp8Source"

    def matches_flag(self, flag: str) -> bool:
        return flag in (*FP8_FLAGS, self.method)

    def scheme(self) -> Scheme:
        return PrequantizedFp8Scheme(self.fmt)


def parse_mxfp8(config: Mapping[str, Any]) -> Fp8Quant:
    """Of MXFP8, whose blocks have one size, whatever ``weight_block_size`` says."""
    return mxfp8("mxfp8")


def mxfp8(method: str) -> Fp8Quant:
    """A scale, which is a power of two, for 32 inputs of a row."""
    return with_block(method, MX_BLOCK)


def with_block(method: str, block: object) -> Fp8Quant:
    """Scales by blocks of (rows, inputs), or by rows or tensors if ``block`` is None."""
    if block is None:
        return Fp8Quant(method)
    sizes = block_sizes(block)
    return Fp8Quant(method, BY_BLOCK if sizes == (BLOCK, BLOCK) else BY_ROW, sizes)


class PrequantizedFp8Scheme(OnlineQuantScheme):
    """Keeps the 8 bit floats of a checkpoint. Layers that it stores in more bits stay floats."""

    def pack(
        self, kernels: Kernels, params: Mapping[str, Param], gate_act: str = ""
    ) -> PackedLinear:
        value = params["weight"].value
        assert value is not None, "a parameter was used before it was loaded"
        if self._is_stored(value):
            return super().pack(kernels, params, gate_act)
        return Scheme().pack(kernels, params, gate_act)

    def expert_fmt(self, weight_EOI: Tensor) -> str:
        first_and_last = weight_EOI[:: max(1, len(weight_EOI) - 1)]
        return super().expert_fmt(weight_EOI) if all(map(self._is_stored, first_and_last)) else ""

    def _is_stored(self, weight_OI: Tensor) -> bool:
        """Whether the checkpoint has the weight in ``fmt``; what was packed before is meta."""
        return weight_OI.is_meta or is_fp8_exact(weight_OI, self.fmt(weight_OI.shape[1]))


def is_fp8_exact(weight_OI: Tensor, fmt: str) -> bool:
    """Whether a weight holds numbers of ``fmt``, by a sample of its rows."""
    rows = BLOCK if fmt == BY_BLOCK else _SAMPLE_ROWS
    part = weight_OI[:rows].float()
    change = (fake_quantize_weight(part, fmt) - part).norm()
    return bool(change <= _MAX_CHANGE * part.norm())
