"""The variants of ``kernels/triton/attention_store.py``."""

from __future__ import annotations

from tests.kernels.triton.compiler import Variant

from radixlm.kernels.triton.attention_store import _TOKENS, rotate_kernel, store_kernel
from radixlm.kernels.triton.launch import next_power_of_2


def variants() -> tuple[Variant, ...]:
    """Head dims and latents, kinds of cache, dtypes of K and V."""
    caches = {"same": 0, "i8": 1, "fp8e5": 2, "fp8e4nv": 2, "u8": 3, "i4": 4}
    pointers = ("bf16", "fp16", "fp32")
    stores = (
        _variant(pointer, cache, kind, dim)
        for dim in (64, 128, 256, 576)
        for cache, kind in caches.items()
        for pointer in pointers
    )
    return (*stores, *(_rotation(pointer, block) for block in (16, 128) for pointer in pointers))


def _rotation(pointer: str, block: int) -> Variant:
    numbers = dict.fromkeys(("num_rows", "heads", "stride", "head_stride"), "i32")
    signature = {"x": f"*{pointer}", "out": "*fp32", **numbers, "scale": "fp32"}
    constants = {"BLOCKS": 1, "N": block, "STEPS": block.bit_length() - 1, "ROWS": 2048 // block}
    return Variant(
        f"rotate-{pointer}-{block}", rotate_kernel, signature, constants, num_warps=4, num_stages=3
    )


def _variant(pointer: str, cache: str, kind: int, dim: int) -> Variant:
    has_v, kv_heads = dim != 576, 8 if dim != 576 else 1
    to = "*" + {"same": pointer, "i4": "u8"}.get(cache, cache)
    scales = {1: "*fp32", 4: "*bf16"}.get(kind, "fp32")
    signature = dict.fromkeys(("k", "v"), f"*{pointer}") | dict.fromkeys(("k_cache", "v_cache"), to)
    signature |= dict.fromkeys(("k_scales", "v_scales"), scales) | {"slots": "*i64:1"}
    strides = ("k_stride", "k_head_stride", "v_stride", "v_head_stride")
    signature |= {"num_tokens": "i32"} | dict.fromkeys(strides, "i32:16")
    block = next_power_of_2(dim)
    constants = {
        "KIND": kind, "HAS_V": has_v, "KV_HEADS": kv_heads, "DIM": dim, "V_DIM": dim,
        "BLOCK_C": block, "BLOCK_V": block, "TOKENS": _TOKENS if dim <= 128 else 4,
    }  # fmt: skip
    return Variant(
        f"store-{pointer}-{cache}-{dim}", store_kernel, signature, constants, num_warps=4,
        num_stages=3, min_arch=89 if cache == "fp8e4nv" else 80,
    )  # fmt: skip
