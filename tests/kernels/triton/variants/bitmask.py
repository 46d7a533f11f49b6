"""The variants of ``kernels/triton/bitmask.py``."""

from __future__ import annotations

from tests.kernels.triton.compiler import POINTERS, Variant

from radixlm.kernels.triton.bitmask import _BLOCK, bitmask_kernel


def variants() -> tuple[Variant, ...]:
    """Each dtype of logits."""
    numbers = dict.fromkeys(("vocab", "logits_stride", "mask_stride"), "i32")
    return tuple(
        Variant(
            f"bitmask-{pointer}",
            bitmask_kernel,
            {"logits_ptr": pointer, "mask_ptr": "*i32", **numbers},
            {"BLOCK": _BLOCK},
            num_warps=4,
            num_stages=3,
        )
        for pointer in POINTERS.values()
    )
