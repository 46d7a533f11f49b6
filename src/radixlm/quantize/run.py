"""Quantize one checkpoint: read, scale, round, write, report."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.base.record import Record
from radixlm.base.units import format_bytes
from radixlm.quant.checkpoint import checkpoint_quant
from radixlm.quantize.calibration import Scales
from radixlm.quantize.methods import (
    Method,
    Rounded,
    quantization_config,
    round_weight,
    tensors_of,
)
from radixlm.quantize.selection import linear_weights
from radixlm.quantize.writer import Spec, copy_others, write
from radixlm.weights.dummy import checkpoint_dtype
from radixlm.weights.folder import open_folder
from radixlm.weights.source import TensorSource


class Report(Record):
    """``errors``: of each rounded weight, the norm of its change by its own norm."""

    method: str
    num_bytes_before: int
    num_bytes: int
    errors: dict[str, float]
    kept: list[str]

    def lines(self, count: int = 5) -> list[str]:
        """For people: sizes, the mean error and the worst layers."""
        errors = sorted(self.errors.items(), key=lambda item: -item[1])
        mean = sum(self.errors.values()) / max(1, len(self.errors))
        before, after = format_bytes(self.num_bytes_before), format_bytes(self.num_bytes)
        head = f"{len(errors)} weights by {self.method}: {before} -> {after}"
        worst = [f"  {error:.4f}  {name}" for name, error in errors[:count]]
        return [head, f"relative error: mean {mean:.4f}; largest:", *worst]


class Quantizer:
    """``scales``: of a calibration."""

    def __init__(self, source: Path, method: Method, scales: Scales | None = None) -> None:
        """CheckpointError: nothing to quantize, or it is quantized already."""
        if checkpoint_quant(source) is not None:
            raise CheckpointError(f"{source}: already quantized; give the checkpoint of floats")
        self._folder, self._method, self._scales = source, method, scales or Scales()
        self._source: TensorSource = open_folder(source, "auto")
        self._dtype = checkpoint_dtype(source)
        shapes = {name: tuple(self._source.read(name).shape) for name in self._source.sizes()}
        wanted = linear_weights(source, self._source)
        fitting = {name: method.fitting(shapes[name]) for name in wanted}
        self._chosen = {name: one for name, one in fitting.items() if one is not None}
        if not self._chosen:
            raise ConfigError(
                f"--method {method.name}: no weight has inputs in groups of 32; use --method int8wo"
            )
        scaled = self._scales.into.keys() | self._scales.out_of.keys()
        if unknown := [name for name in scaled if f"{name}.weight" not in shapes]:
            raise ConfigError(
                f"--method {method.name}: the checkpoint has no {min(unknown)}.weight, which "
                "transformers' model has; use --method int4wo-128"
            )
        self._shapes, self._errors = shapes, dict[str, float]()

    def write(self, target: Path, shard_bytes: int) -> Report:
        """Write the checkpoint to the new folder ``target``."""
        needed = sum(spec.num_bytes for spec in self._specs())
        free = shutil.disk_usage(target).free
        if free < needed:
            raise ConfigError(
                f"-o {target}: {format_bytes(free)} free, {format_bytes(needed)} needed"
            )
        copy_others(self._folder, target)
        total = write(target, self._specs(), self._values(), shard_bytes)
        kept = [
            name.removesuffix(".weight")
            for name, shape in self._shapes.items()
            if name.endswith(".weight") and len(shape) == 2 and name not in self._chosen
        ]
        config = json.loads((self._folder / "config.json").read_bytes())
        kept += [] if "lm_head" in kept else ["lm_head"]  # tied, it has no tensor
        others: dict[Method, list[str]] = {}
        for name, one in self._chosen.items():
            if one != self._method:
                others.setdefault(one, []).append(name.removesuffix(".weight"))
        config["quantization_config"] = quantization_config(self._method, others, kept)
        (target / "config.json").write_text(json.dumps(config, indent=2))
        before = sum(self._source.sizes().values())
        report = Report(self._method.name, before, total, self._errors, kept)
        (target / "quantize_report.json").write_text(json.dumps(_plain(report), indent=1))
        return report

    def _specs(self) -> Iterator[Spec]:
        for name, shape in self._shapes.items():
            if name not in self._chosen:
                yield Spec(name, self._source.read(name).dtype, shape)
                continue
            method, stem = self._chosen[name], name.removesuffix(".weight")
            num_groups = shape[1] // method.group if method.group else 1
            if is_packed := method.format == "pack-quantized":
                packed = (shape[0], shape[1] * method.bits // 32)
                yield Spec(f"{stem}.weight_packed", torch.int32, packed)
            else:
                kind = torch.float8_e4m3fn if method.is_float else torch.int8
                yield Spec(name, kind, shape)
            yield Spec(f"{stem}.weight_scale", self._dtype, (shape[0], num_groups))
            if is_packed:
                yield Spec(f"{stem}.weight_shape", torch.int64, (2,))

    def _values(self) -> Iterator[Tensor]:
        bar = tqdm(
            total=sum(self._source.sizes().values()), desc="quantizing", unit="B", unit_scale=True,
            unit_divisor=1024, disable=None,
        )  # fmt: skip
        with bar:
            for name in self._shapes:
                yield from self._tensors(name)
                self._source.release(name)
                bar.update(self._source.sizes()[name])

    def _tensors(self, name: str) -> Iterator[Tensor]:
        module, _, part = name.rpartition(".")
        value = self._source.read(name)
        if self._scales.changes(module):
            value = self._scales.apply(module, part, value).to(
                torch.float32 if name in self._chosen else value.dtype
            )
        if name not in self._chosen:
            yield value
            return
        weight = value.float()
        if not weight.isfinite().all():
            raise CheckpointError(f"{self._folder}: {name} holds NaN or infinity")
        importance = self._scales.importance.get(module)
        method = self._chosen[name]
        rounded: Rounded = round_weight(weight, method, self._dtype, importance)
        norm = float(weight.norm())
        self._errors[name] = float((rounded.weight() - weight).norm()) / norm if norm else 0.0
        yield from tensors_of(rounded, method).values()


def _plain(report: Report) -> dict[str, object]:
    return {name: getattr(report, name) for name in report.__annotations__}
