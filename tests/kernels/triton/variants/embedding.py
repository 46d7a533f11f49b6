"""The variants of ``kernels/triton/embedding.py``."""

from __future__ import annotations

from tests.kernels.triton.compiler import POINTERS, Variant

from radixlm.kernels.triton.embedding import _BLOCK, embedding_kernel


def variants() -> tuple[Variant, ...]:
    """Every pair of dtypes."""
    return tuple(
        Variant(
            f"embedding-{table}-{out}-{is_scaled}",
            embedding_kernel,
            {
                "ids_ptr": "*i64",
                "table_ptr": table,
                "out_ptr": out,
                "dim": "i32:16",
                "table_stride": "i32:16",
                "scale": "fp32",
            },
            {"SCALED": is_scaled, "BLOCK": _BLOCK},
            num_warps=4,
            num_stages=3,
        )
        for table in POINTERS.values()
        for out in POINTERS.values()
        for is_scaled in (False, True)
    )
