"""The one loader: streams a checkpoint into a model, layer by layer.

Each parameter is joined from its tensors, checked, brought to its dtype and device, and handed to
its layer; a layer that is complete packs its weights at once from the mapped file or a buffer that
is used again, so that memory peaks near the size of the weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from radixlm.base.errors import CheckpointError
from radixlm.base.record import Record
from radixlm.base.units import format_bytes, format_seconds
from radixlm.quant.param import Param
from radixlm.weights.mapper import LoadableLayer, LoadableModel
from radixlm.weights.origin import Origin, describe_origins, non_finite_origins
from radixlm.weights.param_reader import CheckpointReader, DummyReader, ParamReader, listing
from radixlm.weights.place import describe_mismatch, non_finite_problem, place
from radixlm.weights.progress import Progress
from radixlm.weights.sharded_state import ShardedStateReader

log = logging.getLogger(__name__)


class LoadReport(Record):
    """What a load did. ``num_bytes`` is the size of the parameters as stored; ``ignored`` are
    checkpoint tensors that are known to be no part of the decoder."""

    num_params: int
    num_bytes: int
    seconds: float
    ignored: tuple[str, ...]


def load_weights(
    model: LoadableModel,
    folder: str | Path,
    load_format: str = "auto",
    *,
    device: torch.device | None = None,
    progress: bool = True,
) -> LoadReport:
    """Fill and finish every layer of ``model`` from ``folder``.

    ``load_format``: auto, safetensors, pt, npcache, dummy or sharded_state. ``progress`` shows a
    bar where stderr is a terminal. CheckpointError lists missing and unknown tensors, shapes that
    do not fit, NaN, and damaged or missing files.
    """
    started = time.monotonic()
    reader = open_reader(model, Path(folder), load_format)
    filler = _Filler(model, reader, device or torch.device("cpu"))
    with Progress("loading weights", reader.total_bytes, progress) as bar:
        for path, layer in model.layers():
            filler.fill(path, layer, bar)
    if filler.problems:
        raise CheckpointError(
            listing(f"{reader.folder}: weights do not fit the model", filler.problems)
        )
    seconds = time.monotonic() - started
    size, duration = format_bytes(filler.num_bytes), format_seconds(seconds)
    kept = f"; {filler.num_quantized} keep their few bits" if filler.num_quantized else ""
    log.info("loaded %d parameters, %s, in %s%s", filler.num_params, size, duration, kept)
    if filler.dequantized_bytes:
        wide, narrow = format_bytes(filler.dequantized_bytes), format_bytes(filler.quantized_bytes)
        log.info("of few bits, %s were widened to floats: %s", narrow, wide)
    return LoadReport(filler.num_params, filler.num_bytes, seconds, reader.ignored)


def open_reader(model: LoadableModel, folder: Path, load_format: str) -> ParamReader:
    """Where the values come from, by ``--load-format``."""
    if load_format == "dummy":
        return DummyReader(folder)
    if load_format == "sharded_state":
        return ShardedStateReader(model, folder)
    return CheckpointReader(model, folder, load_format)


class _Filler:
    """Fills layers until the first problem; from then on it only looks for further ones."""

    def __init__(self, model: LoadableModel, reader: ParamReader, device: torch.device) -> None:
        self.problems: list[str] = []
        self.num_params = 0
        self.num_quantized = 0
        self.num_bytes = 0
        self.dequantized_bytes = self.quantized_bytes = 0  # of few bits that no layer could keep
        self._weight_dtype, self._reader, self._device = model.weight_dtype, reader, device
        self._folder = reader.folder

    def fill(self, layer_path: str, layer: LoadableLayer, bar: Progress) -> None:
        """CheckpointError for values that a layer refuses; all else goes to ``problems``."""
        done = []
        for name, param in layer.own_params().items():
            path = f"{layer_path}.{name}"
            try:
                if not (param.accepts_quantized and self._fill_quantized(path, param)):
                    self._fill(path, param)
                done.append(path)
            except ValueError as error:
                self._refuse(f"{path} cannot be made: {error}", self._reader.origins(path), True)
        if not self.problems:
            try:
                layer.finish()
            except CheckpointError as error:
                origins = [o for path in done for o in self._reader.origins(path)]
                where = describe_origins(origins, self._folder)
                message = f"{self._folder}: {layer_path}: {error} ({where})"
                raise CheckpointError(message) from error
        for path in done:
            bar.advance(self._reader.release(path))

    def _fill(self, path: str, param: Param) -> None:
        value = self._reader.read(path, param)
        if misfit := describe_mismatch(path, param, value):
            self._refuse(misfit, self._reader.origins(path), True)
        elif bad := non_finite_problem(path, value):
            self._refuse(bad, non_finite_origins(self._reader.origins(path)))
        elif not self.problems:
            place(value, param, self._weight_dtype, self._device)
            num_bytes = 0 if param.value is None else param.value.nbytes
            self.num_bytes += num_bytes
            if narrow := self._reader.quantized_bytes(path):
                self.quantized_bytes += narrow
                self.dequantized_bytes += num_bytes
        self.num_params += 1

    def _fill_quantized(self, path: str, param: Param) -> bool:
        """Whether the checkpoint has the weight in few bits that the layer can keep."""
        is_cpu = self._device.type == "cpu"
        if not is_cpu and self._weight_dtype == torch.float32:
            return False  # kernels of GPUs multiply integers with 16 bit floats
        grid = self._reader.read_quantized(path)
        if grid is None:
            return False
        if tuple(grid.values_OI.shape) != param.shape:
            misfit = describe_mismatch(path, param, grid.values_OI)
            self._refuse(misfit, self._reader.origins(path), True)
        elif bad := non_finite_problem(path, torch.cat((grid.scale_OG, grid.offset_OG))):
            self._refuse(bad, non_finite_origins(self._reader.origins(path)))
        else:
            param.quantized = grid if is_cpu else grid.to(self._device)
            self.num_bytes += grid.num_bytes
            self.num_quantized += 1
        self.num_params += 1
        return True

    def _refuse(self, problem: str, origins: Sequence[Origin], shapes: bool = False) -> None:
        self.problems.append(f"{problem} ({describe_origins(origins, self._folder, shapes)})")
