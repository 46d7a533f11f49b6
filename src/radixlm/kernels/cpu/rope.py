"""Rotary embedding, q/k norm and the store into the paged cache. Legend: T tokens, H query heads,
K KV heads, D head dim, R rotated channels."""

import torch
from torch import Tensor

from radixlm.kernels.cpu.cache import CacheShape, shape_of
from radixlm.kernels.cpu.checks import int32
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
        NORM_CODE[norm.kind], norm.q_weight.data_ptr(), norm.k_weight.data_ptr(), norm.eps, 0.0,
        int(norm.is_layer_norm), address(norm.q_bias), address(norm.k_bias),
    )  # fmt: skip


def _heads(x: Tensor, name: str, is_dense: bool = True) -> tuple[int, int]:
    if x.dtype != torch.float32 or x.ndim != 3 or (x.shape[2] > 1 and x.stride(2) != 1):
        raise ValueError(f"{name}: expected float32 [T, heads, D] with contiguous rows")
    if is_dense and x.shape[1] > 1 and x.stride(1) != x.shape[2]:
        raise ValueError(f"{name}: heads must follow one another")
    return x.data_ptr(), x.stride(0)


def _rope_fields(
    cos_sin: Tensor | None, positions: Tensor | None, interleaved: bool
) -> tuple[int, int, int, int]:
    if cos_sin is None:
        return NO_ROPE
    if cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous():
        raise ValueError("cos_sin: expected contiguous float32 [positions, R]")
    return cos_sin.data_ptr(), address(positions), int(cos_sin.shape[1]), int(interleaved)


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
    positions = None if positions_T is None else int32(positions_T, "positions")
    q, ldq = _heads(q_THD, "q", is_dense=False)
    k, ldk = (0, 0) if k_TKD is None else _heads(k_TKD, "k")
    tokens, heads, dim = q_THD.shape
    kv_heads = 0 if k_TKD is None else k_TKD.shape[1]
    native().store(
        (q, ldq, k, ldk, 0, 0), (tokens, heads, kv_heads, dim, dim, q_THD.stride(1)),
        norm_fields(norm), _rope_fields(cos_sin, positions, interleaved), 0, NO_CACHE, 0,
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
    slots = int32(slots_T, "slots")
    k, ldk = _heads(latent_TKC, "latent")
    tokens, kv_heads, dim = latent_TKC.shape
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
    slots = int32(slots_T, "slots")
    positions = None if positions_T is None else int32(positions_T, "positions")
    q, ldq = (0, 0) if q_THD is None else _heads(q_THD, "q", is_dense=False)
    k, ldk = _heads(k_TKD, "k")
    v, ldv = _heads(v_TKV, "v")
    heads, stride = (0, 0) if q_THD is None else (q_THD.shape[1], q_THD.stride(1))
    tokens, kv_heads, dim = k_TKD.shape
    native().store(
        (q, ldq, k, ldk, v, ldv), (tokens, heads, kv_heads, dim, v_TKV.shape[2], stride),
        norm_fields(norm), _rope_fields(cos_sin, positions, interleaved),
        address(slots), (*shape_of(cache[0], dim, v_TKV.shape[2]).fields(*cache), heavy), 0,
    )  # fmt: skip
