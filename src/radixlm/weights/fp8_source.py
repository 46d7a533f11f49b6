"""Tensors of one byte floats, widened by their scales as they are read.

Recipes and joins then see plain weights. ``kernels/ops/fp8.py`` finds the very numbers again when
a layer packs them, so nothing is lost on the way but memory for one layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from radixlm.weights.origin import Origin
from radixlm.weights.source import TensorSource

_NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)
_SUFFIXES = ("_scale_inv", "_scale")  # behind the name of the tensor; both multiply


class Fp8Source:
    """``source`` with its narrow tensors in ``dtype``; ``block`` is what a number of a matrix of
    scales stands for: (rows, inputs)."""

    def __init__(self, source: TensorSource, block: tuple[int, int], dtype: torch.dtype) -> None:
        self._source, self._block, self._dtype = source, block, dtype

    def sizes(self) -> Mapping[str, int]:
        """Bytes of every tensor as stored, scales among them."""
        return self._source.sizes()

    def read(self, name: str) -> Tensor:
        """See TensorSource. ValueError for scales that do not fit their tensor."""
        value = self._source.read(name)
        if value.dtype not in _NARROW:
            return value
        scale_name = self._scale_name(name)
        if scale_name is None:
            raise ValueError(f"{name}{_SUFFIXES[0]} or {name}{_SUFFIXES[1]} is missing")
        scale = self._source.read(scale_name)
        if not scale.is_floating_point():
            raise ValueError(f"{scale_name} is of {scale.dtype}")
        try:
            return widened(value, scale.float(), self._block).to(self._dtype)
        except ValueError as error:
            raise ValueError(f"{scale_name}: {error}") from error

    def release(self, name: str) -> None:
        """See TensorSource."""
        self._source.release(name)
        scale_name = self._scale_name(name)
        if scale_name is not None:
            self._source.release(scale_name)

    def origins(self, name: str) -> Sequence[Origin]:
        """See TensorSource."""
        scale_name = self._scale_name(name)
        scale = () if scale_name is None else self._source.origins(scale_name)
        return [*self._source.origins(name), *scale]

    def files(self) -> Sequence[Path]:
        """See TensorSource."""
        return self._source.files()

    def _scale_name(self, name: str) -> str | None:
        names = (name + suffix for suffix in _SUFFIXES)
        return next((scale for scale in names if scale in self._source.sizes()), None)


def widened(value: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """float32 of value [..., O, I] times scales of any layout: one number, [O], [..., O, 1],
    [..., 1, 1] or blocks [..., ceil(O / rows), ceil(I / inputs)]."""
    wide = value.float()
    if scale.numel() == 1:
        return wide.mul_(scale.view(()))
    if scale.ndim == 1 and value.ndim == 2:
        scale = scale[:, None]
    if scale.ndim == 1 and value.ndim == 3:  # one number an expert
        scale = scale[:, None, None]
    num_out, num_in = value.shape[-2:]
    expected = (-(-num_out // block[0]), -(-num_in // block[1]))
    if scale.ndim != value.ndim or scale.shape[:-2] != value.shape[:-2]:
        raise ValueError(f"scales {list(scale.shape)} do not fit a weight {list(value.shape)}")
    if scale.shape[-1] == 1 and scale.shape[-2] in (1, num_out):
        return wide.mul_(scale)
    if tuple(scale.shape[-2:]) != expected:
        raise ValueError(
            f"scales {list(scale.shape)} do not fit a weight {list(value.shape)} in blocks of "
            f"{block[0]} x {block[1]}"
        )
    by_row = scale.repeat_interleave(block[0], -2)[..., :num_out, :]
    return wide.mul_(by_row.repeat_interleave(block[1], -1)[..., :num_in])
