"""The variants of ``kernels/triton/moe_align.py``."""

from __future__ import annotations

from tests.kernels.triton.compiler import Variant

from radixlm.kernels.triton.moe_align import _CHUNKS, _EXPERTS, count_kernel, place_kernel


def variants() -> tuple[Variant, ...]:
    """Few and many slots, few and many experts."""
    integers = dict.fromkeys(("num_slots", "num_experts", "max_blocks", "block_size"), "i32")
    outputs = dict.fromkeys(("counts_ptr", "owners_ptr", "ends_ptr"), "*i32:1")
    ids = {"ids_ptr": "*i64", "slots_ptr": "*i32"}
    counting = [
        Variant(
            f"count-{chunk}",
            count_kernel,
            {"ids_ptr": "*i64", "counts_ptr": "*i32:1", "num_slots": "i32"},
            {"CHUNK": chunk},
            4,
            3,
        )
        for chunk in _CHUNKS
    ]
    placing = [
        Variant(
            f"place-{experts}-{chunk}",
            place_kernel,
            ids | outputs | integers,
            {"BLOCK_E": experts, "CHUNK": chunk},
            4,
            3,
        )
        for chunk in _CHUNKS
        for experts in _EXPERTS
    ]
    return (*counting, *placing)
