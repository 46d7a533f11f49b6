"""The variants of ``kernels/triton/attention_plan.py``."""

from __future__ import annotations

from tests.kernels.triton.compiler import Variant

from radixlm.kernels.triton.attention_plan import (
    _FEW,
    _MANY,
    _SIZES,
    _VIEWS,
    _num_warps,
    plan_kernel,
)


def variants() -> tuple[Variant, ...]:
    """Steps of few and of many sequences; nothing else is compiled in."""
    signature = dict.fromkeys(_VIEWS, "*i32:1") | dict.fromkeys(_SIZES, "i32")
    return tuple(
        Variant(f"plan-{block}", plan_kernel, signature, {"BLOCK": block}, _num_warps(block), 3)
        for block in (_FEW, _MANY)
    )
