"""The variants of ``kernels/triton/sample.py``."""

from __future__ import annotations

from collections.abc import Iterator

from tests.kernels.triton.compiler import Variant

from radixlm.kernels.triton.sample import (
    _FEW_CHUNKS,
    _PICK_WARPS,
    _WARPS,
    MAX_CHUNKS,
    chunk_kernel,
    pick_kernel,
)


def variants() -> tuple[Variant, ...]:
    """Small and large vocabularies, with and without mask and token table."""
    return tuple(_variants())


def _variants() -> Iterator[Variant]:
    common = {
        "logits_ptr": "*fp32",
        "params_ptr": "*i32:1",
        "positions_ptr": "*i32:1",
        "floats_ptr": "*fp32",
        "tokens_ptr": "*i32",
        **dict.fromkeys(("vocab", "logits_stride", "params_stride", "num_chunks"), "i32"),
    }
    for has_mask in (False, True):
        signature = common | {"mask_ptr": "*i32:1", "mask_stride": "i32"}
        yield Variant(
            f"chunk{'-mask' * has_mask}", chunk_kernel, signature, {"MASK": has_mask}, _WARPS, 3
        )
    for block in (_FEW_CHUNKS, MAX_CHUNKS):
        for next_dtype in ("", "*i64"):
            signature = common | {
                "out_ptr": "*i64",
                "bad_ptr": "*i1",
                "next_ptr": "*i64",
                "slots_ptr": "*i32:1" if next_dtype else "*i64:1",
            }
            constants = {"TO_SLOTS": bool(next_dtype), "BLOCK": block}
            name = f"pick-{block}{'-slots' if next_dtype else ''}"
            yield Variant(name, pick_kernel, signature, constants, _PICK_WARPS, 3)
