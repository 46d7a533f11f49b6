"""The variants of ``kernels/triton/norm.py``."""

from __future__ import annotations

from collections.abc import Iterator

from tests.kernels.triton.compiler import POINTERS, Variant

from radixlm.kernels.triton.norm import _tile, norm_kernel


def variants() -> tuple[Variant, ...]:
    """Every tile, kind and dtype."""
    return tuple(_variants())


def _variants() -> Iterator[Variant]:
    kinds = {"rms": (False, False), "layer": (False, True), "layer_bias": (True, True)}
    for block in (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384):
        rows, block, num_warps = _tile(block)
        for pointer in POINTERS.values():
            for kind, (has_bias, is_layer) in kinds.items():
                for has_delta in (False, True):
                    yield Variant(
                        f"{'add_' * has_delta}{kind}_norm-{pointer}-{block}",
                        norm_kernel,
                        {
                            **dict.fromkeys(("x_ptr", "delta_ptr", "out_ptr"), pointer),
                            **dict.fromkeys(("weight_ptr", "bias_ptr"), "*fp32"),
                            **dict.fromkeys(("num_rows", "num_weights"), "i32"),
                            **dict.fromkeys(
                                ("dim", "x_stride", "delta_stride", "out_stride"), "i32:16"
                            ),
                            "eps": "fp32",
                        },
                        {
                            "HAS_DELTA": has_delta,
                            "HAS_BIAS": has_bias,
                            "IS_LAYER": is_layer,
                            "ROWS": rows,
                            "BLOCK": block,
                        },
                        num_warps,
                        num_stages=3,
                    )
