"""Row norms in float32. Legend: T rows, D channels."""

import torch
from torch import Tensor

from radixlm.kernels.cpu.checks import expect, rows_of
from radixlm.kernels.cpu.extension import address, native


def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    eps: float, offset: float, is_layer: bool, out: Tensor | None, num_threads: int,
) -> Tensor:  # fmt: skip
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            expect(vector, torch.float32, x.shape[1:], name)
    out = torch.empty(x.shape) if out is None else out
    xa, ldx = rows_of(x, "x")
    ra, ldr = (0, 0) if residual is None else rows_of(residual, "residual", x.shape)
    ya, ldy = rows_of(out, "out", x.shape)
    native().norm(
        xa, ldx, ra, ldr, address(weight), address(bias), ya, ldy, x.shape[0], x.shape[1],
        eps, offset, 1.0, is_layer, num_threads,
    )  # fmt: skip
    return out


def rms_norm(
    x_TD: Tensor,
    weight_D: Tensor | None,
    eps: float,
    offset: float = 0.0,
    out: Tensor | None = None,
    num_threads: int = 0,
) -> Tensor:
    """``x / rms(x) * (weight + offset)``; ``out`` may be x."""
    return _norm(x_TD, None, weight_D, None, eps, offset, False, out, num_threads)


def add_rms_norm(
    x_TD: Tensor,
    residual_TD: Tensor,
    weight_D: Tensor | None,
    eps: float,
    offset: float = 0.0,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``residual += x`` in place, then its RMS norm: (normed, residual)."""
    return _norm(x_TD, residual_TD, weight_D, None, eps, offset, False, out, 0), residual_TD


def layer_norm(
    x_TD: Tensor,
    weight_D: Tensor | None,
    bias_D: Tensor | None,
    eps: float,
    out: Tensor | None = None,
    offset: float = 0.0,
) -> Tensor:
    """``(x - mean) / std * (weight + offset) + bias``."""
    return _norm(x_TD, None, weight_D, bias_D, eps, offset, True, out, 0)


def add_layer_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor | None, bias_D: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """``residual += x`` in place, then its layer norm: (normed, residual)."""
    return _norm(x_TD, residual_TD, weight_D, bias_D, eps, 0.0, True, None, 0), residual_TD
