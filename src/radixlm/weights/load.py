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
from radixlm.weights.assemble import Fillable, Target
from radixlm.weights.feeder import CheckpointFeeder, DummyFeeder, Feeder, listing
from radixlm.weights.origin import Origin, faulty, named
from radixlm.weights.place import bad_number_of, misfit_of, place
from radixlm.weights.progress import Progress
from radixlm.weights.sharded_state import ShardedStateFeeder

log = logging.getLogger(__name__)


class LoadReport(Record):
    """What a load did. ``num_bytes`` is the size of the parameters as stored; ``ignored`` are
    checkpoint tensors that are known to be no part of the decoder."""

    num_params: int
    num_bytes: int
    seconds: float
    ignored: tuple[str, ...]


def load_weights(
    model: Target,
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
    feeder = open_feeder(model, Path(folder), load_format)
    filler = _Filler(model, feeder, device or torch.device("cpu"))
    with Progress("loading weights", feeder.total_bytes, progress) as bar:
        for path, layer in model.layers():
            filler.fill(path, layer, bar)
    if filler.problems:
        raise CheckpointError(
            listing(f"{feeder.folder}: weights do not fit the model", filler.problems)
        )
    seconds = time.monotonic() - started
    size, duration = format_bytes(filler.num_bytes), format_seconds(seconds)
    kept = f"; {filler.num_grids} keep their few bits" if filler.num_grids else ""
    log.info("loaded %d parameters, %s, in %s%s", filler.num_params, size, duration, kept)
    if filler.wide_bytes:
        wide, narrow = format_bytes(filler.wide_bytes), format_bytes(filler.narrow_bytes)
        log.info("of few bits, %s were widened to floats: %s", narrow, wide)
    return LoadReport(filler.num_params, filler.num_bytes, seconds, feeder.ignored)


def open_feeder(model: Target, folder: Path, load_format: str) -> Feeder:
    """Where the values come from, by ``--load-format``."""
    if load_format == "dummy":
        return DummyFeeder(folder)
    if load_format == "sharded_state":
        return ShardedStateFeeder(model, folder)
    return CheckpointFeeder(model, folder, load_format)


class _Filler:
    """Fills layers until the first problem; from then on it only looks for further ones."""

    def __init__(self, model: Target, feeder: Feeder, device: torch.device) -> None:
        self.problems: list[str] = []
        self.num_params = 0
        self.num_grids = 0
        self.num_bytes = 0
        self.wide_bytes = self.narrow_bytes = 0  # of few bits that no layer could keep
        self._weight_dtype, self._feeder, self._device = model.weight_dtype, feeder, device
        self._folder = feeder.folder

    def fill(self, layer_path: str, layer: Fillable, bar: Progress) -> None:
        """CheckpointError for values that a layer refuses; all else goes to ``problems``."""
        done = []
        for name, param in layer.own_params().items():
            path = f"{layer_path}.{name}"
            try:
                if not (param.takes_grid and self._fill_grid(path, param)):
                    self._fill(path, param)
                done.append(path)
            except ValueError as error:
                self._refuse(f"{path} cannot be made: {error}", self._feeder.origins(path), True)
        if not self.problems:
            try:
                layer.finish()
            except CheckpointError as error:
                origins = [o for path in done for o in self._feeder.origins(path)]
                where = named(origins, self._folder)
                message = f"{self._folder}: {layer_path}: {error} ({where})"
                raise CheckpointError(message) from error
        for path in done:
            bar.advance(self._feeder.release(path))

    def _fill(self, path: str, param: Param) -> None:
        value = self._feeder.feed(path, param)
        if misfit := misfit_of(path, param, value):
            self._refuse(misfit, self._feeder.origins(path), True)
        elif bad := bad_number_of(path, value):
            self._refuse(bad, faulty(self._feeder.origins(path)))
        elif not self.problems:
            place(value, param, self._weight_dtype, self._device)
            num_bytes = 0 if param.value is None else param.value.nbytes
            self.num_bytes += num_bytes
            if narrow := self._feeder.narrow_bytes(path):
                self.narrow_bytes += narrow
                self.wide_bytes += num_bytes
        self.num_params += 1

    def _fill_grid(self, path: str, param: Param) -> bool:
        """Whether the checkpoint has the weight in few bits that the layer can keep."""
        is_cpu = self._device.type == "cpu"
        if not is_cpu and self._weight_dtype == torch.float32:
            return False  # kernels of GPUs multiply integers with 16 bit floats
        grid = self._feeder.grid(path)
        if grid is None:
            return False
        if tuple(grid.values_OI.shape) != param.shape:
            misfit = misfit_of(path, param, grid.values_OI)
            self._refuse(misfit, self._feeder.origins(path), True)
        elif bad := bad_number_of(path, torch.cat((grid.scale_OG, grid.offset_OG))):
            self._refuse(bad, faulty(self._feeder.origins(path)))
        else:
            param.grid = grid if is_cpu else grid.to(self._device)
            self.num_bytes += grid.num_bytes
            self.num_grids += 1
        self.num_params += 1
        return True

    def _refuse(self, problem: str, origins: Sequence[Origin], shapes: bool = False) -> None:
        self.problems.append(f"{problem} ({named(origins, self._folder, shapes)})")
