"""The variants of ``kernels/triton/gemm_fp8.py``."""

from __future__ import annotations

from tests.kernels.triton.compiler import POINTERS, Variant

from radixlm.kernels.ops import fp8 as reference
from radixlm.kernels.triton.gemm_fp8 import (
    _GROUPS,
    _row_block,
    quantize_groups_kernel,
    quantize_rows_kernel,
)
from radixlm.kernels.triton.gemm_tile import FP8_GROUP


def variants() -> tuple[Variant, ...]:
    """Rows of every length, as e4m3 and int8, and groups, for each dtype."""
    found = []
    for pointer in POINTERS.values():
        common = {"x_ptr": pointer, "scale_ptr": "*fp32"}
        sizes = dict.fromkeys(("num_in", "x_stride"), "i32:16")
        for out, max_value in (("*i8", 127.0), ("*fp8e4nv", reference.FP8_MAX)):
            arch = 80 if out == "*i8" else 89
            for block, warps in {_row_block(1 << step) for step in range(7, 14)}:
                found.append(
                    Variant(
                        f"rows-{pointer}-{out}-{block}",
                        quantize_rows_kernel,
                        {**common, "out_ptr": out, **sizes},
                        {"MAX_VALUE": max_value, "BLOCK": block},
                        warps,
                        3,
                        min_arch=arch,
                    )
                )
        found.append(
            Variant(
                f"groups-{pointer}",
                quantize_groups_kernel,
                {**common, "out_ptr": "*fp8e4nv", **sizes},
                {"MAX_VALUE": reference.FP8_MAX, "GROUPS": _GROUPS, "GROUP": FP8_GROUP},
                4,
                3,
                min_arch=89,
            )
        )
    return tuple(found)
