"""Tensors in 8 bit floats, multiplied by their scales as they are read.

Recipes and concatenations then see plain weights. A layer that packs the weight in fp8 recovers the
stored numbers exactly (``kernels/ops/fp8.py: scales_of``), so no precision is lost.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from radixlm.quant.fp8 import MX_BLOCK, Fp8Quant
from radixlm.weights.fp4_source import powers_of_two
from radixlm.weights.origin import Origin
from radixlm.weights.source import TensorSource, WrappedSource

_FLOAT8 = (
    *(torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)
# of a scale's name, after its weight's; all multiply
_SUFFIXES = ("_scale_inv", "_scale", "_weight_scale")
_BESIDE = (".scale", ".qscale_weight")  # in the place of ".weight": of DeepSeek V4, of Mistral


class Fp8Source(WrappedSource):
    """``inner`` with its 8 bit floats dequantized to ``dtype``."""

    def __init__(self, inner: TensorSource, quant: Fp8Quant, dtype: torch.dtype) -> None:
        super().__init__(inner)
        self._block, self._dtype = quant.block, dtype
        self._sizes = dict(inner.sizes())
        for name in inner.sizes():  # scales are parts of their weights
            stem, _, last = name.rpartition(".")
            if f".{last}" in _BESIDE and f"{stem}.weight" in self._sizes:
                self._sizes[name] = 0

    def sizes(self) -> Mapping[str, int]:
        """Bytes of every tensor as stored; scales that only their place tells have none."""
        return self._sizes

    def read(self, name: str) -> Tensor:
        value = self.inner.read(name)
        if value.dtype not in _FLOAT8:
            return value
        scale_name = self._scale_name(name)
        if scale_name is None:
            raise ValueError(f"{name}{_SUFFIXES[0]} or {name}{_SUFFIXES[1]} is missing")
        scale = self.inner.read(scale_name)
        block = self._block
        if scale.dtype == torch.uint8:
            scale, block = powers_of_two(scale), MX_BLOCK
        if not scale.is_floating_point():
            raise ValueError(f"{scale_name} is of {scale.dtype}")
        try:
            return dequantize(value, scale.float(), block).to(self._dtype)
        except ValueError as error:
            raise ValueError(f"{scale_name}: {error}") from error

    def dtype(self, name: str) -> torch.dtype:
        stored = self.inner.dtype(name)
        return self._dtype if stored in _FLOAT8 else stored

    def release(self, name: str) -> None:
        for part in self._parts(name):
            self.inner.release(part)

    def origins(self, name: str) -> Sequence[Origin]:
        return [origin for part in self._parts(name) for origin in self.inner.origins(part)]

    def _parts(self, name: str) -> list[str]:
        """The tensor and its scale, if it has one."""
        scale_name = self._scale_name(name)
        return [name] if scale_name is None else [name, scale_name]

    def _scale_name(self, name: str) -> str | None:
        names = [name + suffix for suffix in _SUFFIXES]
        if name.endswith(".weight"):
            names += [name.removesuffix(".weight") + last for last in _BESIDE]
        return next((scale for scale in names if scale in self._sizes), None)


def dequantize(value: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """float32 of value [..., O, I] times scales of any layout: one number, [O], [..., O, 1],
    [..., 1, 1] or blocks [..., ceil(O / rows), ceil(I / inputs)], of one matrix also with an axis
    of 1 after each. fbgemm stores experts as [E, I, O], their scales as [E, 1, O] or [E, O, 1]."""
    wide = value.float()
    if scale.ndim == 4 and scale.shape[1::2] == (1, 1):
        scale = scale[:, 0, :, 0]
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
    if value.ndim == 3 and scale.shape[-2:] in ((1, num_in), (num_in, 1)):
        return wide.mul_(scale.reshape(-1, 1, num_in))
    if tuple(scale.shape[-2:]) != expected:
        raise ValueError(
            f"scales {list(scale.shape)} do not fit a weight {list(value.shape)} in blocks of "
            f"{block[0]} x {block[1]}"
        )
    by_row = scale.repeat_interleave(block[0], -2)[..., :num_out, :]
    return wide.mul_(by_row.repeat_interleave(block[1], -1)[..., :num_in])
