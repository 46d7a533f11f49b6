"""The variants of ``kernels/triton/lora.py``."""

from __future__ import annotations

from collections.abc import Iterator

from tests.kernels.triton.compiler import POINTERS, Variant

from radixlm.kernels.triton.lora import (
    _STAGES,
    _expand_constants,
    _most_segments,
    _shrink_constants,
    expand_kernel,
    shrink_kernel,
)


def variants() -> tuple[Variant, ...]:
    """Every dtype and number of sums."""
    return tuple(_variants())


def _variants() -> Iterator[Variant]:
    places = {"rows_ptr": "*i32", "entries_ptr": "*i64", "h_ptr": "*fp32"}
    free = dict.fromkeys(("entry_stride", "steps", "segments", "is_whole", "rank_blocks"), "i32")
    free |= dict.fromkeys(("num_in", "x_stride", "num_out", "y_stride"), "i32:16")
    for dtype, pointer in POINTERS.items():
        types = {"x_ptr": pointer, "y_ptr": pointer, **places, **free}
        uses = [("shrink", shrink_kernel, _shrink_constants(dtype), _STAGES)]
        sums = [(1 << power, False) for power in range(_most_segments(dtype).bit_length())]
        for num_sums, has_many in [(1, True)] * (dtype.itemsize == 2) + sums:
            constants = _expand_constants(dtype, num_sums, has_many)
            uses.append((f"expand-{num_sums}-{constants['BLOCK_N']}", expand_kernel, constants, 3))
        for name, kernel, constants, stages in uses:
            own = {name: kind for name, kind in types.items() if name in kernel.arg_names}
            yield Variant(f"lora-{name}-{pointer}", kernel, own, constants, 4, stages)
