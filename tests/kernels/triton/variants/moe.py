"""The variants of ``kernels/triton/moe.py``."""

from __future__ import annotations

from tests.kernels.triton.compiler import POINTERS, Variant

from radixlm.kernels.triton.moe import _BLOCK_D, combine_kernel, combine_sorted_kernel


def variants() -> tuple[Variant, ...]:
    """The sums over a token's experts, for each dtype."""
    found = []
    for pointer in POINTERS.values():
        rows = {"slots_ptr": pointer, "sorted_ptr": pointer, "out_ptr": pointer}
        rest = {"position_ptr": "*i32", "weight_ptr": "*fp32", "dim": "i32:16", "ids_ptr": "*i64"}
        for kernel, constants in (
            (combine_kernel, {"TOP_K": 8, "SKIPS": False, "BLOCK": _BLOCK_D}),
            (combine_kernel, {"TOP_K": 8, "SKIPS": True, "BLOCK": _BLOCK_D}),
            (combine_sorted_kernel, {"TOP_K": 8, "BLOCK": _BLOCK_D}),
        ):
            names = kernel.arg_names
            types = {name: kind for name, kind in (rows | rest).items() if name in names}
            name = f"{kernel.fn.__name__.removesuffix('_kernel')}-{pointer}"
            name += "-skips" if constants.get("SKIPS") else ""
            found.append(Variant(name, kernel, types, constants, 4, 3))
    return tuple(found)
