"""Weights of HQQ: weight = (value - zero) * scale in the dtype of the scale, zero no whole number.

    W_q    uint8, of 3 bits int32: the values' rows in as many equal blocks as numbers fit in an
           item, the first block in the highest bits
    scale, zero, and as small tensors: nbits, axis, group_size, shape, packing, ...

With ``axis`` 1 the values are [O * I / group, group]: groups of consecutive inputs. With axis 0
they are [group, O * I / group], which no kernel multiplies. https://github.com/mobiusml/hqq
"""

import logging
import math

import torch
from torch import Tensor

from radixlm.quant.checkpoint import StoredQuant
from radixlm.weights.packed_integers import Integers
from radixlm.weights.parts_source import PartsSource, find_parts
from radixlm.weights.source import TensorSource

log = logging.getLogger(__name__)
_PARTS = (
    *("W_q", "scale", "zero", "nbits", "axis", "group_size", "shape", "packing", "view_as_float"),
    *("unpack_view_dtype", "quant_scale", "quant_zero", "compute_dtype", "offload_meta"),
    *("encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero"),
)
_PER_ITEM = {8: 1, 6: 1, 5: 1, 4: 2, 3: 10, 2: 4, 1: 8}  # bits -> numbers in an item of W_q


class HqqSource(PartsSource):
    """Groups of consecutive inputs stay integers, other groups are dequantized."""

    def __init__(self, inner: TensorSource, quant: StoredQuant, dtype: torch.dtype) -> None:
        parts = find_parts(inner, _PARTS)
        super().__init__(inner, {n: p for n, p in parts.items() if "W_q" in p}, dtype)
        num_groups = sum(map(self.is_integer, self._parts))
        log.info(
            "hqq: %d weights in groups of inputs; %d in groups of outputs (axis 0), dequantized to "
            "%s", num_groups, len(self._parts) - num_groups, str(dtype).removeprefix("torch."),
        )  # fmt: skip

    def is_integer(self, name: str) -> bool:
        return self._number(name, "axis") == 1

    def weight(self, name: str) -> Integers | Tensor:
        shape = tuple(self.part(name, "shape").tolist())
        bits, axis = self._number(name, "nbits"), self._number(name, "axis")
        count = math.prod(shape)
        group = self._number(name, "group_size") if "group_size" in self._parts[name] else 0
        group = group or shape[-1]
        if len(shape) != 2 or bits not in _PER_ITEM or group < 1 or count % group:
            raise ValueError(f"{name} is {list(shape)} of {bits} bits in groups of {group}")
        values = self._values(name, bits, group if axis == 0 else count // group)
        scale, zero = self.part(name, "scale"), self.part(name, "zero")
        if values.numel() != count or scale.numel() != count // group != zero.numel():
            raise ValueError(
                f"{name} has {values.numel()} values and {scale.numel()} scales, which do not make "
                f"{list(shape)} in groups of {group}"
            )
        if axis == 0:
            return ((values.to(scale.dtype) - zero) * scale).view(shape)
        scale_OG, zero_OG = (t.view(shape[0], -1) for t in (scale, zero.expand_as(scale)))
        values = values.view(shape)
        return Integers(
            values, scale_OG.float(), zero_OG.float(), min(group, shape[1]), bits, None, scale.dtype
        )

    def _values(self, name: str, bits: int, num_rows: int) -> Tensor:
        """uint8 [num_rows, ...]."""
        items, per_item = self.part(name, "W_q"), _PER_ITEM[bits]
        if "view_as_float" in self._parts[name] and self._number(name, "view_as_float"):
            items = items.view(torch.int32 if bits == 3 else torch.uint8)
        width = bits if per_item > 1 else 8
        blocks = [
            (items >> (width * place)) & ((1 << width) - 1) for place in reversed(range(per_item))
        ]
        return torch.cat(blocks).to(torch.uint8)[:num_rows]

    def _number(self, name: str, part: str) -> int:
        value = self.part(name, part)
        if value.numel() != 1:
            raise ValueError(f"{name.removesuffix('.weight')}.{part} is {list(value.shape)}")
        return int(value)
