"""Table look-ups. Legend: T tokens, V rows of the table, D channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixlm.kernels.ops import embedding as reference
from radixlm.kernels.triton.launch import cdiv, launch
from radixlm.kernels.triton.mode import FLOATS, cast, runs_on

_BLOCK = 1024


@triton.jit
def embedding_kernel(
    ids_ptr, table_ptr, out_ptr, dim, table_stride, scale,
    SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (t, i): a block of channels of token t."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + token).to(tl.int64)
    x = tl.load(table_ptr + row * table_stride + col, mask=col < dim, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if SCALED:
        x = cast(x, dtype).to(tl.float32) * scale
    tl.store(out_ptr + token * dim + col, cast(x, dtype), mask=col < dim)


def embedding(ids_T: Tensor, table_VD: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """See kernels/ops/embedding.py."""
    fits = table_VD.dtype in FLOATS and dtype in FLOATS and table_VD.stride(1) == 1
    if not (runs_on(table_VD) and fits and ids_T.is_contiguous() and ids_T.numel()):
        return reference.embedding(ids_T, table_VD, scale, dtype)
    dim = table_VD.shape[1]
    out = torch.empty(*ids_T.shape, dim, dtype=dtype, device=table_VD.device)
    launch(
        embedding_kernel, (ids_T.numel(), cdiv(dim, _BLOCK)),
        (ids_T, table_VD, out), (dim, table_VD.stride(0), scale), SCALED=scale != 1.0, BLOCK=_BLOCK
    )  # fmt: skip
    return out
