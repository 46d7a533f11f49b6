"""What linear maps over weights of fewer bits have in common, as the reference runs them.

Legend: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class DequantLinear(ABC):
    """Holds the few bits; widens them on every call."""

    formats: tuple[str, ...] = ()

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, fmt: str) -> None:
        if fmt not in self.formats:
            raise ValueError(f"unknown weight format {fmt!r}; known: {', '.join(self.formats)}")
        self.bias_O, self.out_features = bias_O, int(weight_OI.shape[0])
        self._dtype = weight_OI.dtype

    @abstractmethod
    def widened(self) -> Tensor:
        """What the numbers stand for, float32 [O, I]."""

    @abstractmethod
    def product(self, x_TI: Tensor) -> Tensor:
        """x times the weight, float32 [T, O]."""

    def run(self, x_TI: Tensor) -> Tensor:
        """[T, O] in the dtype of x."""
        y_TO = self.product(x_TI.reshape(-1, x_TI.shape[-1]))
        if self.bias_O is not None:
            y_TO = y_TO + self.bias_O.float()
        return y_TO.to(x_TI.dtype).view(*x_TI.shape[:-1], self.out_features)

    def rows(self, ids_T: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        """Rows ``ids`` of the weight times ``scale``: a quantized token table."""
        return (self.widened()[ids_T] * scale).to(dtype)

    def unpack(self) -> Tensor:
        """What the numbers stand for, [O, I] in the checkpoint's dtype."""
        return self.widened().to(self._dtype)
