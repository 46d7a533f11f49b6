"""Weights of bitsandbytes: 4 bit numbers of a table (nf4, fp4) by blocks, and LLM.int8 rows.

    4 bits   weight uint8 [N / 2, 1], two numbers a byte, the first in the higher bits;
             weight.absmax, one for each block of the flattened weight: float32, or uint8 numbers of
             the table weight.nested_quant_map by blocks of weight.nested_absmax, plus an offset;
             weight.quant_map [16]; weight.quant_state.bitsandbytes__nf4, JSON in bytes
    8 bits   weight int8 [O, I]; SCB float32 [O], each row's largest magnitude

https://github.com/bitsandbytes-foundation/bitsandbytes (functional.py: QuantState).
"""

import json
import logging
import math
from typing import Any

import torch
from torch import Tensor

from radixlm.quant.checkpoint import StoredQuant
from radixlm.weights.packed_integers import CHUNK, Integers
from radixlm.weights.parts_source import Parts, PartsSource
from radixlm.weights.source import TensorSource

log = logging.getLogger(__name__)
_STATE = "weight.quant_state.bitsandbytes__"
_DTYPES = ("float32", "bfloat16", "float16")
_INT8_STEP = 7.874015718698502e-3  # 1 / 127, as the library rounds it


class BitsAndBytesSource(PartsSource):
    """Rows in 8 bits stay so; numbers of 4 bits, which no kernel multiplies, are dequantized."""

    def __init__(self, inner: TensorSource, quant: StoredQuant, dtype: torch.dtype) -> None:
        parts: Parts = {}
        for name in inner.sizes():
            stem, found, part = name.partition(".weight.")
            if found:
                parts.setdefault(f"{stem}.weight", {})[f"weight.{part}"] = name
            elif name.endswith(".SCB"):
                parts.setdefault(f"{name.removesuffix('.SCB')}.weight", {})["SCB"] = name
            elif name.endswith(".weight_format"):
                parts.setdefault(name.removesuffix("_format"), {})["weight_format"] = name
        for weight, names in parts.items():
            if weight in inner.sizes():
                names["weight"] = weight
        super().__init__(inner, parts, dtype)
        num_rows = sum("SCB" in names for names in parts.values())
        log.info(
            "bitsandbytes: %d weights of 8 bits; %d of 4 bits, dequantized to %s "
            "(--quantization int4wo-64 packs them again)",
            *(num_rows, len(parts) - num_rows, str(dtype).removeprefix("torch.")),
        )

    def is_integer(self, name: str) -> bool:
        return "SCB" in self._parts[name]

    def weight(self, name: str) -> Integers | Tensor:
        return self._int8(name) if self.is_integer(name) else self._four_bits(name)

    def read(self, name: str) -> Tensor:
        if "SCB" not in self._parts.get(name, ()):
            return super().read(name)
        weight = self._int8(name)  # in the library's order of products
        wide = (weight.values_OI ^ 128).view(torch.int8) * self.part(name, "SCB").float()[:, None]
        return wide.mul_(_INT8_STEP).to(self._dtype)

    def _int8(self, name: str) -> Integers:
        values, most_O = self.part(name, "weight"), self.part(name, "SCB")
        if values.dtype != torch.int8 or values.ndim != 2 or most_O.shape != values.shape[:1]:
            raise ValueError(
                f"{name} is {list(values.shape)} of {values.dtype}, its SCB {list(most_O.shape)}"
            )
        if "weight_format" in self._parts[name] and self.part(name, "weight_format").any():
            raise ValueError(f"{name} is tiled; save it with bitsandbytes 0.45 or later")
        scale_O1 = (most_O.float() * _INT8_STEP)[:, None]
        zero_O1 = torch.full_like(scale_O1, 128)
        return Integers(values.view(torch.uint8) ^ 128, scale_O1, zero_O1, values.shape[1], 8)

    def _four_bits(self, name: str) -> Tensor:
        """In the dtype that the weight had before."""
        state, shape = self._state(name)
        count = math.prod(shape)
        bytes_ = self.part(name, "weight").flatten().view(torch.uint8)
        table, most = self.part(name, "weight.quant_map").float(), self._absmax(name, state)
        block = state["blocksize"]
        found = table.numel(), bytes_.numel(), most.numel()
        if found != (16, -(-count // 2), -(-count // block)):
            raise ValueError(
                f"{name} has {bytes_.numel()} bytes and {most.numel()} blocks of {block}, which do "
                f"not make {list(shape)}"
            )
        pairs = torch.stack((table.repeat_interleave(16), table.repeat(16)), 1)  # of every byte
        out = torch.empty(bytes_.numel() * 2, dtype=getattr(torch, state["dtype"]))
        step = CHUNK // block * block or block
        for first in range(0, count, step):
            wide = pairs[bytes_[first // 2 : (first + step) // 2].int()].flatten()
            scale = most[first // block : (first + step) // block]
            out[first : first + step] = wide.mul_(scale.repeat_interleave(block)[: wide.numel()])
        return out[:count].view(shape)

    def _absmax(self, name: str, state: dict[str, Any]) -> Tensor:
        most = self.part(name, "weight.absmax")
        if most.is_floating_point():
            return most.float()
        table, outer = (
            self.part(name, "weight.nested_quant_map"),
            self.part(name, "weight.nested_absmax"),
        )
        block = state["nested_blocksize"]
        if table.shape != (256,) or outer.numel() != -(-most.numel() // block):
            raise ValueError(f"{name}.nested_absmax does not fit {most.numel()} blocks")
        scale = outer.float().repeat_interleave(block)[: most.numel()]
        return table.float()[most.int()] * scale + float(state["nested_offset"])

    def _state(self, name: str) -> tuple[dict[str, Any], tuple[int, ...]]:
        """The JSON beside a weight, checked, and its shape."""
        part = next((part for part in self._parts[name] if part.startswith(_STATE)), None)
        if part is None:
            raise ValueError(f"{name.removesuffix('weight')}{_STATE}nf4 or fp4 is missing")
        text = bytes(self.part(name, part).flatten().tolist())
        try:
            state = json.loads(text)
            shape = tuple(int(size) for size in state["shape"])
            blocks = state["blocksize"], state.setdefault("nested_blocksize", 256)
            state["nested_offset"] = float(state.get("nested_offset", 0))
            if min(*shape, *blocks) > 0 and blocks[0] % 2 == 0 and state["dtype"] in _DTYPES:
                return state, shape
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            pass
        raise ValueError(f"{self._parts[name][part]} says {text!r:.200}")
