"""The variants of ``kernels/triton/rope.py``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from tests.kernels.triton.compiler import MIN_ARCH, POINTERS, Variant

from radixlm.kernels.triton.rope import (
    _LAYER,
    _NONE,
    _RMS,
    prepare_kernel,
    tile_of,
)

_SHAPES = ((64, 32), (128, 64), (128, 32), (256, 128), (512, 256))
_STRIDES = ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "cos_sin_token")
_POOL_STRIDES = ("k_pool_row", "k_pool_head", "v_pool_row", "v_pool_head")


def variants() -> tuple[Variant, ...]:
    """Tiles of usual heads, norms, rotations and stores, each dtype."""
    return tuple(_variants())


def _variants() -> Iterator[Variant]:
    kinds = (*product((_RMS, _NONE, _LAYER), ("half", "none", "pairs")),)
    for (dim, half), pointer in product(_SHAPES, POINTERS.values()):
        for norm, rotation in kinds:
            if (norm, rotation) != (_NONE, "none"):
                yield _variant(dim, half, norm, rotation, pointer, "")
        for cache in dict.fromkeys((pointer, "*fp8e4nv", "*fp8e5")):
            yield _variant(dim, half, _RMS, "half", pointer, cache)
            yield _variant(dim, half, _NONE, "half", pointer, cache)
            yield _variant(dim, half, _NONE, "pairs", pointer, cache)


def _variant(dim: int, half: int, norm: int, rotation: str, pointer: str, cache: str) -> Variant:
    has_rope = rotation != "none"
    tile = tile_of(dim, half if has_rope else 0, dim)
    floats = ("q_weight_ptr", "k_weight_ptr", "q_bias_ptr", "k_bias_ptr", "cos_sin_ptr")
    numbers = ("q_heads", "k_heads", "half", "dim", "v_dim", "weight_stride")
    signature = {
        **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), pointer),
        **dict.fromkeys(floats, "*fp32"),
        **dict.fromkeys(("k_pool_ptr", "v_pool_ptr"), cache or pointer),
        "slots_ptr": "*i64:1" if cache else f"{pointer}:1",
        **dict.fromkeys((*numbers, *_STRIDES, *_POOL_STRIDES), "i32:16"),
        "eps": "fp32",
    }
    constants = {
        "NORM": norm,
        "BIAS": norm == _LAYER,
        "ROPE": has_rope,
        "INTERLEAVED": rotation == "pairs",
        "STORE": bool(cache),
        "HEADS": tile.heads,
        "HALF": tile.half,
        "REST": tile.rest,
        "V_BLOCK": tile.v,
    }
    name = f"prepare-{pointer}-{dim}-{half}-{('none', 'rms', 'layer')[norm]}-{rotation}-{cache}"
    return Variant(
        name,
        prepare_kernel,
        signature,
        constants,
        tile.num_warps(norm, pointer == "*fp32" and cache not in ("", pointer)),
        num_stages=3,
        min_arch=MIN_ARCH.get(cache, 80),
    )
