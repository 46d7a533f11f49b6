"""The variants of ``kernels/triton/kv.py``."""

from __future__ import annotations

from tests.kernels.triton.compiler import Variant

from radixlm.kernels.triton.kv import _BLOCK, move_kernel


def variants() -> tuple[Variant, ...]:
    """Each kind of move and word."""
    numbers = ("num_words", "source_layer", "source_page", "target_layer", "target_page")
    return tuple(
        Variant(
            f"move-{pointer}-{'from' * has_from}{'to' * has_to}",
            move_kernel,
            {
                "source_ptr": pointer,
                "target_ptr": pointer,
                "from_ptr": "*i64" if has_from else pointer,
                "to_ptr": "*i64" if has_to else pointer,
                **dict.fromkeys(numbers, "i32:16"),
            },
            {"FROM": has_from, "TO": has_to, "BLOCK": _BLOCK},
            num_warps=4,
            num_stages=3,
        )
        for pointer in ("*i32", "*u8")
        for has_from, has_to in ((True, True), (True, False), (False, True))
    )
