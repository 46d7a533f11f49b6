"""Rotary embedding, q/k norm and the store into the paged cache. Legend: T tokens, H query heads,
K KV heads, D head dim, R rotated channels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from radixlm.kernels.cpu.cache import shape_of
from radixlm.kernels.cpu.checks import int32
from radixlm.kernels.cpu.extension import address, native

NORM_CODE = {"": 0, "head": 1, "row": 2, "head_layer": 3, "each_layer": 4}
NO_NORM = (0, 0, 0, 0.0, 0.0)
NO_ROPE = (0, 0, 0, 0)
NO_CACHE = (0, 0, 0, 0, 0, 0, 16)


@dataclass(frozen=True, slots=True)
class QkNorm:
    """RMS norm of q and k: each head with shared weights [D] ("head") or the whole row ("row");
    layer norm of each head, weights shared ("head_layer") or [H, D] ("each_layer")."""

    kind: str
    q_weight: Tensor
    k_weight: Tensor
    eps: float
    offset: float = 0.0

    def fields(self) -> tuple[int, int, int, float, float]:
        return (
            NORM_CODE[self.kind], self.q_weight.data_ptr(), self.k_weight.data_ptr(),
            self.eps, self.offset,
        )  # fmt: skip


def cos_sin_table(inv_freq_R2: Tensor, num_positions: int, factor: float = 1.0) -> Tensor:
    """float32 [positions, R]: R / 2 cosines, then R / 2 sines."""
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * inv_freq_R2.double()
    return (torch.cat([angles.cos(), angles.sin()], 1) * factor).float().contiguous()


def _heads(x: Tensor, name: str) -> tuple[int, int]:
    if x.dtype != torch.float32 or x.ndim != 3 or x.stride(2) != 1 or x.stride(1) != x.shape[2]:
        raise ValueError(f"{name}: expected float32 [T, heads, D] with contiguous rows")
    return x.data_ptr(), x.stride(0)


def _rope_fields(
    cos_sin: Tensor | None, positions: Tensor | None, interleaved: bool
) -> tuple[int, int, int, int]:
    if cos_sin is None or positions is None:
        return NO_ROPE
    if cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous():
        raise ValueError("cos_sin: expected contiguous float32 [positions, R]")
    return cos_sin.data_ptr(), positions.data_ptr(), int(cos_sin.shape[1]), int(interleaved)


def apply(
    q_THD: Tensor,
    k_TKD: Tensor | None,
    cos_sin: Tensor,
    positions_T: Tensor,
    interleaved: bool = False,
) -> None:
    """Rotate the first R = cos_sin.shape[1] channels of every head in place, by the row of
    ``cos_sin`` that the token's position names."""
    positions = int32(positions_T, "positions")
    q, ldq = _heads(q_THD, "q")
    k, ldk = (0, 0) if k_TKD is None else _heads(k_TKD, "k")
    tokens, heads, dim = q_THD.shape
    kv_heads = 0 if k_TKD is None else k_TKD.shape[1]
    native().store(
        (q, ldq, k, ldk, 0, 0), (tokens, heads, kv_heads, dim, dim), NO_NORM,
        _rope_fields(cos_sin, positions, interleaved), 0, NO_CACHE, 0,
    )  # fmt: skip


def kv_store(k_TKD: Tensor, v_TKV: Tensor, cache: tuple[Tensor, Tensor], slots_T: Tensor) -> None:
    """Write rows into the cache at ``slots`` (page * page_size + offset; negative: nowhere)."""
    qk_norm_rope_store(None, k_TKD, v_TKV, cache, slots_T)


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
) -> None:
    """Norm and rotate q and k in place (views of one qkv row are fine), store k and v."""
    slots = int32(slots_T, "slots")
    positions = None if positions_T is None else int32(positions_T, "positions")
    q, ldq = (0, 0) if q_THD is None else _heads(q_THD, "q")
    k, ldk = _heads(k_TKD, "k")
    v, ldv = _heads(v_TKV, "v")
    heads = 0 if q_THD is None else q_THD.shape[1]
    tokens, kv_heads, dim = k_TKD.shape
    native().store(
        (q, ldq, k, ldk, v, ldv), (tokens, heads, kv_heads, dim, v_TKV.shape[2]),
        NO_NORM if norm is None else norm.fields(), _rope_fields(cos_sin, positions, interleaved),
        address(slots), shape_of(*cache).fields(*cache), 0,
    )  # fmt: skip
