"""The variants of ``kernels/triton/moe_gemv.py``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tests.kernels.triton.compiler import POINTERS, Variant
from tests.kernels.triton.variants.gemm import archs_of, signature

from radixlm.kernels.triton import gemm_tile as kinds
from radixlm.kernels.triton.moe_gemv import _blocks, _constants, gemv_down_kernel, gemv_up_kernel


def variants() -> tuple[Variant, ...]:
    """Every kind, dtype and block of outputs; nothing else is compiled in."""
    return tuple(_variants())


def _variants() -> Iterator[Variant]:
    for kind in kinds.ALL:
        for dtype, pointer in POINTERS.items():
            if kind == kinds.W8A8 or (dtype == torch.float32 and kind != kinds.PLAIN):
                continue
            for group in (32, 128) if kind in kinds.NIBBLES else (0,):
                blocks = {_blocks(kind, 1, num_out) for num_out in (1, 1 << 20)}
                for block_n, block_k in sorted(blocks):
                    may_be_one = block_n == 4 and dtype != torch.float32
                    for is_one in (False, True) if may_be_one else (False,):
                        constants = _constants(kind, group, block_n, block_k, is_one)
                        yield from _uses(f"{kind}-{group}-{pointer}", pointer, kind, constants)


def _uses(
    label: str, pointer: str, kind: int, constants: dict[str, int | bool]
) -> Iterator[Variant]:
    types = signature(kind, pointer) | {"x_ptr": pointer, "ids_ptr": "*i64"}
    size = f"{constants['BLOCK_N']}x{constants['BLOCK_K']}{'-one' * constants['ONE_STEP']}"
    min_arch, max_arch = archs_of(kind)
    for use, kernel in {"up": gemv_up_kernel, "down": gemv_down_kernel}.items():
        own = {name: kind for name, kind in types.items() if name in kernel.arg_names}
        for skips in (False, True):
            yield Variant(
                f"gemv-{use}-{label}-{size}{'-skips' * skips}", kernel, own,
                constants | {"SKIPS": skips}, 4, 3, min_arch=min_arch, max_arch=max_arch,
            )  # fmt: skip
