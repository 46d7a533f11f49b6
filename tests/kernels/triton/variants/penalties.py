"""The variants of ``kernels/triton/penalties.py``."""

from __future__ import annotations

from tests.kernels.triton.compiler import Variant

from radixlm.kernels.triton.penalties import (
    _BLOCK,
    _LIST,
    list_kernel,
    penalty_kernel,
    record_kernel,
)


def variants() -> tuple[Variant, ...]:
    """With and without mask."""
    common = {"logits_ptr": "*fp32", "rows_ptr": "*i64", "vocab": "i32", "logits_stride": "i32"}
    penalties = [
        Variant(
            f"penalties{'-mask' * has_mask}",
            penalty_kernel,
            common | {"mask_ptr": "*i32", "mask_stride": "i32"},
            {"MASK": has_mask, "BLOCK": _BLOCK},
            num_warps=4,
            num_stages=3,
        )
        for has_mask in (False, True)
    ]
    lists = Variant(
        "lists",
        list_kernel,
        common | {"positions_ptr": "*i32:1"},
        {"BLOCK": 2 * _BLOCK, "LIST": _LIST},
        num_warps=8,
        num_stages=3,
    )
    pointers = {"rows_ptr": "*i64", "tokens_ptr": "*i64"}
    return (*penalties, lists, Variant("record", record_kernel, pointers, {}, 1, 3))
