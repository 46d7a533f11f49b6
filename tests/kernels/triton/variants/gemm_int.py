"""The variants of ``kernels/triton/gemm_int.py``."""

from __future__ import annotations

from collections.abc import Iterator

from tests.kernels.triton.compiler import POINTERS, Variant
from tests.kernels.triton.variants.gemm import archs_of, signature

from radixlm.kernels.triton import gemm_tile as kinds
from radixlm.kernels.triton.gemm_int import _COLUMNS, _constants, dequantize_kernel, scale_kernel


def variants() -> tuple[Variant, ...]:
    """Every kind of weights that is dequantized, for each dtype, and the end of integer
    products."""
    return tuple(_variants())


def _variants() -> Iterator[Variant]:
    widening = (kinds.INT8, *kinds.NIBBLES, kinds.FP8_WIDE, kinds.FP8_BLOCK_WIDE)
    for pointer in POINTERS.values():
        for kind in widening:
            for group in (32, 128) if kind in kinds.NIBBLES else (0,):
                types = signature(kind, pointer)
                min_arch, max_arch = archs_of(kind)
                yield Variant(
                    f"dequantize-{kind}-{group}-{pointer}",
                    dequantize_kernel,
                    {name: types[name] for name in dequantize_kernel.arg_names if name in types},
                    _constants(kind, group),
                    4,
                    3,
                    min_arch=min_arch,
                    max_arch=max_arch,
                )
        yield Variant(
            f"scale-{pointer}",
            scale_kernel,
            {
                "sums_ptr": "*i32",
                **dict.fromkeys(("x_scale_ptr", "w_scale_ptr", "bias_ptr"), "*fp32"),
                "out_ptr": pointer,
                "num_out": "i32:16",
                "has_bias": "i32",
            },
            {"BLOCK": _COLUMNS},
            4,
            3,
        )
