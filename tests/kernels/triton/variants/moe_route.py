"""The variants of ``kernels/triton/moe_route.py``."""

from __future__ import annotations

from collections.abc import Iterator

from tests.kernels.triton.compiler import POINTERS, Variant

from radixlm.arch.spec import Moe
from radixlm.kernels.triton.moe_route import _constants, _tile, route_kernel

_SHAPES = {
    "softmax-128-8": Moe(128, 8, 768, "silu", renorm=True),
    "softmax-8-2": Moe(8, 2, 768, "silu", renorm=True),
    "grouped-256-8": Moe(
        256, 8, 768, "silu", "sigmoid", renorm=True, scale=2.5, correction=True, groups=(8, 4)
    ),
    "grouped-max-160-6": Moe(160, 6, 768, "silu", groups=(8, 3), group_score="max", scale=16.0),
    "sigmoid-512-10": Moe(512, 10, 768, "silu", "sigmoid", renorm=True, correction=True),
    "chosen-128-4": Moe(128, 4, 768, "swiglu_oai", "softmax_topk"),
    "chosen-32-4": Moe(32, 4, 768, "swiglu_oai", "softmax_topk"),
    "sigmoid-chosen-16-1": Moe(16, 1, 768, "silu", "sigmoid_topk"),
    "softmax-1024-16": Moe(1024, 16, 768, "silu"),
}


def variants() -> tuple[Variant, ...]:
    """The routers of known families, for each dtype of logits."""
    return tuple(_variants())


def _variants() -> Iterator[Variant]:
    for name, spec in _SHAPES.items():
        for pointer in POINTERS.values():
            yield Variant(
                f"route-{name}-{pointer}",
                route_kernel,
                {
                    "logits_ptr": pointer,
                    **dict.fromkeys(("correction_ptr", "weights_ptr"), "*fp32"),
                    "ids_ptr": "*i64",
                    **dict.fromkeys(("num_tokens", "num_experts", "group_size"), "i32"),
                    "stride": "i32:16",
                    "scale": "fp32",
                },
                _constants(spec, spec.experts, spec.correction),
                _tile(spec.experts)[2],
                num_stages=1,
            )
