"""The packed cache: loaded layers as the kernels hold them, in one file, mapped at the next start.

While a model loads, a ``LayerRecorder`` notes what each layer packs and which values it keeps.
``load_packed`` makes the same layers from the file: it fills their parameters with stand-ins
without numbers and calls ``finish`` as the loader does; what the layer packs comes from the file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from radixlm.kernels.cpu.linear import Buffers, PackedLinear
from radixlm.kernels.packing import tapped
from radixlm.quant.param import Param
from radixlm.quant.prequantized import KernelWeight
from radixlm.quant.quantized_weight import QuantizedWeight
from radixlm.weights.mapper import LoadableLayer, LoadableModel
from radixlm.weights.packed_file import (
    DTYPES,
    FileWriter,
    LayerEntry,
    MappedFile,
    Note,
    Pack,
    PackedFile,
    Place,
    UnfitModelError,
    dtype_name,
)
from radixlm.weights.size import reachable

log = logging.getLogger(__name__)
T = TypeVar("T")
_BUFFERS = tuple(field.name for field in fields(Buffers))


class LayerRecorder:
    """A PackTap that notes what one layer does in ``finish``."""

    def __init__(self, params: Mapping[str, Param]) -> None:
        """``params``: filled, not taken yet."""
        self._names = {id(param): name for name, param in params.items()}
        self._dtypes = {
            name: "" if param.value is None else dtype_name(param.value.dtype)
            for name, param in params.items()
        }
        self._kept: dict[str, Tensor] = {}
        self._packs: list[PackedLinear] = []
        self._notes: list[KernelWeight] = []

    def packed(self, make: Callable[[], T]) -> T:
        made = make()
        self._packs.append(cast(PackedLinear, made))
        return made

    def noted(self, make: Callable[[], T]) -> T:
        made = make()
        self._notes.append(cast(KernelWeight, made))
        return made

    def kept(self, param: Any, value: Tensor) -> None:
        self._kept[self._names[id(param)]] = value

    def write(self, writer: FileWriter) -> LayerEntry:
        """Write the layer's memory."""
        kept = {name: writer.add(value.contiguous()) for name, value in self._kept.items()}
        packs = [_write_pack(packed, writer) for packed in self._packs]
        notes = []
        for note in self._notes:
            scale, offset = note.scales
            index = None if note.index_J is None else writer.add(note.index_J)
            shape, dtype = tuple(note.values.shape), dtype_name(note.values.dtype)
            notes.append(
                Note(shape, dtype, note.fmt, tuple(scale.shape), offset is not None, index)
            )
        return LayerEntry(self._dtypes, kept, packs, notes)


def _write_pack(packed: PackedLinear, writer: FileWriter) -> Pack:
    places = {}
    for name in _BUFFERS:
        value = getattr(packed.buffers, name)
        if name == "data":
            value = packed.tensors()[0]
        if value is not None:
            places[name] = writer.add(value)
    return Pack(
        packed.num_out, packed.num_in, packed.fmt, packed.is_paired, packed.zero_points, places
    )


class MappedMemory:
    """A part of a mapped file, in place of the extension's ``Memory``."""

    def __init__(self, file: MappedFile, place: Place) -> None:
        self._memory = file.memory  # stays mapped as long as this is used
        file.tensor(place)  # lies within the file
        self.address, self.num_bytes = file.address + place.at, place.num_bytes


class LayerReplay:
    """A PackTap that gives one layer what was recorded. PackedFileError where the layer asks for
    something else."""

    def __init__(self, file: MappedFile, entry: LayerEntry) -> None:
        self._file, self._entry = file, entry
        self._packs, self._notes = iter(entry.packs), iter(entry.notes)

    def fill(self, params: Mapping[str, Param]) -> None:
        """Fill parameters with values that the layer keeps, and with stand-ins."""
        if params.keys() != self._entry.dtypes.keys():
            raise UnfitModelError("a layer has other parameters")
        for name, dtype in self._entry.dtypes.items():
            param = params[name]
            if place := self._entry.kept.get(name):
                param.value = self._file.tensor(place)
            elif dtype:
                param.value = torch.empty(param.shape, dtype=DTYPES[dtype], device="meta")
            else:
                meta = torch.empty(param.shape, dtype=torch.uint8, device="meta")
                param.quantized = QuantizedWeight(meta, meta, meta)
            param.is_borrowed = False

    def packed(self, make: Callable[[], T]) -> T:
        pack = next(self._packs, None)
        if pack is None:
            raise UnfitModelError("a layer packs more than was recorded")
        buffers: dict[str, Any] = dict.fromkeys(_BUFFERS)
        for name, place in pack.buffers.items():
            is_data = name == "data"
            buffers[name] = MappedMemory(self._file, place) if is_data else self._file.tensor(place)
        made = PackedLinear(
            pack.num_out, pack.num_in, pack.fmt, None, pack.is_paired,
            cast(Any, pack.zero_points), Buffers(**buffers),
        )  # fmt: skip
        return cast(T, made)

    def noted(self, make: Callable[[], T]) -> T:
        note = next(self._notes, None)
        if note is None:
            raise UnfitModelError("a layer reads more integers than was recorded")
        values = torch.empty(note.shape, dtype=DTYPES[note.dtype], device="meta")
        scale = torch.empty(note.scale_shape, device="meta")
        index = None if note.index is None else self._file.tensor(note.index)
        weight = KernelWeight(values, note.fmt, (scale, scale if note.has_offset else None), index)
        return cast(T, weight)

    def kept(self, param: Any, value: Tensor) -> None:
        if value.is_meta:
            raise UnfitModelError("a layer keeps a value that was not recorded")


class Recorder(Protocol):
    """Finishes the layers of a model that is loaded."""

    def finish(self, path: str, layer: LoadableLayer) -> None:
        """Call ``finish`` of a filled layer and note what it does."""


class ModelRecorder:
    """What all layers of a model pack, until it is written."""

    def __init__(self) -> None:
        self._layers: dict[str, LayerRecorder] = {}

    def finish(self, path: str, layer: LoadableLayer) -> None:
        self._layers[path] = recorder = LayerRecorder(layer.own_params())
        with tapped(recorder):
            layer.finish()

    def write(self, writer: FileWriter, facts: dict[str, Any], stops: Callable[[], bool]) -> None:
        """Write all layers and finish the file, unless it ``stops`` before."""
        entries = {}
        for path, recorder in self._layers.items():
            if stops():
                writer.close()
                return
            entries[path] = recorder.write(writer)
        writer.finish(facts, entries)


class StreamingRecorder:
    """Writes each layer as it is packed and maps what it has written, so that a model may be larger
    than memory."""

    def __init__(self, writer: FileWriter, max_bytes: int) -> None:
        """``max_bytes``: more than the file will have."""
        os.ftruncate(writer.descriptor, max_bytes)  # holes, which take no room
        self.file = MappedFile(writer.descriptor, max_bytes)
        self.layers: dict[str, LayerEntry] = {}
        self._writer = writer

    def finish(self, path: str, layer: LoadableLayer) -> None:
        """As of ``ModelRecorder``, twice: the second time with mapped memory."""
        params = layer.own_params()
        recorder = LayerRecorder(params)
        with tapped(recorder):
            layer.finish()
        self.layers[path] = entry = recorder.write(self._writer)
        self._writer.sync()
        replay_layer(self.file, entry, path, layer)

    def close(self) -> None:
        """Give up the file."""
        self._writer.close()

    def write(self, facts: dict[str, Any]) -> None:
        """Finish the file."""
        self._writer.finish(facts, self.layers)


def replay_layer(file: MappedFile, entry: LayerEntry, path: str, layer: LoadableLayer) -> None:
    """Make one layer from a file; PackedFileError if it is of another one."""
    replay = LayerReplay(file, entry)
    try:
        replay.fill(layer.own_params())
        with tapped(replay):
            layer.finish()
    except (NotImplementedError, RuntimeError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnfitModelError(f"{path or 'the model'} cannot be made: {reason}") from error


def load_packed(model: LoadableModel, file: PackedFile) -> None:
    """Make all layers of ``model`` from the file. PackedFileError if it is of another model: some
    layers are made then, and the loader makes all of them again."""
    for path, layer in model.layers():
        entry = file.table.layers.get(path)
        if entry is None:
            raise UnfitModelError(f"it lacks {path or 'the model'}")
        replay_layer(file, entry, path, layer)
    if any(isinstance(item, Tensor) and item.is_meta for item in reachable(model)):
        raise UnfitModelError("a layer computes with values that were not recorded")
