"""The variants of ``kernels/triton/activation.py``."""

from __future__ import annotations

from collections.abc import Iterator

from tests.kernels.triton.compiler import POINTERS, Variant

from radixlm.kernels.triton.activation import (
    _BLOCK,
    CODES,
    gated_kernel,
    gated_pairs_kernel,
    pointwise_kernel,
)


def variants() -> tuple[Variant, ...]:
    """Every activation and dtype."""
    return tuple(_variants())


def _variants() -> Iterator[Variant]:
    for pointer in POINTERS.values():
        pointers = {"x_ptr": pointer, "out_ptr": pointer}
        for act, code in CODES.items():
            constants = {"ACT": code, "BLOCK": _BLOCK}
            for is_scaled in (False, True) if act == "tanh" else (False,):
                if act != "swiglu_oai":
                    yield Variant(
                        f"{act}-{pointer}-{is_scaled}",
                        pointwise_kernel,
                        pointers | {"size": "i64", "inner": "fp32", "outer": "fp32"},
                        constants | {"SCALED": is_scaled},
                        num_warps=4,
                        num_stages=3,
                    )
            if act not in ("sigmoid",):
                yield Variant(
                    f"{act}_gated-{pointer}",
                    gated_kernel,
                    pointers | {"half": "i32:16", "x_stride": "i32:16"},
                    constants,
                    num_warps=4,
                    num_stages=3,
                )
                sizes = pointers | {"width": "i32:16"}
                yield Variant(f"{act}_pairs-{pointer}", gated_pairs_kernel, sizes, constants, 4, 3)
