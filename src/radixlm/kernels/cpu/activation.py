"""Activations over rows, and the plain embedding gather. Legend: T rows, I inner channels."""

import torch
from torch import Tensor

from radixlm.kernels.cpu.checks import dtype_code, int32, rows_of
from radixlm.kernels.cpu.extension import native
from radixlm.kernels.cpu.linear import act_code
from radixlm.kernels.ops.activation import NO_LIMIT, GateLimit


def act_mul(
    x_T2I: Tensor, act: str, limit: GateLimit = NO_LIMIT, out: Tensor | None = None
) -> Tensor:
    """``act(gate) * up`` of rows [gate, up]; act: silu_mul, gelu_mul, swiglu_oai_mul, ..."""
    return _run(x_T2I, x_T2I.shape[1] // 2, act_code(act, True), True, out, limit)


def activate(x_TI: Tensor, act: str, out: Tensor | None = None) -> Tensor:
    """A plain activation of ``linear.ACT_CODE``, elementwise."""
    return _run(x_TI, x_TI.shape[1], act_code(act, False), False, out)


def _run(
    x: Tensor, dim: int, code: int, is_gated: bool, out: Tensor | None, limit: GateLimit = NO_LIMIT
) -> Tensor:
    out = torch.empty(x.shape[0], dim) if out is None else out
    xa, ldx = rows_of(x, "x")
    ya, ldy = rows_of(out, "out", (x.shape[0], dim))
    ext = native()
    cut = ext.GateLimit(*limit)
    ext.activation(xa, ldx, ya, ldy, x.shape[0], dim, code, is_gated, cut, 0)
    return out


def embedding(
    ids_T: Tensor, table_VD: Tensor, scale: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """Rows of the table (float32, bfloat16, float16) as float32, times ``scale``; an id outside
    the table gives zeros."""
    ids = int32(ids_T, "ids")
    if not table_VD.is_contiguous():
        raise ValueError("table: must be contiguous")
    num_rows, dim = table_VD.shape
    out = torch.empty(ids.shape[0], dim) if out is None else out
    ya, ldy = rows_of(out, "out", (ids.shape[0], dim))
    native().embed(
        ids.data_ptr(), ids.shape[0], table_VD.data_ptr(), dtype_code(table_VD.dtype, "table"),
        num_rows, dim, scale, ya, ldy,
    )  # fmt: skip
    return out
