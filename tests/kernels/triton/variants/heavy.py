"""The variants of ``kernels/triton/heavy.py``."""

from __future__ import annotations

from tests.kernels.triton.compiler import POINTERS, Variant

from radixlm.kernels.triton.heavy import _SELECTED, _TOKENS, _blocks, score_kernel, select_kernel


def variants() -> tuple[Variant, ...]:
    """Few and many heads and channels, dtypes of q."""
    tables = dict.fromkeys(("page_table", "sequences", "seen"), "*i32:1")
    numbers = dict.fromkeys(("q_stride", "q_head_stride", "table_stride", "keys_stride"), "i32")
    found = []
    for pointer in POINTERS.values():
        for group, width in ((4, 32), (32, 128)):
            sizes = {"KV_HEADS": 8, "GROUP": group, "WIDTH": width, "PAGE": 16, "TOKENS": _TOKENS}
            types = {"q": pointer, "channels": "*i32", "labels": "*i8", "scales": "*fp32"}
            types |= tables | numbers | {"keys": "*i32"}
            name, sizes = f"score-{pointer[1:]}-{group}-{width}", sizes | _blocks(group, width)
            found.append(Variant(name, score_kernel, types, sizes, 4, 3))
    types = {"keys": "*i32", "chosen": "*i32", "first_row": "i32", "top": "i32"}
    sizes = {"KV_HEADS": 8, "PAGE": 16, "BLOCK": _SELECTED}
    return (*found, Variant("select", select_kernel, types | tables | numbers, sizes, 8, 3))
