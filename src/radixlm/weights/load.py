"""The loader: streams a checkpoint into a model, layer by layer.

Each parameter is assembled from its tensors, checked, converted to its dtype, moved to its device
and handed to its layer. A layer whose parameters are complete packs them at once, from the mapped
file or a reused buffer, so that memory peaks near the size of the weights.
"""

import logging
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from radixlm.base.errors import CheckpointError
from radixlm.base.record import Record
from radixlm.base.units import format_bytes, format_seconds
from radixlm.quant.param import Param
from radixlm.weights.mapper import LoadableLayer, LoadableModel
from radixlm.weights.options import DEFAULT, LoadOptions
from radixlm.weights.origin import (
    Origin,
    describe_origins,
    non_finite_kind,
    non_finite_origins,
)
from radixlm.weights.packed_cache import Recorder
from radixlm.weights.param_reader import CheckpointReader, DummyReader, ParamReader, listing
from radixlm.weights.sharded_state import ShardedStateReader
from radixlm.weights.size import stored_bytes

log = logging.getLogger(__name__)


class LoadReport(Record):
    """What was loaded. ``num_bytes``: memory of the weights as the layers have packed them.
    ``ignored``: checkpoint tensors that are known not to belong to the decoder."""

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
    leaves: Callable[[str], bool] | None = None,
    recorder: Recorder | None = None,
    deltas: Sequence[Path] = (),
    only: Collection[str] | None = None,
    options: LoadOptions = DEFAULT,
) -> LoadReport:
    """Fill and finish every layer of ``model`` from ``folder``.

    ``load_format`` and ``options``: how and from where (--load-format). ``progress`` shows a
    bar if stderr is a terminal. ``leaves``: whether the model leaves a tensor of this name alone,
    for models that are a part of their checkpoint. ``recorder`` notes what the layers pack.
    ``deltas``: folders of tensors that replace some of the checkpoint's, the last one first in
    rank; ``only``: names of tensors: layers without any of them stay as they are. CheckpointError
    lists missing and unknown tensors, wrong shapes, NaN, and damaged or missing files.
    """
    started = time.monotonic()
    if leaves is None and model.is_part:
        leaves = bool  # any name
    reader = open_reader(model, Path(folder), load_format, leaves, deltas, options)
    chosen = None
    if only is not None and isinstance(reader, CheckpointReader):
        chosen = reader.layers_of(only)
    filler = _Filler(model, reader, device or torch.device("cpu"), recorder)
    is_hidden = not (progress and sys.stderr.isatty())
    with closing(reader), tqdm(
        total=reader.total_bytes, desc="loading weights", unit="B", unit_scale=True,
        unit_divisor=1024, disable=is_hidden,
    ) as bar:  # fmt: skip
        layers = [pair for pair in model.layers() if chosen is None or pair[0] in chosen]
        for path, layer in reader.ordered(layers):
            bar.update(filler.fill(path, layer))
        reader.finish()
    if filler.problems:
        raise CheckpointError(
            listing(f"{reader.folder}: weights do not fit the model", filler.problems)
        )
    seconds = time.monotonic() - started
    num_bytes = stored_bytes(model)
    size, duration = format_bytes(num_bytes), format_seconds(seconds)
    kept = f"; {filler.num_quantized} stay quantized" if filler.num_quantized else ""
    log.info("loaded %d parameters, %s, in %s%s", filler.num_params, size, duration, kept)
    if filler.dequantized_bytes:
        stored, floats = (
            format_bytes(filler.quantized_bytes),
            format_bytes(filler.dequantized_bytes),
        )
        log.info("%s of quantized weights were dequantized to %s of floats", stored, floats)
    return LoadReport(filler.num_params, num_bytes, seconds, reader.ignored)


def open_reader(
    model: LoadableModel,
    folder: Path,
    load_format: str,
    leaves: Callable[[str], bool] | None = None,
    deltas: Sequence[Path] = (),
    options: LoadOptions = DEFAULT,
) -> ParamReader:
    """The reader of parameter values, by ``--load-format``."""
    if load_format == "dummy":
        return DummyReader(folder, model, deltas)
    if load_format == "sharded_state":
        return ShardedStateReader(model, folder, options)
    return CheckpointReader(model, folder, load_format, leaves, deltas, options)


class _Filler:
    """Fills layers until the first problem; from then on it only looks for further ones."""

    def __init__(
        self,
        model: LoadableModel,
        reader: ParamReader,
        device: torch.device,
        recorder: Recorder | None,
    ) -> None:
        self.problems: list[str] = []
        self.num_params = 0
        self.num_quantized = 0
        self.dequantized_bytes = self.quantized_bytes = (
            0  # of weights that no layer could keep quantized
        )
        self._weight_dtype, self._reader, self._device = model.weight_dtype, reader, device
        self._folder, self._recorder = reader.folder, recorder

    def fill(self, layer_path: str, layer: LoadableLayer) -> int:
        """Fill one layer and return the bytes read. CheckpointError for values that the layer
        refuses; all else goes to ``problems``."""
        filled = []
        for name, param in layer.own_params().items():
            path = f"{layer_path}.{name}"
            try:
                if not (param.accepts_quantized and self._fill_quantized(path, param)):
                    self._fill(path, param)
                filled.append(path)
            except ValueError as error:
                self._refuse(f"{path} cannot be made: {error}", self._reader.origins(path), True)
        if not self.problems:
            try:
                if self._recorder is None:
                    layer.finish()
                else:
                    self._recorder.finish(layer_path, layer)
            except CheckpointError as error:
                origins = [o for path in filled for o in self._reader.origins(path)]
                where = describe_origins(origins, self._folder)
                message = f"{self._folder}: {layer_path}: {error} ({where})"
                raise CheckpointError(message) from error
        return sum(self._reader.release(path) for path in filled)

    def _fill(self, path: str, param: Param) -> None:
        value = self._reader.read(path, param)
        if mismatch := describe_mismatch(path, param, value):
            self._refuse(mismatch, self._reader.origins(path), True)
        elif bad := non_finite_problem(path, value):
            self._refuse(bad, non_finite_origins(self._reader.origins(path)))
        elif not self.problems:
            param.fill(value, self._weight_dtype, self._device)
            num_bytes = 0 if param.value is None else param.value.nbytes
            if stored := self._reader.quantized_bytes(path):
                self.quantized_bytes += stored
                self.dequantized_bytes += num_bytes
        self.num_params += 1

    def _fill_quantized(self, path: str, param: Param) -> bool:
        """Give the layer the quantized weight as it is stored; False if that is not possible."""
        is_cpu = self._device.type == "cpu"
        if not is_cpu and self._weight_dtype == torch.float32:
            return False  # kernels of GPUs multiply integers with 16 bit floats
        weight = self._reader.read_quantized(path, param)
        if weight is None or (weight.is_fp4 and not is_cpu):
            return False  # no kernel of GPUs has floats of 4 bits
        if tuple(weight.values_OI.shape) != param.shape:
            mismatch = describe_mismatch(path, param, weight.values_OI)
            self._refuse(mismatch, self._reader.origins(path), True)
        elif bad := non_finite_problem(path, torch.cat((weight.scale_OG, weight.offset_OG))):
            self._refuse(bad, non_finite_origins(self._reader.origins(path)))
        else:
            param.quantized = weight if is_cpu else weight.to(self._device)
            self.num_quantized += 1
        self.num_params += 1
        return True

    def _refuse(self, problem: str, origins: Sequence[Origin], shapes: bool = False) -> None:
        self.problems.append(f"{problem} ({describe_origins(origins, self._folder, shapes)})")


def describe_mismatch(path: str, param: Param, value: Tensor) -> str:
    """How shape or dtype of ``value`` differ from ``param``, naming both sides; "" if they fit."""
    if tuple(value.shape) != param.shape:
        return f"{path} is {list(param.whole_shape)}, the checkpoint has {list(value.shape)}"
    if param.storage == "int64":
        is_whole = not value.is_floating_point()
        return "" if is_whole else f"{path} is of integers, the checkpoint has {value.dtype}"
    if not value.is_floating_point():
        return f"{path} is a floating-point weight, the checkpoint has {value.dtype}"
    if value.dtype.itemsize == 1:
        return f"{path} is in 8 bit floats, which quantization_config does not mention"
    return ""


def non_finite_problem(path: str, value: Tensor) -> str:
    """A message if a parameter holds NaN or infinity, else ""."""
    kind = non_finite_kind(value)
    if kind == "infinity" and path.endswith("bias"):
        return ""  # such a bias forbids a token or an expert
    return f"{path} holds {kind} in the checkpoint" if kind else ""
