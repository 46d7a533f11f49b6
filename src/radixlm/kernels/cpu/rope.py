"""Rotary embedding, q/k norm and the store into the paged cache. Legend: T tokens, H query heads,
K KV heads, D head dim, R rotated channels."""

import torch
from torch import Tensor

from radixlm.kernels.cpu.cache import CacheShape, shape_of
from radixlm.kernels.cpu.checks import expect, int32
from radixlm.kernels.cpu.extension import address, native
from radixlm.kernels.ops.rope import QkNorm

NORM_CODE = {"": 0, "head": 1, "row": 2, "each": 3}
NO_NORM = (0, 0, 0, 0.0, 0.0, 0, 0, 0)
NO_ROPE = (0, 0, 0, 0)
NO_CACHE = (0, 0, 0, 0, 0, 0, 16)


def norm_fields(norm: QkNorm | None) -> tuple[int, int, int, float, float, int, int, int]:
    """The extension's description of a q/k norm."""
    if norm is None:
        return NO_NORM
    return (
        NORM_CODE[norm.kind], _weight(norm.q_weight), _weight(norm.k_weight), norm.eps, 0.0,
        int(norm.is_layer_norm), _weight(norm.q_bias), _weight(norm.k_bias),
    )  # fmt: skip


def _weight(x: Tensor | None) -> int:
    if x is not None and (x.dtype != torch.float32 or not x.is_contiguous()):
        raise ValueError(f"norm: expected contiguous float32 weights, got {x.dtype}")
    return address(x)


def _heads(
    x: Tensor, name: str, shape: tuple[int, int, int], is_dense: bool = True
) -> tuple[int, int]:
    expect(x, torch.float32, shape, name)
    if is_dense and x.shape[1] > 1 and x.stride(1) != x.shape[2]:
        raise ValueError(f"{name}: heads must follow one another")
    return x.data_ptr(), x.stride(0)


def _rope_fields(
    cos_sin: Tensor | None, positions: Tensor | None, interleaved: bool, x_THD: Tensor
) -> tuple[int, int, int, int]:
    if cos_sin is None:
        return NO_ROPE
    expect(cos_sin, torch.float32, (-1 if positions is not None else len(x_THD), -1), "cos_sin")
    rotary = int(cos_sin.shape[1])
    if not cos_sin.is_contiguous() or rotary % 2 or rotary > x_THD.shape[2]:
        raise ValueError(f"cos_sin: expected contiguous rows of heads, got {tuple(cos_sin.shape)}")
    return cos_sin.data_ptr(), address(positions), rotary, int(interleaved)


def apply(
    q_THD: Tensor,
    k_TKD: Tensor | None,
    cos_sin: Tensor,
    positions_T: Tensor | None,
    interleaved: bool = False,
) -> None:
    """Rotate the first R = cos_sin.shape[1] channels of every head in place, by the row of
    ``cos_sin`` that the token's position names (no positions: row t for token t)."""
    prepare(q_THD, k_TKD, None, cos_sin, positions_T, interleaved)


def prepare(
    q_THD: Tensor,
    k_TKD: Tensor | None,
    norm: QkNorm | None,
    cos_sin: Tensor | None,
    positions_T: Tensor | None = None,
    interleaved: bool = False,
) -> None:
    """Norm, then rotate q and k in place."""
    tokens, heads, dim = q_THD.shape
    positions = None if positions_T is None else int32(positions_T, "positions", tokens)
    q, ldq = _heads(q_THD, "q", (-1, -1, -1), is_dense=False)
    k, ldk = (0, 0) if k_TKD is None else _heads(k_TKD, "k", (tokens, -1, dim))
    kv_heads = 0 if k_TKD is None else k_TKD.shape[1]
    native().store(
        (q, ldq, k, ldk, 0, 0), (tokens, heads, kv_heads, dim, dim, q_THD.stride(1)),
        norm_fields(norm), _rope_fields(cos_sin, positions, interleaved, q_THD), 0, NO_CACHE, 0,
    )  # fmt: skip


def kv_store(
    k_TKD: Tensor, v_TKV: Tensor, cache: tuple[Tensor, Tensor], slots_T: Tensor, heavy: int = 0
) -> None:
    """Write rows into the cache at ``slots`` (page * page_size + offset; negative: nowhere).
    ``heavy``: address of a Heavy of the extension, whose rows and labels are written too."""
    qk_norm_rope_store(None, k_TKD, v_TKV, cache, slots_T, heavy=heavy)


def latent_store(
    latent_TKC: Tensor, shape: CacheShape, cache: tuple[Tensor, Tensor], slots_T: Tensor
) -> None:
    """``kv_store`` of a latent cache, whose rows are key and value at once."""
    tokens, kv_heads, dim = latent_TKC.shape
    slots = int32(slots_T, "slots", tokens)
    k, ldk = _heads(latent_TKC, "latent", (tokens, shape.kv_heads, shape.k_dim))
    native().store(
        (0, 0, k, ldk, 0, 0), (tokens, 0, kv_heads, dim, shape.v_dim, 0),
        NO_NORM, NO_ROPE, address(slots), shape.fields(*cache), 0,
    )  # fmt: skip


def qk_norm_rope_store(
    q_THD: Tensor | None,
    k_TKD: Tensor,
    v_TKV: Tensor,
    cache: tuple[Tensor, Tensor],
    slots_T: Tensor,
    *,
    norm: QkNorm | None = None,
    cos_sin: Tensor | None = None,
    positions_T: Tensor | None = None,
    interleaved: bool = False,
    heavy: int = 0,
) -> None:
    """Norm and rotate q and k in place (views of one qkv row are fine), store k and v."""
    tokens, kv_heads, dim = k_TKD.shape
    slots = int32(slots_T, "slots", tokens)
    positions = None if positions_T is None else int32(positions_T, "positions", tokens)
    q, ldq = (0, 0) if q_THD is None else _heads(q_THD, "q", (tokens, -1, dim), is_dense=False)
    shape = shape_of(cache[0], dim, v_TKV.shape[2])
    k, ldk = _heads(k_TKD, "k", (tokens, shape.kv_heads, dim))
    v, ldv = _heads(v_TKV, "v", (tokens, shape.kv_heads, shape.v_dim))
    heads, stride = (0, 0) if q_THD is None else (q_THD.shape[1], q_THD.stride(1))
    native().store(
        (q, ldq, k, ldk, v, ldv), (tokens, heads, kv_heads, dim, v_TKV.shape[2], stride),
        norm_fields(norm), _rope_fields(cos_sin, positions, interleaved, k_TKD),
        address(slots), (*shape.fields(*cache), heavy), 0,
    )  # fmt: skip
