"""Rewrites a float checkpoint with integer weights, in the published layouts of AWQ, GPTQ and
compressed-tensors, number by number."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

Ints = NDArray[np.int64]
FILE = "model.safetensors"
KEPT = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "shared_expert_gate")


@dataclass(frozen=True)
class Layout:
    """`kind`: awq, gptq, packed, int8, blocks. `group` 0: one scale a row. `order`: act-order,
    where inputs name their groups. `is_v2`: GPTQ with unshifted zero points."""

    kind: str
    bits: int = 4
    group: int = 32
    sym: bool = False
    order: bool = False
    is_v2: bool = False

    def config(self) -> dict[str, Any]:
        """The quantization_config that the tools of the layout write."""
        if self.kind == "awq":
            return {
                "quant_method": "awq", "bits": 4, "group_size": self.group or -1,
                "zero_point": True, "version": "gemm", "modules_to_not_convert": None,
            }  # fmt: skip
        if self.kind == "gptq":
            return {
                "quant_method": "gptq", "bits": self.bits, "group_size": self.group or -1,
                "sym": self.sym, "desc_act": self.order,
                **({"checkpoint_format": "gptq_v2"} if self.is_v2 else {}),
            }  # fmt: skip
        if self.kind == "blocks":
            return {"quant_method": "blockwise_int8", "weight_block_size": [self.group] * 2}
        weights = {
            "type": "int", "num_bits": self.bits, "symmetric": self.sym,
            "strategy": "group" if self.group else "channel", "group_size": self.group or None,
            "actorder": "group" if self.order else None,
        }  # fmt: skip
        is_packed = self.kind == "packed"
        inputs = None if is_packed else {"type": "int", "num_bits": 8, "dynamic": True}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized" if is_packed else "int-quantized",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
            "quantization_status": "compressed",
        }


def write_integers(
    source: Path, folder: Path, layout: Layout, kept: tuple[str, ...] = KEPT
) -> tuple[Path, Path]:
    """(the integer checkpoint, a float32 checkpoint with the same numbers) under `folder`."""
    narrow, wide = folder / "narrow", folder / "wide"
    for target in (narrow, wide):
        shutil.copytree(source, target)
    tensors = load_file(source / FILE)
    small, large = dict(tensors), dict(tensors)
    rng = np.random.default_rng(5)
    orders: dict[int, Ints] = {}
    for name, weight in tensors.items():
        if weight.ndim != 2 or any(part in name for part in kept):
            continue
        num_in = weight.shape[1]  # layers with the same inputs share the order
        order = orders.setdefault(num_in, rng.permutation(num_in))
        parts, numbers = stored(weight.float().numpy().astype(np.float64), layout, order)
        del small[name]
        stem = name.removesuffix(".weight")
        small |= {
            f"{stem}.{part}": torch.from_numpy(np.ascontiguousarray(value))
            for part, value in parts.items()
        }
        large[name] = torch.from_numpy(np.ascontiguousarray(numbers, np.float32))
    save_file(small, narrow / FILE)
    save_file(large, wide / FILE)
    config = json.loads((narrow / "config.json").read_text())
    config["quantization_config"] = layout.config()
    (narrow / "config.json").write_text(json.dumps(config))
    return narrow, wide


def stored(
    weight: NDArray[np.float64], layout: Layout, order: Ints
) -> tuple[dict[str, NDArray[Any]], NDArray[np.float64]]:
    """(the layout's tensors by their last names, the represented numbers)."""
    num_out, num_in = weight.shape
    group = layout.group or num_in
    index = np.arange(num_in) // group
    if layout.order:  # input order[j] is quantized as the j-th
        index[order] = np.arange(num_in) // group
    values, scale, zero = _quantized(weight, index, layout)
    if layout.kind == "blocks":
        scale = np.stack([scale[row // group * group] for row in range(num_out)])
        values = np.clip(np.round(weight / scale[:, index]), -128, 127).astype(np.int64) + 128
    numbers = (values - zero[:, index]) * scale[:, index].astype(np.float64)
    return _tensors(values, scale, zero, index, layout), numbers


def _quantized(
    weight: NDArray[np.float64], index: Ints, layout: Layout
) -> tuple[Ints, NDArray[np.float16], Ints]:
    most = (1 << layout.bits) - 1
    num_groups = int(index.max()) + 1
    scale = np.zeros((weight.shape[0], num_groups), np.float16)
    zero = np.zeros((weight.shape[0], num_groups), np.int64)
    for g in range(num_groups):
        part = weight[:, index == g]
        high, low = np.maximum(part.max(1), 0), np.minimum(part.min(1), 0)
        if layout.sym or layout.kind == "blocks":
            scale[:, g] = np.abs(part).max(1) * 2 / most
            zero[:, g] = 1 << (layout.bits - 1)
        else:
            scale[:, g] = (high - low) / most
            # version 1 stores zero points minus 1, so 0 is impossible
            least = 1 if layout.kind == "gptq" else 0
            zero[:, g] = np.clip(np.round(-low / scale[:, g]), least, most)
    values = np.round(weight / scale[:, index].astype(np.float64)).astype(np.int64)
    return np.clip(values + zero[:, index], 0, most), scale, zero


def _tensors(
    values: Ints, scale: NDArray[np.float16], zero: Ints, index: Ints, layout: Layout
) -> dict[str, NDArray[Any]]:
    bits, half = layout.bits, 1 << (layout.bits - 1)
    if layout.kind == "awq":
        outputs = (0, 2, 4, 6, 1, 3, 5, 7)
        return {
            "qweight": words(values.T, 4, outputs),
            "qzeros": words(zero.T, 4, outputs),
            "scales": scale.T,
        }
    if layout.kind == "gptq":
        return {
            "qweight": words(values, bits).T,
            "qzeros": words(zero.T - (0 if layout.is_v2 else 1), bits),
            "scales": scale.T,
            "g_idx": index.astype(np.int32),
        }
    if layout.kind == "blocks":
        return {
            "weight": (values - 128).astype(np.int8),
            "weight_scale_inv": scale[:: layout.group].astype(np.float32),
        }
    if layout.kind == "int8":
        return {"weight": (values - half).astype(np.int8), "weight_scale": scale}
    parts: dict[str, NDArray[Any]] = {
        "weight_packed": words(values, bits),
        "weight_scale": scale,
        "weight_shape": np.array(values.shape, np.int64),
    }
    if not layout.sym:
        parts["weight_zero_point"] = words(zero.T, bits).T
    if layout.order:
        parts["weight_g_idx"] = index.astype(np.int32)
    return parts


def words(rows: Ints, bits: int, places: tuple[int, ...] = ()) -> NDArray[np.int32]:
    """Consecutive numbers of a row in 32-bit words, the first lowest; some of 3, 5, 6 and 7 bits
    lie across two words. With `places`, number `places[i]` of each eight is the i-th."""
    if places:
        rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 8)))
        rows = rows.reshape(len(rows), -1, 8)[..., list(places)].reshape(rows.shape)
    stream = ((rows[..., None] >> np.arange(bits)) & 1).astype(np.uint8).reshape(len(rows), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return np.packbits(stream, axis=1, bitorder="little").view(np.int32)
